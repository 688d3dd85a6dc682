/*
 * A rank's segment: shared memory without a name, which its owner writes and the other ranks read. The length never
 * changes and costs nothing, because pages are allocated at their first use.
 */
#ifndef DSC_COMM_SEGMENT_H
#define DSC_COMM_SEGMENT_H

#include "dsc/comm.h"

#include <stdatomic.h>
#include <sys/types.h>

#define DSC_COMM_MAGIC UINT64_C(0x6d6d6f6363736405)
#define DSC_COMM_VERSION 1u

/*
 * Data that goes through the staging area in one round fits a small lane; a chunk fills a lane. Lanes of 64 KiB to 1
 * MiB were measured with 64 MiB between 2 ranks: longer lanes take less time, and the last doubling saves a twentieth.
 */
#define DSC_COMM_SMALL_BYTES ((int64_t)64 << 10)
#define DSC_COMM_LANE_BYTES ((int64_t)1 << 20)

enum {
    DSC_COMM_PAGE = 4096,
    DSC_COMM_LINE = 64,
    DSC_COMM_N_LANES = 4, /* two for inputs, two for reduced data */
    DSC_COMM_WHY_BYTES = 320,
    DSC_COMM_SHOWN_BYTES = 64,
};

/* Where each part begins. The arena begins where a huge page can. */
#define DSC_COMM_AT_CONTROL ((int64_t)DSC_COMM_PAGE)
#define DSC_COMM_AT_SMALL ((int64_t)2 * DSC_COMM_PAGE)
#define DSC_COMM_AT_LANES (DSC_COMM_AT_SMALL + 2 * DSC_COMM_SMALL_BYTES)
#define DSC_COMM_AT_MAILBOXES (DSC_COMM_AT_LANES + DSC_COMM_N_LANES * DSC_COMM_LANE_BYTES)
#define DSC_COMM_AT_ARENA ((int64_t)8 << 20)

/* Never written after the segment has been made. */
struct dsc_comm_header {
    uint64_t magic;
    uint32_t version;
    uint32_t layout; /* the layout of this segment; different builds refuse one another */
    uint8_t token[16];
    int32_t rank;
    int32_t n_ranks;
    int64_t n_bytes;
};

/* A rank's call, posted for the other ranks before the call begins. */
struct dsc_comm_post {
    int32_t op;
    int32_t type;
    int32_t combine;
    int32_t src;
    int64_t n_elems;
    double scale;
    int64_t offset; /* the data's, in the segment, when is_in_place */
    int32_t is_in_place;
    int64_t in_splits[DSC_COMM_MAX_RANKS];
    uint64_t label_hash;
    char label[DSC_COMM_SHOWN_BYTES]; /* the begin of it, in ASCII, for sentences */
};

enum dsc_comm_state { DSC_COMM_OPEN, DSC_COMM_FAILED, DSC_COMM_CLOSED };

/* [Note: Ticks] in pipeline.c explains the tick. */
struct dsc_comm_control {
    _Alignas(DSC_COMM_LINE) _Atomic uint32_t tick;
    _Atomic uint32_t state;                                /* why is written before it */
    _Alignas(DSC_COMM_LINE) _Atomic int32_t awaited;       /* 1 + the rank whose tick this rank sleeps for; 0: awake */
    _Alignas(DSC_COMM_LINE) struct dsc_comm_post posts[2]; /* by the parity of the call's number */
    char why[DSC_COMM_WHY_BYTES];
    /* Of messages between two ranks, by the other rank. message.c explains them. */
    _Alignas(DSC_COMM_LINE) _Atomic uint32_t bells[DSC_COMM_MAX_RANKS];    /* change when this rank has news for it */
    _Atomic int32_t sleepers[DSC_COMM_MAX_RANKS];                          /* threads that sleep until it has news */
    _Alignas(DSC_COMM_LINE) _Atomic uint64_t n_posted[DSC_COMM_MAX_RANKS]; /* notices to it */
    _Alignas(DSC_COMM_LINE) _Atomic uint64_t n_read[DSC_COMM_MAX_RANKS];   /* notices from it */
};

_Static_assert(sizeof(struct dsc_comm_control) <= DSC_COMM_PAGE, "the control words have a page");

