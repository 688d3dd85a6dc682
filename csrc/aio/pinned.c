/*
 * The pool of locked, page-aligned buffers: exact sizes under a budget.
 *
 * [Note: large pages] For a transfer that bypasses the page cache, the kernel looks up and pins every page of the
 * memory, and passes each contiguous piece to the device: 256 pieces for 1 MiB in pages of 4 KiB, one piece in large
 * pages. Large pages are requested before any page is allocated. The kernel uses them only where the buffer fills them,
 * so they take no extra memory.
 */
#include "dsc/aio.h"

#include "base/fail.h"

#include <stdlib.h>
#include <sys/mman.h>

struct buffer {
    void *at;
    size_t n_bytes; /* whole pages */
    bool is_used;
    bool is_locked;
};

struct dsc_aio_pool {
    int64_t budget_bytes;
    int64_t used_bytes;
    int64_t held_bytes;
    struct buffer *buffers;
    size_t n_buffers;
    size_t capacity;
};

dsc_status dsc_aio_pool_create(int64_t budget_bytes, dsc_aio_pool **out_pool)
{
    dsc_aio_pool *pool;

    if (out_pool == NULL)
        return dsc_fail(DSC_EINVAL, "out_pool is NULL");
    if (budget_bytes < 0)
        return dsc_fail(DSC_EINVAL, "budget_bytes is %lld, must not be negative", (long long)budget_bytes);
    pool = calloc(1, sizeof *pool);
    if (pool == NULL)
        return dsc_fail(DSC_ENOMEM, "no memory for a pool of buffers");
    pool->budget_bytes = budget_bytes;
    *out_pool = pool;
    return DSC_OK;
}

static void drop(dsc_aio_pool *pool, size_t i)
{
    munmap(pool->buffers[i].at, pool->buffers[i].n_bytes); /* unlocks */
    pool->held_bytes -= (int64_t)pool->buffers[i].n_bytes;
    pool->buffers[i] = pool->buffers[--pool->n_buffers];
}

void dsc_aio_pool_destroy(dsc_aio_pool *pool)
{
    if (pool == NULL)
        return;
    while (pool->n_buffers > 0)
        drop(pool, pool->n_buffers - 1);
    free(pool->buffers);
    free(pool);
}

/* Frees kept buffers until n_bytes more fit the budget, or no kept buffer is left. */
static void make_room(dsc_aio_pool *pool, size_t n_bytes)
{
    for (size_t i = pool->n_buffers; i-- > 0 && (int64_t)n_bytes > pool->budget_bytes - pool->held_bytes;)
        if (!pool->buffers[i].is_used)
            drop(pool, i); /* the buffer moved to this place has been visited already */
}

static dsc_status add(dsc_aio_pool *pool, size_t n_bytes, struct buffer **out_buffer)
{
    void *at;

    make_room(pool, n_bytes);
    if ((int64_t)n_bytes > pool->budget_bytes - pool->held_bytes)
        return dsc_fail(DSC_ENOMEM, "a buffer of %zu bytes does not fit: %lld of the %lld bytes of the pool are in use",
                        n_bytes, (long long)pool->used_bytes, (long long)pool->budget_bytes);
    if (pool->n_buffers == pool->capacity) {
        size_t capacity = 2 * pool->capacity + 8;
        struct buffer *buffers = realloc(pool->buffers, capacity * sizeof *buffers);

        if (buffers == NULL)
            return dsc_fail(DSC_ENOMEM, "no memory for the book of %zu buffers", capacity);
        pool->buffers = buffers;
        pool->capacity = capacity;
    }
    at = mmap(NULL, n_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED)
        return dsc_fail(DSC_ENOMEM, "the system has no memory for a buffer of %zu bytes", n_bytes);
    (void)madvise(at, n_bytes, MADV_HUGEPAGE); /* [Note: large pages] */
    *out_buffer = &pool->buffers[pool->n_buffers++];
    **out_buffer = (struct buffer){.at = at, .n_bytes = n_bytes, .is_locked = mlock(at, n_bytes) == 0};
    pool->held_bytes += (int64_t)n_bytes;
    return DSC_OK;
}

dsc_status dsc_aio_pool_take(dsc_aio_pool *pool, size_t n_bytes, void **out_buf, bool *out_is_locked)
{
    const size_t page = dsc_aio_alignment();
    struct buffer *buffer = NULL;
    size_t n_rounded;

    if (pool == NULL || out_buf == NULL)
        return dsc_fail(DSC_EINVAL, "%s is NULL", pool == NULL ? "pool" : "out_buf");
    if (n_bytes == 0 || n_bytes > (size_t)INT64_MAX - page)
        return dsc_fail(DSC_EINVAL, "n_bytes is %zu, must be at least 1 and fit a positive int64_t", n_bytes);
    n_rounded = (n_bytes + page - 1) & ~(page - 1);
    for (size_t i = 0; i < pool->n_buffers && buffer == NULL; i++)
        if (!pool->buffers[i].is_used && pool->buffers[i].n_bytes == n_rounded)
            buffer = &pool->buffers[i];
    if (buffer == NULL)
        DSC_TRY(add(pool, n_rounded, &buffer));
    buffer->is_used = true;
    pool->used_bytes += (int64_t)n_rounded;
    *out_buf = buffer->at;
    if (out_is_locked != NULL)
        *out_is_locked = buffer->is_locked;
    return DSC_OK;
}

dsc_status dsc_aio_pool_give(dsc_aio_pool *pool, void *buf)
{
    if (pool == NULL)
        return dsc_fail(DSC_EINVAL, "pool is NULL");
    for (size_t i = 0; i < pool->n_buffers; i++)
        if (pool->buffers[i].at == buf && pool->buffers[i].is_used) {
            pool->buffers[i].is_used = false;
            pool->used_bytes -= (int64_t)pool->buffers[i].n_bytes;
            return DSC_OK;
        }
    return dsc_fail(DSC_EINVAL, "%p is no buffer of this pool that is in use", buf);
}

void dsc_aio_pool_bytes(const dsc_aio_pool *pool, int64_t *out_used_bytes, int64_t *out_held_bytes)
{
    *out_used_bytes = pool->used_bytes;
    *out_held_bytes = pool->held_bytes;
}
