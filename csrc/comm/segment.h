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
};

/* Where each part begins. The arena begins where a huge page can. */
#define DSC_COMM_AT_CONTROL ((int64_t)DSC_COMM_PAGE)
#define DSC_COMM_AT_SMALL ((int64_t)2 * DSC_COMM_PAGE)
#define DSC_COMM_AT_LANES (DSC_COMM_AT_SMALL + 2 * DSC_COMM_SMALL_BYTES)
#define DSC_COMM_AT_ARENA ((int64_t)8 << 20)

_Static_assert(DSC_COMM_AT_LANES + DSC_COMM_N_LANES * DSC_COMM_LANE_BYTES <= DSC_COMM_AT_ARENA, "the lanes end there");

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
};

enum dsc_comm_state { DSC_COMM_OPEN, DSC_COMM_FAILED, DSC_COMM_CLOSED };

/* [Note: Ticks] in pipeline.c explains the tick. */
struct dsc_comm_control {
    _Alignas(DSC_COMM_LINE) _Atomic uint32_t tick;
    _Atomic uint32_t state;                                /* why is written before it */
    _Alignas(DSC_COMM_LINE) _Atomic int32_t awaited;       /* 1 + the rank whose tick this rank sleeps for; 0: awake */
    _Alignas(DSC_COMM_LINE) struct dsc_comm_post posts[2]; /* by the parity of the call's number */
    char why[DSC_COMM_WHY_BYTES];
};

_Static_assert(sizeof(struct dsc_comm_control) <= DSC_COMM_PAGE, "the control words have a page");

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

/* Commits pages, so that the system cannot refuse them later. what names them in the error. */
dsc_status dsc_comm_segment_commit(const struct dsc_comm_segment *segment, int64_t offset, int64_t n_bytes,
                                   const char *what);

static inline struct dsc_comm_control *dsc_comm_control_of(const struct dsc_comm_segment *segment)
{
    return (struct dsc_comm_control *)(void *)(segment->base + DSC_COMM_AT_CONTROL);
}

#endif