enum {
    DSC_COMM_N_NOTICES = 16,
    DSC_COMM_N_PLACES = 512,
    DSC_COMM_LABEL_BYTES = 192,
    DSC_COMM_NOTICE_BYTES = 8192,
    DSC_COMM_NOTE_BYTES = 512, /* a notice's bytes before its data */
    DSC_COMM_INLINE_BYTES = DSC_COMM_NOTICE_BYTES - DSC_COMM_NOTE_BYTES,
};

/* A message, as its sender describes it. */
struct dsc_comm_note {
    uint64_t number; /* counts the messages of the two ranks in this direction, from 1 */
    uint64_t label_hash;
    int64_t offset; /* the data's, in the sender's segment; -1: the data is in the notice */
    int32_t place;  /* where the receiver writes the number when it has taken the data; only with an offset */
    int32_t tag;
    int32_t type;
    int32_t n_dims;
    int32_t is_kept; /* the sender writes the data no more, even if its end fails */
    int64_t shape[DSC_COMM_MAX_DIMS];
    char label[DSC_COMM_LABEL_BYTES]; /* the begin of it, in ASCII, for sentences */
};

struct dsc_comm_notice {
    _Alignas(DSC_COMM_NOTE_BYTES) struct dsc_comm_note note;
    _Alignas(DSC_COMM_NOTE_BYTES) char data[DSC_COMM_INLINE_BYTES];
};

/* Memory that the owner of a segment writes for one other rank. */
struct dsc_comm_mailbox {
    _Alignas(DSC_COMM_PAGE) struct dsc_comm_notice notices[DSC_COMM_N_NOTICES]; /* by their number */
    _Atomic uint64_t taken[DSC_COMM_N_PLACES]; /* numbers of messages from the other rank, by their places */
};

_Static_assert(sizeof(struct dsc_comm_notice) == DSC_COMM_NOTICE_BYTES, "a notice ends there");
_Static_assert(DSC_COMM_AT_MAILBOXES % DSC_COMM_PAGE == 0, "mailboxes are aligned");
_Static_assert(DSC_COMM_AT_MAILBOXES + DSC_COMM_MAX_RANKS * (int64_t)sizeof(struct dsc_comm_mailbox) <=
                   DSC_COMM_AT_ARENA,
               "the mailboxes end there");

struct dsc_comm_segment {
    char *base;
    int64_t n_bytes;
    int fd;      /* -1 where it is only read */
    pid_t pid;   /* of the owner */
    bool is_own; /* in this process, shared by all its ends that use it */
    bool writes; /* mapped to be written */
    uint8_t token[16];
    _Atomic int32_t n_users;
    struct dsc_comm_segment *next; /* in the list of this process's segments */
};

/* Creates a segment with one user. n_arena_bytes is as in dsc_comm_config; address has DSC_COMM_ADDRESS_BYTES. */
dsc_status dsc_comm_segment_create(int32_t rank, int32_t n_ranks, int64_t arena_bytes, char *address,
                                   struct dsc_comm_segment **out_segment);

/*
 * Opens the segment of an address, checks that it is the segment of rank, and adds a user. writes: maps it for writing
 * too. *out_pidfd becomes readable when the segment's process ends; it is -1 for this process.
 */
dsc_status dsc_comm_segment_open(const char *address, int32_t rank, int32_t n_ranks, bool writes,
                                 struct dsc_comm_segment **out_segment, int *out_pidfd);

void dsc_comm_segment_hold(struct dsc_comm_segment *segment);

/* Removes a user; the last one unmaps the segment. NULL is fine. */
void dsc_comm_segment_drop(struct dsc_comm_segment *segment);

/* A hash of a text, the same in every process. */
uint64_t dsc_comm_hash_of(const char *text);

/* Commits pages, so that the system cannot refuse them later. what names them in the error. */
dsc_status dsc_comm_segment_commit(const struct dsc_comm_segment *segment, int64_t offset, int64_t n_bytes,
                                   const char *what);

static inline struct dsc_comm_control *dsc_comm_control_of(const struct dsc_comm_segment *segment)
{
    return (struct dsc_comm_control *)(void *)(segment->base + DSC_COMM_AT_CONTROL);
}

#endif
