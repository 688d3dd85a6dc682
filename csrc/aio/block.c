/*
 * Cuts requests into blocks and takes their results. A block is one transfer; after a short transfer, its rest becomes
 * another transfer.
 */
#include "aio/engine.h"

#include "aio/file.h"

#include <errno.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

/*
 * Makes the ring. False if there is no memory for it: blocks that need the ring then go through the page cache. Two
 * variants have been timed and did not help: registering the ring with io_uring, and copying its blocks in several
 * threads.
 */
static bool make_ring(dsc_aio *aio)
{
    size_t n_bytes = (size_t)aio->n_ring_blocks * aio->ring_block_bytes;
    void *ring;

    if (aio->ring != NULL)
        return true;
    ring = mmap(NULL, n_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (ring == MAP_FAILED)
        return false;
    (void)madvise(ring, n_bytes, MADV_HUGEPAGE); /* [Note: large pages] of pinned.c */
    (void)madvise(ring, n_bytes, MADV_DONTFORK); /* [Note: Direct transfers and fork] of file.c */
    aio->ring = ring;
    for (int32_t i = 0; i < aio->n_ring_blocks; i++)
        aio->free_ring_blocks[i] = aio->ring + (size_t)(aio->n_ring_blocks - 1 - i) * aio->ring_block_bytes;
    aio->n_free_ring_blocks = aio->n_ring_blocks;
    return true;
}

static void drop_ring_block(dsc_aio *aio, struct dsc_aio_block *block)
{
    if (block->ring_block != NULL)
        aio->free_ring_blocks[aio->n_free_ring_blocks++] = block->ring_block;
    block->ring_block = NULL;
}

static void point(struct dsc_aio_block *block, int fd, int64_t offset, void *buf, size_t n_bytes)
{
    block->op.fd = fd;
    block->op.is_write = block->request->is_write;
    block->op.offset = offset;
    block->op.buf = buf;
    block->op.n_bytes = n_bytes;
}

/* Sends the rest of the block through the page cache, where any offset and address will do. */
static void point_buffered(dsc_aio *aio, struct dsc_aio_block *block)
{
    drop_ring_block(aio, block);
    block->is_direct = false;
    point(block, block->request->file->fd, block->position, block->memory, block->n_wanted);
}

/*
 * [Note: How a request is cut]
 *
 * A block begins at the first byte that is in no block yet, and ends at the next multiple of block_bytes at the latest.
 * So all blocks but the first begin aligned.
 *
 * Direct write: bytes up to the first multiple of the alignment, and bytes after the last, are blocks of their own in
 * the page cache. Direct read: the first and last aligned pages are read whole into the ring and the wanted bytes
 * copied out. The bytes between go straight to or from the caller's memory if its address suits, else through a block
 * of the ring, shorter if need be.
 */
static bool point_direct(dsc_aio *aio, struct dsc_aio_block *block, size_t memory_align)
{
    const bool is_write = block->request->is_write;
    const int64_t end = block->position + (int64_t)block->n_wanted;
    const int64_t inner_begin = dsc_aio_align_up(aio, block->position);
    const int64_t inner_end = dsc_aio_align_down(aio, end);
    const bool is_aligned = inner_begin == block->position;
    bool suits = is_aligned && ((uintptr_t)block->memory & (memory_align - 1)) == 0;
    int64_t direct_end = end;

    if (is_write && (!is_aligned || inner_begin >= inner_end)) { /* the head, the tail, or less than a page */
        block->n_wanted = (size_t)((is_aligned ? end : dsc_aio_min64(inner_begin, end)) - block->position);
        point_buffered(aio, block);
        return true;
    }
    if (is_write || (suits && inner_begin < inner_end))
        direct_end = inner_end;
    else if (inner_begin < inner_end &&
             ((uintptr_t)(block->memory + (inner_begin - block->position)) & (memory_align - 1)) == 0)
        direct_end = inner_begin; /* only the head of the read needs the ring */
    else
        suits = false;
    if (suits) {
        block->is_direct = true;
        block->n_wanted = (size_t)(direct_end - block->position);
        point(block, block->request->file->direct_fd, block->position, block->memory, block->n_wanted);
        return true;
    }
    if (!make_ring(aio)) { /* no memory for it */
        point_buffered(aio, block);
        return true;
    }
    if (aio->n_free_ring_blocks == 0)
        return false;
    direct_end = dsc_aio_min64(direct_end, dsc_aio_align_down(aio, block->position) + (int64_t)aio->ring_block_bytes);
    block->is_direct = true;
    block->n_wanted = (size_t)(direct_end - block->position);
    block->ring_block = aio->free_ring_blocks[--aio->n_free_ring_blocks];
    if (is_write)
        memcpy(block->ring_block, block->memory, block->n_wanted);
    point(block, block->request->file->direct_fd, dsc_aio_align_down(aio, block->position), block->ring_block,
          (size_t)(dsc_aio_align_up(aio, direct_end) - dsc_aio_align_down(aio, block->position)));
    return true;
}

/* Cuts the next block of the request. False if the block must wait for room in the ring. */
bool dsc_aio_block_cut(dsc_aio *aio, struct dsc_aio_request *request)
{
    dsc_aio_file *file = request->file;
    const int64_t block_bytes = (int64_t)aio->config.block_bytes;
    const int64_t position = request->offset + request->n_cut;
    struct dsc_aio_block *block = aio->free_blocks;

    block->request = request;
    block->memory = request->buf + request->n_cut;
    block->position = position;
    block->n_wanted = (size_t)dsc_aio_min64(block_bytes - position % block_bytes, request->n_bytes - request->n_cut);
    block->n_retries = 0;
    /* Near the largest int64_t, rounding up would overflow; no file is that large. */
    if (!aio->config.uses_direct || !atomic_load(&file->is_direct) || position > INT64_MAX - 2 * block_bytes)
        point_buffered(aio, block);
    else if (!point_direct(aio, block, atomic_load(&file->memory_align)))
        return false;
    aio->free_blocks = block->next;
    request->n_cut += (int64_t)block->n_wanted;
    request->n_blocks++;
    aio->ready[aio->n_ready++] = &block->op;
    if (request->n_cut == request->n_bytes)
        dsc_aio_request_dequeue(aio, request);
    return true;
}

void dsc_aio_block_finish(dsc_aio *aio, struct dsc_aio_block *block)
{
    drop_ring_block(aio, block);
    block->request->n_blocks--;
    block->next = aio->free_blocks;
    aio->free_blocks = block;
}

static void retry(dsc_aio *aio, struct dsc_aio_block *block, int32_t err)
{
    const struct timespec pause = {0, DSC_AIO_RETRY_PAUSE_NS};

    if (block->n_retries >= DSC_AIO_MAX_RETRIES) {
        dsc_aio_request_fail(aio, block->request, err, block->position);
        dsc_aio_block_finish(aio, block);
        return;
    }
    if (++block->n_retries > 2 && err != EINTR)
        nanosleep(&pause, NULL);
    aio->ready[aio->n_ready++] = &block->op;
}

/* Takes the result of a transfer: the block is finished, or ready again for its rest. */
void dsc_aio_block_take(dsc_aio *aio, struct dsc_aio_block *block)
{
    struct dsc_aio_request *request = block->request;
    const struct dsc_aio_op *op = &block->op;
    const int64_t skip = block->position - op->offset;
    int64_t n_got;

    if (dsc_aio_is_passing(op->res) && !(request->err != 0 || request->is_cancelled)) {
        retry(aio, block, (int32_t)-op->res);
        return;
    }
    if (op->res == -EINVAL && block->is_direct) {
        dsc_aio_file_refused(request->file, ((uintptr_t)op->buf & (uintptr_t)(aio->alignment - 1)) == 0);
        point_buffered(aio, block);
        aio->ready[aio->n_ready++] = &block->op;
        return;
    }
    if (op->res < 0 || op->res > (int64_t)op->n_bytes || (op->res == 0 && op->is_write)) {
        dsc_aio_request_fail(aio, request, op->res < 0 ? (int32_t)dsc_aio_min64(-op->res, INT32_MAX) : EIO,
                             block->position);
        dsc_aio_block_finish(aio, block);
        return;
    }
    if (op->res == 0) {
        request->end_of_file = dsc_aio_min64(request->end_of_file, block->position);
        dsc_aio_block_finish(aio, block);
        return;
    }
    n_got = op->res < skip ? 0 : dsc_aio_min64(op->res - skip, (int64_t)block->n_wanted);
    if (block->ring_block != NULL && !op->is_write)
        memcpy(block->memory, block->ring_block + skip, (size_t)n_got);
    if (n_got == (int64_t)block->n_wanted || request->err != 0) {
        dsc_aio_block_finish(aio, block);
        return;
    }
    /*
     * A short transfer: either the end of the file, or another reason that the kernel does not give. A transfer of the
     * rest tells which; the rest is rarely aligned.
     */
    block->memory += n_got;
    block->position += n_got;
    block->n_wanted -= (size_t)n_got;
    block->n_retries = 0;
    point_buffered(aio, block);
    aio->ready[aio->n_ready++] = &block->op;
}
