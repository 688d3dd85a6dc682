/* The queue of an end's requests. A request is run by the thread that waits for it, or by the end's worker. */
#include "comm/end.h"

#include "base/fail.h"

#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define LOOK_NS INT64_C(100000000) /* between calls of stops */

/*
 * [Note: Who runs] One thread at a time runs requests, from the first on (is_running). A thread that waits for a
 * request runs it and the requests before it, unless another thread is running them. A small call that is first in the
 * queue is begun by its submitter. The other ranks then have all they need from this rank, so the call may stay in the
 * queue until somebody waits for it. A large call may also stay in the queue if its caller waits for it at once. All
 * other calls wake the worker, so that they make progress while the caller computes. The worker also takes over from a
 * thread that stops waiting.
 */

static dsc_status ask_worker(struct dsc_comm *comm);

/*
 * Runs the first request. The caller holds the mutex, which is released meanwhile. False if stops (may be NULL)
 * returned true.
 */
static bool run_first(struct dsc_comm *comm, bool (*stops)(void *), void *context)
{
    struct dsc_comm_request *request = comm->first;
    dsc_status status = dsc_comm_check(comm);

    comm->is_running = true;
    pthread_mutex_unlock(&comm->mutex);
    if (status == DSC_OK && !request->is_begun)
        dsc_comm_begin(comm, request);
    comm->stops = stops;
    comm->stops_context = context;
    if (status == DSC_OK)
        status = dsc_comm_finish(comm, request);
    pthread_mutex_lock(&comm->mutex);
    comm->is_running = false;
    if (status == DSC_EAGAIN) {
        if (!comm->is_closed)
            (void)ask_worker(comm); /* if no thread starts, the request stays until somebody waits */
        pthread_cond_broadcast(&comm->has_done);
        return false;
    }
    comm->first = request->next;
    if (comm->first == NULL)
        comm->end = &comm->first;
    request->status = status;
    atomic_store_explicit(&request->is_done, true, memory_order_release);
    pthread_cond_broadcast(&comm->has_done);
    return true;
}

static void *work(void *opaque)
{
    struct dsc_comm *comm = opaque;

    pthread_mutex_lock(&comm->mutex);
    while (!atomic_load(&comm->is_closing)) {
        if (comm->first == NULL)
            comm->wants_worker = false;
        if (comm->wants_worker && !comm->is_running)
            (void)run_first(comm, NULL, NULL);
        else if (comm->is_running)
            pthread_cond_wait(&comm->has_done, &comm->mutex);
        else
            pthread_cond_wait(&comm->has_work, &comm->mutex);
    }
    pthread_mutex_unlock(&comm->mutex);
    return NULL;
}

/* With the mutex. */
static dsc_status ask_worker(struct dsc_comm *comm)
{
    sigset_t all;
    sigset_t before;

    comm->wants_worker = true;
    if (comm->has_worker) {
        pthread_cond_signal(&comm->has_work);
        return DSC_OK;
    }
    /* Signals are for the program's own threads. */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int error = pthread_create(&comm->worker, NULL, work, comm);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (error != 0)
        return dsc_fail(DSC_ENOMEM, "no thread for requests can be started (errno %d)", error);
    comm->has_worker = true;
    return DSC_OK;
}

/* Keeps the begin of a label and a hash of all of it. */
static void keep_label(struct dsc_comm_request *request, const char *label)
{
    size_t n = 0;

    request->call.label = NULL;
    request->label_hash = label != NULL && *label != '\0' ? dsc_comm_hash_of(label) : 0;
    for (; label != NULL && label[n] != '\0' && n < sizeof request->label - 1; n++)
        request->label[n] = (char)(label[n] >= ' ' && label[n] <= '~' ? label[n] : '?');
    request->label[n] = '\0';
}

/* Copies the call. Fields that the operation does not name get a neutral value. */
static void keep_call(struct dsc_comm_request *request, const struct dsc_comm *comm, const struct dsc_comm_call *given)
{
    struct dsc_comm_call *call = &request->call;
    size_t n_bytes = (size_t)comm->n_ranks * sizeof *given->in_splits;

    *call = *given;
    keep_label(request, given->label);
    if (call->op != DSC_COMM_ALL_REDUCE)
        call->combine = DSC_COMM_SUM;
    if (call->op != DSC_COMM_REDUCE_SCATTER) {
        call->accumulates = false;
        call->out_type = call->type;
    }
    if (call->op == DSC_COMM_BARRIER)
        call->n_elems = 0;
    if (call->op != DSC_COMM_ALL_TO_ALL)
        return;
    memcpy(request->in_splits, given->in_splits, n_bytes);
    memcpy(request->out_splits, given->out_splits, n_bytes);
    call->in_splits = request->in_splits;
    call->out_splits = request->out_splits;
    call->n_elems = 0;
    for (int32_t rank = 0; rank < comm->n_ranks; rank++)
        call->n_elems += request->in_splits[rank];
}

