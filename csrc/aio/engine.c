/*
 * The engine: requests in, blocks out. It cuts requests into blocks, keeps the backend's queue full, continues what came back short, and
 * keeps the result of each request until it is asked for.
 */
#include "aio/backend.h"

#include "aio/file.h"
#include "base/fail.h"

#include <errno.h>
#include <limits.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#define MAX_BLOCK_BYTES ((size_t)1 << 30) /* the kernel transfers at most 2 GiB less a page at once */
#define MAX_QUEUE_DEPTH 4096
#define MAX_THREADS 256
#define RING_BLOCK_BYTES ((size_t)1 << 20) /* longer blocks gain nothing, and a ring of them would be large */
#define MAX_RING_BLOCKS 32
#define REAP_BATCH 16
#define BYTES_AT_ONCE ((size_t)1 << 20) /* most bytes that are copied before the queue is filled again: a tenth of a millisecond */
#define MAX_RETRIES 1000
#define RETRY_PAUSE_NS 1000000 /* the thousand retries of a block take about a second */

/* ---- what there is ---- */

#define DSC_AIO_BACKEND(name) extern const struct dsc_aio_backend dsc_aio_backend_##name;
#include "aio/backends.inc"
#undef DSC_AIO_BACKEND

static const struct dsc_aio_backend *const backends[] = {
#define DSC_AIO_BACKEND(name) &dsc_aio_backend_##name,
#include "aio/backends.inc"
#undef DSC_AIO_BACKEND
};

/* What a test has plugged in. */
static _Atomic(const struct dsc_aio_backend *) plugged;
static atomic_bool plugged_is_auto;

#define N_BACKENDS ((int32_t)(sizeof backends / sizeof backends[0]))

struct request {
    uint32_t generation;   /* of its slot, so that an id is never taken for a later one's */
    bool is_used;
    bool is_write;
    bool is_queued;        /* has bytes that no block has been cut for */
    bool is_cancelled;
    int32_t n_blocks;      /* cut and not finished */
    dsc_aio_file *file;
    char *buf;
    int64_t offset;
    int64_t n_bytes;
    int64_t n_cut;         /* bytes that blocks have been cut for */
    int64_t end_of_file;   /* the lowest position at which a read found no more; INT64_MAX: none did */
    int64_t sequence;      /* order of submission */
    int32_t err;           /* errno of the first failure; 0: none */
    int64_t err_at;        /* where in the file */
    struct request *next;  /* in the queue, or in the list of free slots */
    uint32_t index;
};

/* One piece of a request on its way. op comes first: the backend hands that back. */
struct block {
    struct dsc_aio_op op;
    struct request *request;
    char *memory;          /* the caller's, of the first wanted byte */
    int64_t position;      /* in the file, of the first wanted byte; at least op.offset */
    size_t n_wanted;
    char *ring_block;      /* NULL: op goes to memory itself */
    bool is_direct;
    int32_t n_retries;     /* without progress in between */
    struct block *next;
};

struct dsc_aio {
    struct dsc_aio_config config;
    const struct dsc_aio_backend *backend;
    void *state;
    int32_t broken;               /* errno after which the backend gives no results; 0: sound */

    struct request **requests;    /* slots by index */
    uint32_t n_slots;
    struct request *free_requests;
    struct request *queue;        /* in order of submission */
    struct request **queue_end;
    int64_t n_pending;
    int64_t n_submitted;

    struct block *blocks;         /* queue_depth of them */
    struct block *free_blocks;
    struct dsc_aio_op **ready;    /* cut and not taken by the backend, in order */
    int32_t n_at_once;            /* blocks that are copied, or cut, before some are sent */
    int32_t n_ready;
    int32_t n_in_flight;

    char *ring;                   /* NULL until it is needed */
    size_t ring_block_bytes;
    int32_t n_ring_blocks;
    char **free_ring_blocks;      /* a stack */
    int32_t n_free_ring_blocks;
};

