/* The requests of an engine: their slots, the queue of requests with bytes to be cut, and their failures. */
#include "aio/engine.h"

#include "aio/file.h"
#include "base/fail.h"

#include <stdlib.h>

dsc_status dsc_aio_request_new(dsc_aio *aio, struct dsc_aio_request **out_request)
{
    struct dsc_aio_request *request = aio->free_requests;

    if (request == NULL) {
        struct dsc_aio_request **requests =
            aio->n_slots == UINT32_MAX - 1 ? NULL : realloc(aio->requests, (aio->n_slots + 1) * sizeof *requests);

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

struct dsc_aio_request *dsc_aio_request_find(const dsc_aio *aio, dsc_aio_id id)
{
    uint64_t index = (id & UINT32_MAX) - 1; /* wraps for 0, which is then past the end */

    if (index >= aio->n_slots || !aio->requests[index]->is_used || aio->requests[index]->generation != id >> 32)
        return NULL;
    return aio->requests[index];
}

void dsc_aio_request_forget(dsc_aio *aio, struct dsc_aio_request *request)
{
    atomic_fetch_sub(&request->file->n_requests, 1);
    request->is_used = false;
    request->generation++;
    request->next = aio->free_requests;
    aio->free_requests = request;
    aio->n_pending--;
}

void dsc_aio_request_enqueue(dsc_aio *aio, struct dsc_aio_request *request)
{
    request->is_queued = true;
    request->next = NULL;
    *aio->queue_end = request;
    aio->queue_end = &request->next;
}

/* Removes the request from the queue: no more blocks are cut for it. */
void dsc_aio_request_dequeue(dsc_aio *aio, struct dsc_aio_request *request)
{
    struct dsc_aio_request **link = &aio->queue;

    if (!request->is_queued)
        return;
    while (*link != request)
        link = &(*link)->next;
    *link = request->next;
    if (aio->queue_end == &request->next)
        aio->queue_end = link;
    request->is_queued = false;
}

void dsc_aio_request_fail(dsc_aio *aio, struct dsc_aio_request *request, int32_t err, int64_t at)
{
    if (request->err == 0) {
        request->err = err;
        request->err_at = at;
    }
    dsc_aio_request_dequeue(aio, request);
}
