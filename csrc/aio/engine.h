/*
 * The declarations shared by the files of the I/O engine: its requests, the blocks that they are cut into, and the
 * order of calls between them.
 */
#ifndef DSC_AIO_ENGINE_H
#define DSC_AIO_ENGINE_H

#include "aio/backend.h"

#include "dsc/process.h"

#include <errno.h>

#define DSC_AIO_RETRY_PAUSE_NS 1000000 /* the thousand retries of a block take about a second */
#define DSC_AIO_MAX_RETRIES 1000

struct dsc_aio_request {
    uint32_t generation; /* counts uses of the slot, so that an old id never names a later request */
    bool is_used;
    bool is_write;
    bool is_queued; /* has bytes that are in no block yet */
    bool is_cancelled;
    int32_t n_blocks; /* cut and not finished */
    dsc_aio_file *file;
    char *buf;
    int64_t offset;
    int64_t n_bytes;
    int64_t n_cut;                /* bytes that are in blocks */
    int64_t end_of_file;          /* the lowest position where a read found no more; INT64_MAX: none did */
    int64_t sequence;             /* order of submission */
    int32_t err;                  /* errno of the first failure; 0: none */
    int64_t err_at;               /* where in the file */
    struct dsc_aio_request *next; /* in the queue, or in the list of free slots */
    uint32_t index;
};

/* A piece of a request, as one transfer. op is the first member, because the backend returns a pointer to it. */
struct dsc_aio_block {
    struct dsc_aio_op op;
    struct dsc_aio_request *request;
    char *memory;     /* address of the first wanted byte in the caller's memory */
    int64_t position; /* in the file, of the first wanted byte; at least op.offset */
    size_t n_wanted;
    char *ring_block; /* NULL: op transfers to or from the caller's memory */
    bool is_direct;
    int32_t n_retries; /* since the last progress */
    struct dsc_aio_block *next;
};

struct dsc_aio {
    struct dsc_process process;
    struct dsc_aio_config config;
    int64_t alignment; /* dsc_aio_alignment */
    const struct dsc_aio_backend *backend;
    void *state;
    int32_t broken; /* errno after which the backend gives no more results; 0: none */

    struct dsc_aio_request **requests; /* slots by index */
    uint32_t n_slots;
    struct dsc_aio_request *free_requests;
    struct dsc_aio_request *queue; /* in order of submission */
    struct dsc_aio_request **queue_end;
    int64_t n_pending;
    int64_t n_submitted;

    struct dsc_aio_block *blocks; /* queue_depth of them */
    struct dsc_aio_block *free_blocks;
    struct dsc_aio_op **ready; /* blocks that the backend has not taken yet, in order */
    int32_t n_at_once;         /* blocks that are copied, or cut, before some are sent */
    int32_t n_ready;
    int32_t n_in_flight;

    char *ring; /* NULL until it is needed */
    size_t ring_block_bytes;
    int32_t n_ring_blocks;
    char **free_ring_blocks; /* a stack */
    int32_t n_free_ring_blocks;
};

static inline int64_t dsc_aio_align_down(const dsc_aio *aio, int64_t value)
{
    return value & -aio->alignment;
}

static inline int64_t dsc_aio_align_up(const dsc_aio *aio, int64_t value)
{
    return dsc_aio_align_down(aio, value + aio->alignment - 1); /* callers pass values far below the largest int64_t */
}

static inline int64_t dsc_aio_min64(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

static inline dsc_aio_id dsc_aio_request_id(const struct dsc_aio_request *request)
{
    return (dsc_aio_id)request->generation << 32 | (request->index + 1);
}

static inline bool dsc_aio_request_is_done(const struct dsc_aio_request *request)
{
    return !request->is_queued && request->n_blocks == 0;
}

/* Whether the transfer may succeed if it is tried again. */
static inline bool dsc_aio_is_passing(int64_t res)
{
    return res == -EINTR || res == -EAGAIN || res == -EBUSY;
}

/* backends.c: opens the backend of that name for the engine; NULL or "auto": the first that this kernel allows. */
dsc_status dsc_aio_open_backend(dsc_aio *aio, const char *name);

/* request.c: slots of requests, the queue of requests with bytes to be cut, and their failures. */
dsc_status dsc_aio_request_new(dsc_aio *aio, struct dsc_aio_request **out_request);
struct dsc_aio_request *dsc_aio_request_find(const dsc_aio *aio, dsc_aio_id id);
void dsc_aio_request_forget(dsc_aio *aio, struct dsc_aio_request *request);
void dsc_aio_request_enqueue(dsc_aio *aio, struct dsc_aio_request *request);

/* Removes the request from the queue: no more blocks are cut for it. */
void dsc_aio_request_dequeue(dsc_aio *aio, struct dsc_aio_request *request);

/* Keeps the first failure of a request. */
void dsc_aio_request_fail(dsc_aio *aio, struct dsc_aio_request *request, int32_t err, int64_t at);

/*
 * block.c: cuts the next block of the request and makes it ready. There must be a free block. False if the block must
 * wait for room in the ring.
 */
bool dsc_aio_block_cut(dsc_aio *aio, struct dsc_aio_request *request);

/* Takes the result of a transfer: the block is finished, or ready again for its rest. */
void dsc_aio_block_take(dsc_aio *aio, struct dsc_aio_block *block);
void dsc_aio_block_finish(dsc_aio *aio, struct dsc_aio_block *block);

/*
 * pump.c: starts as many blocks as fit, and takes finished blocks; with wait, at least one if any is in flight.
 */
void dsc_aio_progress(dsc_aio *aio, bool wait);

#endif