/* With the mutex. */
static dsc_status enqueue(struct dsc_comm *comm, struct dsc_comm_request *request)
{
    bool is_next = comm->first == NULL;

    if (comm->is_closed)
        return dsc_fail(DSC_ESTATE, "the end has been closed");
    if (!comm->is_attached)
        return dsc_fail(DSC_ESTATE, "the end is not attached to the other ranks");
    DSC_TRY(dsc_comm_check(comm));
    if (is_next && dsc_comm_is_small(comm, &request->call))
        dsc_comm_begin(comm, request);
    else if (!is_next || !request->call.is_waited)
        DSC_TRY(ask_worker(comm));
    *comm->end = request;
    comm->end = &request->next;
    return DSC_OK;
}

dsc_status dsc_comm_submit(dsc_comm *comm, const struct dsc_comm_call *call, dsc_comm_request **out_request)
{
    DSC_TRY(dsc_process_check(&comm->process, "this end of shared memory"));
    DSC_TRY(dsc_comm_call_check(comm, call));

    struct dsc_comm_request *request = calloc(1, sizeof *request);

    if (request == NULL)
        return dsc_fail(DSC_ENOMEM, "no memory for a request");
    request->comm = comm;
    keep_call(request, comm, call);
    pthread_mutex_lock(&comm->mutex);
    dsc_status status = enqueue(comm, request);
    pthread_mutex_unlock(&comm->mutex);
    if (status != DSC_OK) {
        free(request);
        return status;
    }
    *out_request = request;
    return DSC_OK;
}

/*
 * While another thread runs requests, waits until a request is done or stops is due. The caller holds the mutex, which
 * is released meanwhile.
 */
static bool wait_for_other(struct dsc_comm *comm, bool (*stops)(void *), void *context)
{
    int64_t until = dsc_comm_now_ns() + LOOK_NS;
    struct timespec at = {.tv_sec = until / 1000000000, .tv_nsec = until % 1000000000};

    if (stops == NULL) {
        pthread_cond_wait(&comm->has_done, &comm->mutex);
        return true;
    }
    if (pthread_cond_timedwait(&comm->has_done, &comm->mutex, &at) == 0)
        return true;
    pthread_mutex_unlock(&comm->mutex);
    bool goes_on = !stops(context);
    pthread_mutex_lock(&comm->mutex);
    return goes_on;
}

dsc_status dsc_comm_wait(dsc_comm_request *request, bool (*stops)(void *), void *context)
{
    struct dsc_comm *comm = request->comm;

    DSC_TRY(dsc_process_check(&comm->process, "this end of shared memory"));
    if (request->is_message) {
        if (!dsc_comm_message_finish(request, stops, context))
            return dsc_fail(DSC_EAGAIN, "the wait was stopped");
    } else if (!atomic_load_explicit(&request->is_done, memory_order_acquire)) {
        bool goes_on = true;

        pthread_mutex_lock(&comm->mutex);
        while (goes_on && !atomic_load_explicit(&request->is_done, memory_order_relaxed))
            goes_on = comm->is_running ? wait_for_other(comm, stops, context) : run_first(comm, stops, context);
        pthread_mutex_unlock(&comm->mutex);
        if (!goes_on)
            return dsc_fail(DSC_EAGAIN, "the wait was stopped");
    }
    if (request->status == DSC_OK)
        return DSC_OK;
    DSC_TRY(dsc_comm_check(comm));
    return dsc_fail(request->status, "the end was closed before the request was done");
}

bool dsc_comm_is_done(dsc_comm_request *request)
{
    struct dsc_comm *comm = request->comm;

    if (!dsc_process_is_this(&comm->process))
        return false;
    if (atomic_load_explicit(&request->is_done, memory_order_acquire))
        return true;
    if (request->is_message)
        return dsc_comm_message_advance(request);
    /*
     * Without the worker, a small call that nobody waits for would stay in the queue for ever. If the worker cannot
     * start, the call stays until somebody waits.
     */
    pthread_mutex_lock(&comm->mutex);
    if (!comm->wants_worker && !comm->is_running && !comm->is_closed)
        (void)ask_worker(comm);
    pthread_mutex_unlock(&comm->mutex);
    return atomic_load_explicit(&request->is_done, memory_order_acquire);
}

dsc_status dsc_comm_release(dsc_comm_request *request)
{
    if (request == NULL || !dsc_process_is_this(&request->comm->process))
        return DSC_OK;
    if (!atomic_load_explicit(&request->is_done, memory_order_acquire))
        return dsc_fail(DSC_ESTATE, "the request is not done");
    free(request);
    return DSC_OK;
}

void dsc_comm_stop(struct dsc_comm *comm)
{
    atomic_store(&comm->is_closing, true);
    pthread_mutex_lock(&comm->mutex);
    pthread_cond_broadcast(&comm->has_work);
    pthread_cond_broadcast(&comm->has_done);
    while (comm->is_running)
        pthread_cond_wait(&comm->has_done, &comm->mutex);
    for (; comm->first != NULL; comm->first = comm->first->next) {
        comm->first->status = DSC_ESTATE;
        atomic_store_explicit(&comm->first->is_done, true, memory_order_release);
    }
    comm->end = &comm->first;
    pthread_cond_broadcast(&comm->has_done);
    bool has_worker = comm->has_worker;
    comm->has_worker = false;
    pthread_mutex_unlock(&comm->mutex);
    if (has_worker)
        pthread_join(comm->worker, NULL);
}
