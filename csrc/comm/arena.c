/*
 * Allocates blocks of a segment's arena: first fit. The pages of a block return to the system as soon as it is freed.
 */
#include "comm/arena.h"

#include "base/fail.h"

#include <inttypes.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

struct dsc_comm_block {
    struct dsc_comm_arena *arena;
    int64_t offset;  /* in the segment */
    int64_t n_bytes; /* whole pages */
    struct dsc_comm_block *next;
};

dsc_status dsc_comm_arena_create(struct dsc_comm_segment *segment, struct dsc_comm_arena **out_arena)
{
    struct dsc_comm_arena *arena = calloc(1, sizeof *arena);

    if (arena == NULL)
        return dsc_fail(DSC_ENOMEM, "no memory for an arena");

    dsc_status status = dsc_process_note(&arena->process);

    if (status != DSC_OK) {
        free(arena);
        return status;
    }
    pthread_mutex_init(&arena->mutex, NULL); /* with default attributes it cannot fail on Linux */
    arena->segment = segment;
    arena->n_users = 1;
    dsc_comm_segment_hold(segment);
    *out_arena = arena;
    return DSC_OK;
}

void dsc_comm_arena_hold(struct dsc_comm_arena *arena)
{
    pthread_mutex_lock(&arena->mutex);
    arena->n_users++;
    pthread_mutex_unlock(&arena->mutex);
}

void dsc_comm_arena_drop(struct dsc_comm_arena *arena)
{
    pthread_mutex_lock(&arena->mutex);
    int64_t n_users = --arena->n_users;
    pthread_mutex_unlock(&arena->mutex);

    if (n_users > 0)
        return;
    pthread_mutex_destroy(&arena->mutex);
    dsc_comm_segment_drop(arena->segment);
    free(arena);
}

/* Links the block into the first gap that is large enough. The caller holds the mutex. */
static bool place_block(struct dsc_comm_arena *arena, struct dsc_comm_block *block)
{
    struct dsc_comm_block **at = &arena->first;
    int64_t begin = DSC_COMM_AT_ARENA;

    while (*at != NULL && (*at)->offset - begin < block->n_bytes) {
        begin = (*at)->offset + (*at)->n_bytes;
        at = &(*at)->next;
    }
    if (*at == NULL && arena->segment->n_bytes - begin < block->n_bytes)
        return false;
    block->offset = begin;
    block->next = *at;
    *at = block;
    arena->n_users++;
    return true;
}

/* At least one page, so that all blocks have different addresses. */
static int64_t whole_pages(int64_t n_bytes)
{
    int64_t page = sysconf(_SC_PAGESIZE);

    return n_bytes > 0 ? (n_bytes + page - 1) / page * page : page;
}

dsc_status dsc_comm_arena_take(struct dsc_comm_arena *arena, int64_t n_bytes, dsc_comm_block **out_block)
{
    int64_t room = arena->segment->n_bytes - DSC_COMM_AT_ARENA;

    if (n_bytes < 0)
        return dsc_fail(DSC_EINVAL, "n_bytes is %" PRId64 ", must not be negative", n_bytes);
    if (n_bytes > room)
        return dsc_fail(DSC_ENOSPC, "%" PRId64 " bytes are asked for, the arena has %" PRId64, n_bytes, room);

    struct dsc_comm_block *block = calloc(1, sizeof *block);

    if (block == NULL)
        return dsc_fail(DSC_ENOMEM, "no memory for a block");
    block->arena = arena;
    block->n_bytes = whole_pages(n_bytes);
    pthread_mutex_lock(&arena->mutex);
    bool is_placed = place_block(arena, block);
    pthread_mutex_unlock(&arena->mutex);
    if (!is_placed) {
        free(block);
        return dsc_fail(DSC_ENOSPC,
                        "%" PRId64 " bytes are asked for, no gap of the arena's %" PRId64 " bytes is as long", n_bytes,
                        room);
    }

    dsc_status status = dsc_comm_segment_commit(arena->segment, block->offset, block->n_bytes, "a block of the arena");

    if (status != DSC_OK) {
        dsc_comm_block_destroy(block);
        return status;
    }
    *out_block = block;
    return DSC_OK;
}

void dsc_comm_block_destroy(dsc_comm_block *block)
{
    if (block == NULL || !dsc_process_is_this(&block->arena->process))
        return;

    /* The pages are returned first: once the block is unlinked, another block may take its place. */
    (void)madvise(dsc_comm_block_data(block), (size_t)block->n_bytes, MADV_REMOVE);
    dsc_comm_block_abandon(block);
}

void dsc_comm_block_abandon(dsc_comm_block *block)
{
    struct dsc_comm_arena *arena = block->arena;

    pthread_mutex_lock(&arena->mutex);
    for (struct dsc_comm_block **at = &arena->first; *at != NULL; at = &(*at)->next)
        if (*at == block) {
            *at = block->next;
            break;
        }
    pthread_mutex_unlock(&arena->mutex);
    free(block);
    dsc_comm_arena_drop(arena);
}

void *dsc_comm_block_data(const dsc_comm_block *block)
{
    return block->arena->segment->base + block->offset;
}

int64_t dsc_comm_block_bytes(const dsc_comm_block *block)
{
    return block->n_bytes;
}
