/* Keeps the backend's queue full, and takes finished transfers. */
#include "aio/engine.h"

#include <errno.h>
#include <string.h>
#include <time.h>

#define REAP_BATCH 16

static void drop_ready(dsc_aio *aio, int32_t n)
{
    aio->n_ready -= n;
    memmove(aio->ready, aio->ready + n, (size_t)aio->n_ready * sizeof *aio->ready);
}

/* Submits ready blocks until none is left or the backend takes no more for now. */
static void send(dsc_aio *aio)
{
    const struct timespec pause = {0, DSC_AIO_RETRY_PAUSE_NS};

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

        struct dsc_aio_block *first = (struct dsc_aio_block *)aio->ready[0];

        if ((n == -EAGAIN || n == -EBUSY) && aio->n_in_flight > 0)
            return; /* results make room */
        if ((n == -EAGAIN || n == -EBUSY) && first->n_retries++ < DSC_AIO_MAX_RETRIES) {
            nanosleep(&pause, NULL);
            continue;
        }
        drop_ready(aio, 1);
        first->op.res = n;
        if (dsc_aio_is_passing(n)) { /* has been retried for long enough */
            dsc_aio_request_fail(aio, first->request, (int32_t)-n, first->position);
            dsc_aio_block_finish(aio, first);
        } else {
            dsc_aio_block_take(aio, first);
        }
    }
}

/*
 * Cuts and sends blocks until the backend's queue is full or nothing is left. Blocks are sent soon after they are cut,
 * because cutting further blocks may involve copies.
 */
static void fill(dsc_aio *aio)
{
    if (aio->config.overlap_events || aio->n_in_flight + aio->n_ready == 0)
        while (aio->queue != NULL && aio->free_blocks != NULL && dsc_aio_block_cut(aio, aio->queue))
            if (aio->n_ready >= aio->n_at_once)
                send(aio);
    send(aio);
}

/*
 * Called when the backend gives no more results. The kernel may still write to the ring and to the memory of requests.
 * Therefore the ring is never freed; see dsc_aio_has_given_up for the memory of requests.
 */
static void give_up(dsc_aio *aio, int32_t err)
{
    aio->broken = err;
    while (aio->queue != NULL)
        dsc_aio_request_fail(aio, aio->queue, err, aio->queue->offset + aio->queue->n_cut);
    for (uint32_t i = 0; i < aio->n_slots; i++) {
        struct dsc_aio_request *request = aio->requests[i];

        if (request->is_used && request->n_blocks > 0) {
            dsc_aio_request_fail(aio, request, err, request->offset);
            request->n_blocks = 0;
        }
    }
    aio->n_ready = 0;
    aio->n_in_flight = 0;
}

/* Starts as many blocks as fit, and takes finished blocks; with wait, at least one if any is in flight. */
void dsc_aio_progress(dsc_aio *aio, bool wait)
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
        dsc_aio_block_take(aio, (struct dsc_aio_block *)done[i]);
        if ((i + 1) % aio->n_at_once == 0)
            fill(aio); /* refills the queue before the next take, which may copy, so that the disk stays busy */
    }
    fill(aio);
}
