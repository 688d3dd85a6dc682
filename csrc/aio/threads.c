/* A backend that works wherever threads are available: workers make one system call for each transfer. */
#include "aio/backend.h"

#include "aio/transfer.h"
#include "base/fail.h"

#include <pthread.h>
#include <signal.h>
#include <stdlib.h>

#define WORKERS_PER_THREAD \
    8 /* a worker sleeps in the kernel most of the time, so there are more of them than of processors */

struct list {
    struct dsc_aio_op *first;
    struct dsc_aio_op **end;
};

struct state {
    pthread_mutex_t mutex;
    pthread_cond_t has_work;
    pthread_cond_t has_done;
    struct list work;
    struct list done;
    bool is_closing;
    int32_t n_workers;
    pthread_t workers[];
};

static void push(struct list *list, struct dsc_aio_op *op)
{
    op->next = NULL;
    *list->end = op;
    list->end = &op->next;
}

static struct dsc_aio_op *pop(struct list *list)
{
    struct dsc_aio_op *op = list->first;

    list->first = op->next;
    if (list->first == NULL)
        list->end = &list->first;
    return op;
}

static void *work(void *opaque)
{
    struct state *state = opaque;

    pthread_mutex_lock(&state->mutex);
    for (;;) {
        while (state->work.first == NULL && !state->is_closing)
            pthread_cond_wait(&state->has_work, &state->mutex);
        if (state->work.first == NULL)
            break;

        struct dsc_aio_op *op = pop(&state->work);

        pthread_mutex_unlock(&state->mutex);
        dsc_aio_transfer(op);
        pthread_mutex_lock(&state->mutex);
        push(&state->done, op);
        pthread_cond_signal(&state->has_done);
    }
    pthread_mutex_unlock(&state->mutex);
    return NULL;
}

static void threads_close(void *opaque)
{
    struct state *state = opaque;

    pthread_mutex_lock(&state->mutex);
    state->is_closing = true;
    pthread_cond_broadcast(&state->has_work);
    pthread_mutex_unlock(&state->mutex);
    for (int32_t i = 0; i < state->n_workers; i++)
        pthread_join(state->workers[i], NULL);
    pthread_cond_destroy(&state->has_done);
    pthread_cond_destroy(&state->has_work);
    pthread_mutex_destroy(&state->mutex);
    free(state);
}

static dsc_status threads_open(const struct dsc_aio_config *config, void **out_state)
{
    int64_t n_wanted = (int64_t)config->n_threads * WORKERS_PER_THREAD;
    int32_t n_workers = n_wanted < config->queue_depth ? (int32_t)n_wanted : config->queue_depth;
    struct state *state = calloc(1, sizeof *state + (size_t)n_workers * sizeof state->workers[0]);
    sigset_t all;
    sigset_t before;
    int err = 0;

    if (state == NULL)
        return dsc_fail(DSC_ENOMEM, "no memory for the threads backend");
    state->work.end = &state->work.first;
    state->done.end = &state->done.first;
    pthread_mutex_init(&state->mutex, NULL);
    pthread_cond_init(&state->has_work, NULL);
    pthread_cond_init(&state->has_done, NULL);
    sigfillset(&all); /* signals are for the program's own threads */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    while (state->n_workers < n_workers && err == 0) {
        err = pthread_create(&state->workers[state->n_workers], NULL, work, state);
        if (err == 0)
            state->n_workers++;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (state->n_workers == 0) { /* fewer threads than wanted suffice */
        threads_close(state);
        return dsc_fail(DSC_ENOTSUP, "threads backend: no thread can be started (errno %d)", err);
    }
    *out_state = state;
    return DSC_OK;
}

static int64_t threads_submit(void *opaque, struct dsc_aio_op *const *ops, int64_t n_ops)
{
    struct state *state = opaque;

    pthread_mutex_lock(&state->mutex);
    for (int64_t i = 0; i < n_ops; i++) {
        push(&state->work, ops[i]);
        pthread_cond_signal(&state->has_work);
    }
    pthread_mutex_unlock(&state->mutex);
    return n_ops;
}

static int64_t threads_reap(void *opaque, struct dsc_aio_op **out_ops, int64_t capacity, bool wait)
{
    struct state *state = opaque;
    int64_t n = 0;

    pthread_mutex_lock(&state->mutex);
    while (wait && state->done.first == NULL)
        pthread_cond_wait(&state->has_done, &state->mutex);
    for (; n < capacity && state->done.first != NULL; n++)
        out_ops[n] = pop(&state->done);
    pthread_mutex_unlock(&state->mutex);
    return n;
}

const struct dsc_aio_backend dsc_aio_backend_threads = {
    .name = "threads",
    .open = threads_open,
    .close = threads_close,
    .submit = threads_submit,
    .reap = threads_reap,
};
