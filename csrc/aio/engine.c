/*
 * Makes and ends engines, takes requests, and keeps the result of each request until the caller waits for it. block.c
 * cuts requests into blocks, and pump.c sends them to the backend.
 */
#include "aio/engine.h"

#include "aio/file.h"
#include "base/fail.h"

#include <errno.h>
#include <limits.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define MAX_BLOCK_BYTES ((size_t)1 << 30) /* the kernel transfers at most 2 GiB less a page at once */
#define MAX_QUEUE_DEPTH 4096
#define MAX_THREADS 256
#define RING_BLOCK_BYTES ((size_t)1 << 20) /* longer blocks are not faster, and a ring of them would be large */
#define MAX_RING_BLOCKS 32
#define BYTES_AT_ONCE \
    ((size_t)1 << 20) /* the most bytes that are copied before the queue is refilled: a tenth of a millisecond */

static dsc_status check_config(const struct dsc_aio_config *config)
{
    if (config == NULL)
        return dsc_fail(DSC_EINVAL, "config is NULL");
    if (config->size != sizeof *config)
        return dsc_fail(DSC_EINVAL, "config.size is %u, this library expects %u; start from DSC_AIO_CONFIG_INIT",
                        (unsigned)config->size, (unsigned)sizeof *config);
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
    struct dsc_process process;
    dsc_aio *aio;
    size_t depth;
    dsc_status status;

    if (out_aio == NULL)
        return dsc_fail(DSC_EINVAL, "out_aio is NULL");
    DSC_TRY(check_config(config));
    DSC_TRY(dsc_process_note(&process));
    depth = (size_t)config->queue_depth;
    aio = calloc(1, sizeof *aio);
    if (aio == NULL)
        return dsc_fail(DSC_ENOMEM, "no memory for an I/O engine");
    aio->process = process;
    aio->alignment = (int64_t)dsc_aio_alignment();
    aio->config = *config;
    aio->config.block_bytes = (size_t)dsc_aio_align_up(aio, (int64_t)config->block_bytes);
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
    status = dsc_aio_open_backend(aio, config->backend);
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

static dsc_status check_process(const dsc_aio *aio)
{
    return dsc_process_check(&aio->process, "this I/O engine");
}

static dsc_status submit(dsc_aio *aio, dsc_aio_file *file, bool is_write, int64_t offset, void *buf, size_t n_bytes,
                         dsc_aio_id *out_id)
{
    const char *verb = is_write ? "write" : "read";
    struct dsc_aio_request *request = NULL;
    int err = 0;

    if (aio == NULL || file == NULL || out_id == NULL || (buf == NULL && n_bytes > 0))
        return dsc_fail(DSC_EINVAL, "%s: %s is NULL", verb,
                        aio == NULL      ? "aio"
                        : file == NULL   ? "file"
                        : out_id == NULL ? "out_id"
                                         : "buf");
    DSC_TRY(check_process(aio));
    DSC_TRY(dsc_process_check(&file->process, "this open file"));
    if ((file->flags & (is_write ? DSC_AIO_WRITE : DSC_AIO_READ)) == 0)
        return dsc_fail(DSC_EINVAL, "%s: %.255s is not open for that", verb, file->path);
    if (offset < 0)
        return dsc_fail(DSC_EINVAL, "%s: the offset is %lld, must not be negative", verb, (long long)offset);
    if (n_bytes > (uint64_t)(INT64_MAX - offset))
        return dsc_fail(DSC_EOVERFLOW, "%s: %zu bytes at offset %lld go past the end of the type", verb, n_bytes,
                        (long long)offset);
    if (aio->broken != 0)
        return dsc_fail(DSC_ESTATE, "%s: this engine has given up (errno %d); make another", verb, (int)aio->broken);
    DSC_TRY(dsc_aio_request_new(aio, &request));

    *request = (struct dsc_aio_request){
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
    *out_id = dsc_aio_request_id(request);
    if (n_bytes == 0)
        return DSC_OK;
    /* File systems run writes that extend a file one at a time, and wait for each. */
    if (is_write && aio->config.uses_direct && (int64_t)n_bytes >= aio->alignment && atomic_load(&file->is_direct))
        err = dsc_aio_file_reserve(file, offset, (int64_t)n_bytes);
    if (err != 0) {
        dsc_aio_request_fail(aio, request, err, offset);
        return DSC_OK;
    }
    dsc_aio_request_enqueue(aio, request);
    dsc_aio_progress(aio, false);
    return DSC_OK;
}

dsc_status dsc_aio_submit_read(dsc_aio *aio, dsc_aio_file *file, int64_t offset, void *buf, size_t n_bytes,
                               dsc_aio_id *out_id)
{
    return submit(aio, file, false, offset, buf, n_bytes, out_id);
}

dsc_status dsc_aio_submit_write(dsc_aio *aio, dsc_aio_file *file, int64_t offset, const void *buf, size_t n_bytes,
                                dsc_aio_id *out_id)
{
    return submit(aio, file, true, offset, (void *)(uintptr_t)buf, n_bytes, out_id); /* only read from */
}

/* Bytes, or -errno. */
static int64_t result_of(const struct dsc_aio_request *request)
{
    if (request->err != 0)
        return -request->err;
    return dsc_aio_min64(request->end_of_file, request->offset + request->n_bytes) - request->offset;
}

static struct dsc_aio_failure failure_of(const struct dsc_aio_request *request)
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
    return dsc_fail(DSC_ENOTFOUND, "no I/O request %llx: it has been waited for, or is another engine's",
                    (unsigned long long)id);
}

dsc_status dsc_aio_wait(dsc_aio *aio, dsc_aio_id id, int64_t *out_res)
{
    dsc_status status = check_process(aio);
    struct dsc_aio_request *request = status == DSC_OK ? dsc_aio_request_find(aio, id) : NULL;
    int64_t res = -ENOENT;

    if (status == DSC_OK && request == NULL)
        status = unknown_id(id);
    if (request != NULL) {
        while (!dsc_aio_request_is_done(request))
            dsc_aio_progress(aio, true);
        res = result_of(request);
        status = DSC_OK;
        if (res < 0) {
            struct dsc_aio_failure failure = failure_of(request);

            status = dsc_aio_fail(&failure);
        }
        dsc_aio_request_forget(aio, request);
    }
    if (out_res != NULL)
        *out_res = res;
    return status;
}

dsc_status dsc_aio_wait_all(dsc_aio *aio, int64_t *out_n_done)
{
    const struct dsc_aio_request *first = NULL;
    int64_t n_done = 0;
    int64_t n_failed = 0;
    dsc_status status = check_process(aio);

    if (out_n_done != NULL)
        *out_n_done = 0;
    if (status != DSC_OK)
        return status;
    for (uint32_t i = 0; i < aio->n_slots; i++) {
        struct dsc_aio_request *request = aio->requests[i];

        if (!request->is_used)
            continue;
        while (!dsc_aio_request_is_done(request))
            dsc_aio_progress(aio, true);
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
            dsc_aio_request_forget(aio, aio->requests[i]);
    if (out_n_done != NULL)
        *out_n_done = n_done;
    return status;
}

dsc_status dsc_aio_poll(dsc_aio *aio, dsc_aio_id id, bool *out_is_done)
{
    struct dsc_aio_request *request;

    if (out_is_done == NULL)
        return dsc_fail(DSC_EINVAL, "out_is_done is NULL");
    DSC_TRY(check_process(aio));
    request = dsc_aio_request_find(aio, id);
    if (request == NULL)
        return unknown_id(id);
    if (!dsc_aio_request_is_done(request))
        dsc_aio_progress(aio, false);
    *out_is_done = dsc_aio_request_is_done(request);
    return DSC_OK;
}

dsc_status dsc_aio_cancel(dsc_aio *aio, dsc_aio_id id)
{
    struct dsc_aio_request *request;

    DSC_TRY(check_process(aio));
    request = dsc_aio_request_find(aio, id);
    if (request == NULL)
        return unknown_id(id);
    if (request->is_queued) {
        request->is_cancelled = true;
        dsc_aio_request_fail(aio, request, ECANCELED, request->offset + request->n_cut);
    }
    return DSC_OK;
}

int64_t dsc_aio_pending(const dsc_aio *aio)
{
    return aio->n_pending;
}

bool dsc_aio_has_given_up(const dsc_aio *aio)
{
    return aio->broken != 0;
}

void dsc_aio_destroy(dsc_aio *aio)
{
    if (aio == NULL || !dsc_process_is_this(&aio->process))
        return;
    for (uint32_t i = 0; i < aio->n_slots; i++)
        if (aio->requests[i]->is_used && aio->requests[i]->is_queued)
            (void)dsc_aio_cancel(aio, dsc_aio_request_id(aio->requests[i]));
    for (uint32_t i = 0; i < aio->n_slots; i++) {
        if (!aio->requests[i]->is_used)
            continue;
        while (!dsc_aio_request_is_done(aio->requests[i]))
            dsc_aio_progress(aio, true);
        dsc_aio_request_forget(aio, aio->requests[i]);
    }
    aio->backend->close(aio->state);
    if (aio->broken != 0)
        aio->ring = NULL; /* see give_up */
    free_engine(aio);
}
