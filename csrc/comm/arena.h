/* Tracks which parts of a segment's arena are in use. */
#ifndef DSC_COMM_ARENA_H
#define DSC_COMM_ARENA_H

#include "comm/segment.h"
#include "dsc/process.h"

#include <pthread.h>

/* Lives as long as its end or any of its blocks. */
struct dsc_comm_arena {
    struct dsc_process process;
    struct dsc_comm_segment *segment;
    pthread_mutex_t mutex;
    /* Under mutex: */
    struct dsc_comm_block *first; /* by offset */
    int64_t n_users;
};

/* Creates an arena with one user. The arena counts as one more user of the segment. */
dsc_status dsc_comm_arena_create(struct dsc_comm_segment *segment, struct dsc_comm_arena **out_arena);
void dsc_comm_arena_hold(struct dsc_comm_arena *arena);
void dsc_comm_arena_drop(struct dsc_comm_arena *arena);

/* Frees a block that other ranks may still read: its pages stay as long as a process maps the segment. */
void dsc_comm_block_abandon(dsc_comm_block *block);

/* Whole pages. */
int64_t dsc_comm_block_bytes(const dsc_comm_block *block);

dsc_status dsc_comm_arena_take(struct dsc_comm_arena *arena, int64_t n_bytes, dsc_comm_block **out_block);

#endif