/* ---- arithmetic ---- */

static int64_t align_down(int64_t value)
{
    return value & -(int64_t)DSC_AIO_ALIGNMENT;
}

static int64_t align_up(int64_t value)
{
    return align_down(value + (int64_t)DSC_AIO_ALIGNMENT - 1); /* callers keep well below the end of the type */
}

static int64_t min64(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

/* ---- making and finding ---- */

const char *dsc_aio_backend_at(int32_t index)
{
    return index >= 0 && index < N_BACKENDS ? backends[index]->name : NULL;
}

const char *dsc_aio_backend_name(const dsc_aio *aio)
{
    return aio->backend->name;
}

void dsc_aio_plug_backend(const struct dsc_aio_backend *backend, bool is_auto)
{
    atomic_store(&plugged_is_auto, false);
    atomic_store(&plugged, backend);
    atomic_store(&plugged_is_auto, is_auto && backend != NULL);
}

static dsc_status find_backend(const char *name, const struct dsc_aio_backend **out_backend)
{
    const struct dsc_aio_backend *extra = atomic_load(&plugged);
    char names[128] = "";
    size_t used = 0;

    if (extra != NULL && strcmp(extra->name, name) == 0) {
        *out_backend = extra;
        return DSC_OK;
    }
    for (int32_t i = 0; i < N_BACKENDS; i++) {
        if (strcmp(backends[i]->name, name) == 0) {
            *out_backend = backends[i];
            return DSC_OK;
        }
        if (used < sizeof names)
            used += (size_t)snprintf(names + used, sizeof names - used, ", %s", backends[i]->name);
    }
    return dsc_fail(DSC_ENOTFOUND, "no I/O backend \"%.63s\" in this build; there are: auto%s", name, names);
}

static dsc_status open_backend(dsc_aio *aio, const char *name)
{
    dsc_status status = DSC_ENOTSUP;

    if (name != NULL && strcmp(name, "auto") != 0) {
        DSC_TRY(find_backend(name, &aio->backend));
        return aio->backend->open(&aio->config, &aio->state);
    }
    if (atomic_load(&plugged_is_auto)) {
        aio->backend = atomic_load(&plugged);
        status = aio->backend->open(&aio->config, &aio->state);
    }
    for (int32_t i = 0; i < N_BACKENDS && status == DSC_ENOTSUP; i++) {
        aio->backend = backends[i];
        status = aio->backend->open(&aio->config, &aio->state);
    }
    return status;
}

static dsc_status check_config(const struct dsc_aio_config *config)
{
    if (config == NULL)
        return dsc_fail(DSC_EINVAL, "config is NULL");
    if (config->size != sizeof *config)
        return dsc_fail(DSC_EINVAL, "config.size is %u, this library expects %u; start from DSC_AIO_CONFIG_INIT", (unsigned)config->size,
                        (unsigned)sizeof *config);
    if (config->block_bytes < 1 || config->block_bytes > MAX_BLOCK_BYTES)
        return dsc_fail(DSC_EINVAL, "block_bytes is %zu, must be 1 to %zu", config->block_bytes, MAX_BLOCK_BYTES);
    if (config->queue_depth < 1 || config->queue_depth > MAX_QUEUE_DEPTH)
        return dsc_fail(DSC_EINVAL, "queue_depth is %d, must be 1 to %d", (int)config->queue_depth, MAX_QUEUE_DEPTH);
    if (config->n_threads < 1 || config->n_threads > MAX_THREADS)
        return dsc_fail(DSC_EINVAL, "n_threads is %d, must be 1 to %d", (int)config->n_threads, MAX_THREADS);
    return DSC_OK;
}

static void free_engine(dsc_aio *aio)
{
    if (aio->ring != NULL)
        munmap(aio->ring, (size_t)aio->n_ring_blocks * aio->ring_block_bytes);
    for (uint32_t i = 0; i < aio->n_slots; i++)
        free(aio->requests[i]);
    free(aio->requests);
    free(aio->free_ring_blocks);
    free(aio->ready);
    free(aio->blocks);
    free(aio);
}

dsc_status dsc_aio_create(const struct dsc_aio_config *config, dsc_aio **out_aio)
{
    dsc_aio *aio;
    size_t depth;
    dsc_status status;

    if (out_aio == NULL)
        return dsc_fail(DSC_EINVAL, "out_aio is NULL");
    DSC_TRY(check_config(config));
    depth = (size_t)config->queue_depth;
    aio = calloc(1, sizeof *aio);
    if (aio == NULL)
        return dsc_fail(DSC_ENOMEM, "no memory for an I/O engine");
    aio->config = *config;
    aio->config.block_bytes = (size_t)align_up((int64_t)config->block_bytes);
    aio->queue_end = &aio->queue;
    aio->ring_block_bytes = aio->config.block_bytes < RING_BLOCK_BYTES ? aio->config.block_bytes : RING_BLOCK_BYTES;
    aio->n_ring_blocks = config->queue_depth < MAX_RING_BLOCKS ? config->queue_depth : MAX_RING_BLOCKS;
    aio->n_at_once = (int32_t)(aio->config.block_bytes < BYTES_AT_ONCE ? BYTES_AT_ONCE / aio->config.block_bytes : 1);
    aio->blocks = calloc(depth, sizeof *aio->blocks);
    aio->ready = calloc(depth, sizeof *aio->ready);
    aio->free_ring_blocks = calloc((size_t)aio->n_ring_blocks, sizeof *aio->free_ring_blocks);
    if (aio->blocks == NULL || aio->ready == NULL || aio->free_ring_blocks == NULL) {
        free_engine(aio);
        return dsc_fail(DSC_ENOMEM, "no memory for an I/O engine of depth %zu", depth);
    }
    for (size_t i = depth; i-- > 0;) {
        aio->blocks[i].next = aio->free_blocks;
        aio->free_blocks = &aio->blocks[i];
    }
    status = open_backend(aio, config->backend);
    aio->config.backend = NULL; /* was borrowed */
    if (status != DSC_OK) {
        free_engine(aio);
        return status;
    }
    *out_aio = aio;
    return DSC_OK;
}

dsc_status dsc_aio_backend_probe(const char *name)
{
    struct dsc_aio_config config = DSC_AIO_CONFIG_INIT;
    dsc_aio *aio = NULL;

    if (name == NULL)
        return dsc_fail(DSC_EINVAL, "name is NULL");
    config.backend = name;
    config.queue_depth = 1;
    DSC_TRY(dsc_aio_create(&config, &aio));
    dsc_aio_destroy(aio);
    return DSC_OK;
}

/* ---- requests ---- */

static dsc_status new_request(dsc_aio *aio, struct request **out_request)
{
    struct request *request = aio->free_requests;

    if (request == NULL) {
        struct request **requests = aio->n_slots == UINT32_MAX - 1 ? NULL : realloc(aio->requests, (aio->n_slots + 1) * sizeof *requests);

        if (requests != NULL)
            aio->requests = requests;
        request = requests != NULL ? calloc(1, sizeof *request) : NULL;
        if (request == NULL)
            return dsc_fail(DSC_ENOMEM, "no memory for an I/O request beside %u others", (unsigned)aio->n_slots);
        request->index = aio->n_slots;
        aio->requests[aio->n_slots++] = request;
    } else {
        aio->free_requests = request->next;
    }
    *out_request = request;
    return DSC_OK;
}

static dsc_aio_id id_of(const struct request *request)
{
    return (dsc_aio_id)request->generation << 32 | (request->index + 1);
}

static struct request *find_request(const dsc_aio *aio, dsc_aio_id id)
{
    uint64_t index = (id & UINT32_MAX) - 1; /* wraps for 0, which is then past the end */

    if (index >= aio->n_slots || !aio->requests[index]->is_used || aio->requests[index]->generation != id >> 32)
        return NULL;
    return aio->requests[index];
}

static void forget(dsc_aio *aio, struct request *request)
{
    atomic_fetch_sub(&request->file->n_requests, 1);
    request->is_used = false;
    request->generation++;
    request->next = aio->free_requests;
    aio->free_requests = request;
    aio->n_pending--;
}

static bool is_done(const struct request *request)
{
    return !request->is_queued && request->n_blocks == 0;
}

static void enqueue(dsc_aio *aio, struct request *request)
{
    request->is_queued = true;
    request->next = NULL;
    *aio->queue_end = request;
    aio->queue_end = &request->next;
}

/* No more blocks are cut for it. */
static void dequeue(dsc_aio *aio, struct request *request)
{
    struct request **link = &aio->queue;

    if (!request->is_queued)
        return;
    while (*link != request)
        link = &(*link)->next;
    *link = request->next;
    if (aio->queue_end == &request->next)
        aio->queue_end = link;
    request->is_queued = false;
}

static void fail_request(dsc_aio *aio, struct request *request, int32_t err, int64_t at)
{
    if (request->err == 0) {
        request->err = err;
        request->err_at = at;
    }
    dequeue(aio, request);
}

/* ---- blocks ---- */

/*
 * False when there is no memory for the ring: what needs it then goes through the page cache. Registering the ring with io_uring, and sharing the copies
 * of its blocks out among threads, have both been timed and did not help.
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
    aio->ring = ring;
    for (int32_t i = 0; i < aio->n_ring_blocks; i++)
        aio->free_ring_blocks[i] = aio->ring + (size_t)(aio->n_ring_blocks - 1 - i) * aio->ring_block_bytes;
    aio->n_free_ring_blocks = aio->n_ring_blocks;
    return true;
}

static void drop_ring_block(dsc_aio *aio, struct block *block)
{
    if (block->ring_block != NULL)
        aio->free_ring_blocks[aio->n_free_ring_blocks++] = block->ring_block;
    block->ring_block = NULL;
}

static void point(struct block *block, int fd, int64_t offset, void *buf, size_t n_bytes)
{
    block->op.fd = fd;
    block->op.is_write = block->request->is_write;
    block->op.offset = offset;
    block->op.buf = buf;
    block->op.n_bytes = n_bytes;
}

/* What is left of the block goes through the page cache, where any offset and address will do. */
static void point_buffered(dsc_aio *aio, struct block *block)
{
    drop_ring_block(aio, block);
    block->is_direct = false;
    point(block, block->request->file->fd, block->position, block->memory, block->n_wanted);
}

/*
 * [Note: How a request is cut]
 *
 * A block begins at the first byte that has not been cut and never goes past the next multiple of block_bytes, so that all but the first begin aligned.
 *
 * Direct write: bytes up to the first multiple of the alignment, and those after the last, are blocks of their own in the page cache. Direct
 * read: the first and last aligned pages are read whole into the ring and the wanted bytes copied out. What lies between goes straight to or from
 * the caller's memory if its address suits, else through a block of the ring, shorter if need be.
 */
static bool point_direct(dsc_aio *aio, struct block *block, size_t memory_align)
{
    const bool is_write = block->request->is_write;
    const int64_t end = block->position + (int64_t)block->n_wanted;
    const int64_t inner_begin = align_up(block->position);
    const int64_t inner_end = align_down(end);
    const bool is_aligned = inner_begin == block->position;
    bool suits = is_aligned && ((uintptr_t)block->memory & (memory_align - 1)) == 0;
    int64_t direct_end = end;

    if (is_write && (!is_aligned || inner_begin >= inner_end)) { /* the head, the tail, or less than a page */
        block->n_wanted = (size_t)((is_aligned ? end : min64(inner_begin, end)) - block->position);
        point_buffered(aio, block);
        return true;
    }
    if (is_write || (suits && inner_begin < inner_end))
        direct_end = inner_end;
    else if (inner_begin < inner_end && ((uintptr_t)(block->memory + (inner_begin - block->position)) & (memory_align - 1)) == 0)
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
    direct_end = min64(direct_end, align_down(block->position) + (int64_t)aio->ring_block_bytes);
    block->is_direct = true;
    block->n_wanted = (size_t)(direct_end - block->position);
    block->ring_block = aio->free_ring_blocks[--aio->n_free_ring_blocks];
    if (is_write)
        memcpy(block->ring_block, block->memory, block->n_wanted);
    point(block, block->request->file->direct_fd, align_down(block->position), block->ring_block,
          (size_t)(align_up(direct_end) - align_down(block->position)));
    return true;
}

/* Cuts the next block of the request. False when it has to wait for room in the ring. */
static bool cut(dsc_aio *aio, struct request *request)
{
    dsc_aio_file *file = request->file;
    const int64_t block_bytes = (int64_t)aio->config.block_bytes;
    const int64_t position = request->offset + request->n_cut;
    struct block *block = aio->free_blocks;

    block->request = request;
    block->memory = request->buf + request->n_cut;
    block->position = position;
    block->n_wanted = (size_t)min64(block_bytes - position % block_bytes, request->n_bytes - request->n_cut);
    block->n_retries = 0;
    /* Next to the end of the type, rounding up would overflow; no file system is that large. */
    if (!aio->config.uses_direct || !atomic_load(&file->is_direct) || position > INT64_MAX - 2 * block_bytes)
        point_buffered(aio, block);
    else if (!point_direct(aio, block, atomic_load(&file->memory_align)))
        return false;
    aio->free_blocks = block->next;
    request->n_cut += (int64_t)block->n_wanted;
    request->n_blocks++;
    aio->ready[aio->n_ready++] = &block->op;
    if (request->n_cut == request->n_bytes)
        dequeue(aio, request);
    return true;
}

static void finish(dsc_aio *aio, struct block *block)
{
    drop_ring_block(aio, block);
    block->request->n_blocks--;
    block->next = aio->free_blocks;
    aio->free_blocks = block;
}

static void retry(dsc_aio *aio, struct block *block, int32_t err)
{
    const struct timespec pause = {0, RETRY_PAUSE_NS};

    if (block->n_retries >= MAX_RETRIES) {
        fail_request(aio, block->request, err, block->position);
        finish(aio, block);
        return;
    }
    if (++block->n_retries > 2 && err != EINTR)
        nanosleep(&pause, NULL);
    aio->ready[aio->n_ready++] = &block->op;
}

static bool is_passing(int64_t res)
{
    return res == -EINTR || res == -EAGAIN || res == -EBUSY;
}

/* Takes the result of a transfer: the block is finished, or ready again for its rest. */
static void take(dsc_aio *aio, struct block *block)
{
    struct request *request = block->request;
    const struct dsc_aio_op *op = &block->op;
    const int64_t skip = block->position - op->offset;
    int64_t n_got;

    if (is_passing(op->res) && !(request->err != 0 || request->is_cancelled)) {
        retry(aio, block, (int32_t)-op->res);
        return;
    }
    if (op->res == -EINVAL && block->is_direct) {
        dsc_aio_file_refused(request->file, ((uintptr_t)op->buf & (DSC_AIO_ALIGNMENT - 1)) == 0);
        point_buffered(aio, block);
        aio->ready[aio->n_ready++] = &block->op;
        return;
    }
    if (op->res < 0 || op->res > (int64_t)op->n_bytes || (op->res == 0 && op->is_write)) {
        fail_request(aio, request, op->res < 0 ? (int32_t)min64(-op->res, INT32_MAX) : EIO, block->position);
        finish(aio, block);
        return;
    }
    if (op->res == 0) {
        request->end_of_file = min64(request->end_of_file, block->position);
        finish(aio, block);
        return;
    }
    n_got = op->res < skip ? 0 : min64(op->res - skip, (int64_t)block->n_wanted);
    if (block->ring_block != NULL && !op->is_write)
        memcpy(block->memory, block->ring_block + skip, (size_t)n_got);
    if (n_got == (int64_t)block->n_wanted || request->err != 0) {
        finish(aio, block);
        return;
    }
    /* Short: the end of the file, or any reason that the kernel need not give. The rest says which, and is rarely aligned. */
    block->memory += n_got;
    block->position += n_got;
    block->n_wanted -= (size_t)n_got;
    block->n_retries = 0;
    point_buffered(aio, block);
    aio->ready[aio->n_ready++] = &block->op;
}

/* ---- the pump ---- */

static void drop_ready(dsc_aio *aio, int32_t n)
{
    aio->n_ready -= n;
    memmove(aio->ready, aio->ready + n, (size_t)aio->n_ready * sizeof *aio->ready);
}

/* Hands ready blocks to the backend until they are out, or it takes no more for now. */
static void send(dsc_aio *aio)
{
    const struct timespec pause = {0, RETRY_PAUSE_NS};

    while (aio->n_ready > 0) {
        int64_t n = aio->backend->submit(aio->state, aio->ready, aio->config.single_submit ? 1 : aio->n_ready);

        if (n >= 0) {
            aio->n_in_flight += (int32_t)n;
            drop_ready(aio, (int32_t)n);
            if (n > 0)
                continue;
            n = -EAGAIN;
        }
        if (n == -EINTR)
            continue;

        struct block *first = (struct block *)aio->ready[0];

        if ((n == -EAGAIN || n == -EBUSY) && aio->n_in_flight > 0)
            return; /* results make room */
        if ((n == -EAGAIN || n == -EBUSY) && first->n_retries++ < MAX_RETRIES) {
            nanosleep(&pause, NULL);
            continue;
        }
        drop_ready(aio, 1);
        first->op.res = n;
        if (is_passing(n)) { /* has been tried for long enough */
            fail_request(aio, first->request, (int32_t)-n, first->position);
            finish(aio, first);
        } else {
            take(aio, first);
        }
    }
}

/* Cuts and sends blocks until the backend's queue is full or nothing is left. What has been cut is on its way before much more is: cutting may copy. */
static void fill(dsc_aio *aio)
{
    if (aio->config.overlap_events || aio->n_in_flight + aio->n_ready == 0)
        while (aio->queue != NULL && aio->free_blocks != NULL && cut(aio, aio->queue))
            if (aio->n_ready >= aio->n_at_once)
                send(aio);
    send(aio);
}

/* The backend gives no more results. The kernel may still write to the ring, which is therefore never freed. */
static void give_up(dsc_aio *aio, int32_t err)
{
    aio->broken = err;
    while (aio->queue != NULL)
        fail_request(aio, aio->queue, err, aio->queue->offset + aio->queue->n_cut);
    for (uint32_t i = 0; i < aio->n_slots; i++) {
        struct request *request = aio->requests[i];

        if (request->is_used && request->n_blocks > 0) {
            fail_request(aio, request, err, request->offset);
            request->n_blocks = 0;
        }
    }
    aio->n_ready = 0;
    aio->n_in_flight = 0;
}

/* Starts what can be started and takes what has finished; with wait, at least one result when anything is in flight. */
static void progress(dsc_aio *aio, bool wait)
{
    struct dsc_aio_op *done[REAP_BATCH];
    int64_t n;

    if (aio->broken != 0)
        return;
    fill(aio);
    if (aio->n_in_flight == 0)
        return;
    n = aio->backend->reap(aio->state, done, REAP_BATCH, wait);
    if (n < 0) {
        give_up(aio, (int32_t)-n);
        return;
    }
    for (int64_t i = 0; i < n; i++) {
        aio->n_in_flight--; /* one by one: where batches do not overlap, the next one waits for the last of these */
        take(aio, (struct block *)done[i]);
        if ((i + 1) % aio->n_at_once == 0)
            fill(aio); /* what is taken next may be copied, and the disk has more to do meanwhile */
    }
    fill(aio);
}

/* ---- what callers call ---- */

static dsc_status submit(dsc_aio *aio, dsc_aio_file *file, bool is_write, int64_t offset, void *buf, size_t n_bytes, dsc_aio_id *out_id)
{
    const char *verb = is_write ? "write" : "read";
    struct request *request = NULL;
    int err = 0;

    if (aio == NULL || file == NULL || out_id == NULL || (buf == NULL && n_bytes > 0))
        return dsc_fail(DSC_EINVAL, "%s: %s is NULL", verb, aio == NULL ? "aio" : file == NULL ? "file" : out_id == NULL ? "out_id" : "buf");
    if ((file->flags & (is_write ? DSC_AIO_WRITE : DSC_AIO_READ)) == 0)
        return dsc_fail(DSC_EINVAL, "%s: %.255s is not open for that", verb, file->path);
    if (offset < 0)
        return dsc_fail(DSC_EINVAL, "%s: the offset is %lld, must not be negative", verb, (long long)offset);
    if (n_bytes > (uint64_t)(INT64_MAX - offset))
        return dsc_fail(DSC_EOVERFLOW, "%s: %zu bytes at offset %lld go past the end of the type", verb, n_bytes, (long long)offset);
    if (aio->broken != 0)
        return dsc_fail(DSC_ESTATE, "%s: this engine has given up (errno %d); make another", verb, (int)aio->broken);
    DSC_TRY(new_request(aio, &request));

    *request = (struct request){
        .generation = request->generation,
        .index = request->index,
        .is_used = true,
        .is_write = is_write,
        .file = file,
        .buf = buf,
        .offset = offset,
        .n_bytes = (int64_t)n_bytes,
        .end_of_file = INT64_MAX,
        .sequence = aio->n_submitted++,
    };
    atomic_fetch_add(&file->n_requests, 1);
    aio->n_pending++;
    *out_id = id_of(request);
    if (n_bytes == 0)
        return DSC_OK;
    /* File systems make writes that lengthen a file one at a time, and wait for each. */
    if (is_write && aio->config.uses_direct && n_bytes >= DSC_AIO_ALIGNMENT && atomic_load(&file->is_direct))
        err = dsc_aio_file_reserve(file, offset, (int64_t)n_bytes);
    if (err != 0) {
        fail_request(aio, request, err, offset);
        return DSC_OK;
    }
    enqueue(aio, request);
    progress(aio, false);
    return DSC_OK;
}

dsc_status dsc_aio_submit_read(dsc_aio *aio, dsc_aio_file *file, int64_t offset, void *buf, size_t n_bytes, dsc_aio_id *out_id)
{
    return submit(aio, file, false, offset, buf, n_bytes, out_id);
}

dsc_status dsc_aio_submit_write(dsc_aio *aio, dsc_aio_file *file, int64_t offset, const void *buf, size_t n_bytes, dsc_aio_id *out_id)
{
    return submit(aio, file, true, offset, (void *)(uintptr_t)buf, n_bytes, out_id); /* only read from */
}

/* Bytes, or -errno. */
static int64_t result_of(const struct request *request)
{
    if (request->err != 0)
        return -request->err;
    return min64(request->end_of_file, request->offset + request->n_bytes) - request->offset;
}

static struct dsc_aio_failure failure_of(const struct request *request)
{
    bool is_short = request->err == 0;

    return (struct dsc_aio_failure){
        .path = request->file->path,
        .verb = request->is_write ? "write" : "read",
        .offset = request->offset,
        .n_bytes = request->n_bytes,
        .at = is_short ? request->end_of_file : request->err_at,
        .err = is_short ? ENODATA : request->err,
    };
}

static dsc_status unknown_id(dsc_aio_id id)
{
    return dsc_fail(DSC_ENOTFOUND, "no I/O request %llx: it has been waited for, or is another engine's", (unsigned long long)id);
}

dsc_status dsc_aio_wait(dsc_aio *aio, dsc_aio_id id, int64_t *out_res)
{
    struct request *request = find_request(aio, id);
    int64_t res = -ENOENT;
    dsc_status status;

    if (request == NULL) {
        status = unknown_id(id);
    } else {
        while (!is_done(request))
            progress(aio, true);
        res = result_of(request);
        status = DSC_OK;
        if (res < 0) {
            struct dsc_aio_failure failure = failure_of(request);

            status = dsc_aio_fail(&failure);
        }
        forget(aio, request);
    }
    if (out_res != NULL)
        *out_res = res;
    return status;
}

dsc_status dsc_aio_wait_all(dsc_aio *aio, int64_t *out_n_done)
{
    const struct request *first = NULL;
    int64_t n_done = 0;
    int64_t n_failed = 0;
    dsc_status status = DSC_OK;

    for (uint32_t i = 0; i < aio->n_slots; i++) {
        struct request *request = aio->requests[i];

        if (!request->is_used)
            continue;
        while (!is_done(request))
            progress(aio, true);
        if (request->is_cancelled && request->err == ECANCELED)
            continue;
        if (result_of(request) == request->n_bytes) {
            n_done++;
            continue;
        }
        n_failed++;
        if (first == NULL || request->sequence < first->sequence)
            first = request;
    }
    if (first != NULL) {
        struct dsc_aio_failure failure = failure_of(first);

        failure.n_others = n_failed - 1;
        status = dsc_aio_fail(&failure);
    }
    for (uint32_t i = 0; i < aio->n_slots; i++)
        if (aio->requests[i]->is_used)
            forget(aio, aio->requests[i]);
    if (out_n_done != NULL)
        *out_n_done = n_done;
    return status;
}

dsc_status dsc_aio_poll(dsc_aio *aio, dsc_aio_id id, bool *out_is_done)
{
    struct request *request = find_request(aio, id);

    if (out_is_done == NULL)
        return dsc_fail(DSC_EINVAL, "out_is_done is NULL");
    if (request == NULL)
        return unknown_id(id);
    if (!is_done(request))
        progress(aio, false);
    *out_is_done = is_done(request);
    return DSC_OK;
}

dsc_status dsc_aio_cancel(dsc_aio *aio, dsc_aio_id id)
{
    struct request *request = find_request(aio, id);

    if (request == NULL)
        return unknown_id(id);
    if (request->is_queued) {
        request->is_cancelled = true;
        fail_request(aio, request, ECANCELED, request->offset + request->n_cut);
    }
    return DSC_OK;
}

int64_t dsc_aio_pending(const dsc_aio *aio)
{
    return aio->n_pending;
}

void dsc_aio_destroy(dsc_aio *aio)
{
    if (aio == NULL)
        return;
    for (uint32_t i = 0; i < aio->n_slots; i++)
        if (aio->requests[i]->is_used && aio->requests[i]->is_queued)
            (void)dsc_aio_cancel(aio, id_of(aio->requests[i]));
    for (uint32_t i = 0; i < aio->n_slots; i++) {
        if (!aio->requests[i]->is_used)
            continue;
        while (!is_done(aio->requests[i]))
            progress(aio, true);
        forget(aio, aio->requests[i]);
    }
    aio->backend->close(aio->state);
    if (aio->broken != 0)
        aio->ring = NULL; /* see give_up */
    free_engine(aio);
}
