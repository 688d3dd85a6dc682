/*
 * A dsc_par over pthreads, for tests and benchmarks. Each thread takes grain chunks at a time, so with a grain of 1 the
 * assignment of chunks to threads changes from run to run. Results must not depend on it.
 */
#ifndef DSC_TEST_POOL_H
#define DSC_TEST_POOL_H

#include "dsc/types.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

#define POOL_MAX_THREADS 64

struct pool {
    struct dsc_par par; /* lend this */
    int n_threads;      /* the caller among them */
    int64_t grain;      /* 0: one even share a thread */
    pthread_t threads[POOL_MAX_THREADS];
    pthread_mutex_t mutex;
    pthread_cond_t has_work;
    pthread_cond_t is_done;
    /* Under mutex: */
    dsc_par_body body;
    void *arg;
    int64_t n_chunks;
    int64_t next_chunk;
    int64_t step;
    int64_t n_runs; /* a worker joins each run once */
    int n_busy;
    bool is_closing;
};

/* Takes chunks until none are left. The mutex is held at entry and at return. */
static inline void pool_work(struct pool *pool)
{
    while (pool->next_chunk < pool->n_chunks) {
        int64_t first = pool->next_chunk;
        int64_t last = first + pool->step < pool->n_chunks ? first + pool->step : pool->n_chunks;

        pool->next_chunk = last;
        pthread_mutex_unlock(&pool->mutex);
        pool->body(pool->arg, first, last);
        pthread_mutex_lock(&pool->mutex);
    }
}

static inline void *pool_thread(void *arg)
{
    struct pool *pool = arg;
    int64_t n_runs_seen = 0;

    pthread_mutex_lock(&pool->mutex);
    while (!pool->is_closing) {
        if (pool->n_runs == n_runs_seen) {
            pthread_cond_wait(&pool->has_work, &pool->mutex);
            continue;
        }
        n_runs_seen = pool->n_runs;
        pool_work(pool);
        if (--pool->n_busy == 0)
            pthread_cond_signal(&pool->is_done);
    }
    pthread_mutex_unlock(&pool->mutex);
    return NULL;
}

static inline void pool_run(void *ctx, int64_t n_chunks, dsc_par_body body, void *arg)
{
    struct pool *pool = ctx;

    pthread_mutex_lock(&pool->mutex);
    pool->body = body;
    pool->arg = arg;
    pool->n_chunks = n_chunks;
    pool->next_chunk = 0;
    pool->step = pool->grain > 0 ? pool->grain : (n_chunks + pool->n_threads - 1) / pool->n_threads;
    pool->n_busy = pool->n_threads - 1;
    pool->n_runs++;
    pthread_cond_broadcast(&pool->has_work);
    pool_work(pool);
    while (pool->n_busy > 0)
        pthread_cond_wait(&pool->is_done, &pool->mutex);
    pthread_mutex_unlock(&pool->mutex);
}

static inline void pool_init(struct pool *pool, int n_threads, int64_t grain)
{
    *pool = (struct pool){.n_threads = n_threads, .grain = grain};
    pool->par = (struct dsc_par){.ctx = pool, .run = pool_run};
    pthread_mutex_init(&pool->mutex, NULL);
    pthread_cond_init(&pool->has_work, NULL);
    pthread_cond_init(&pool->is_done, NULL);
    for (int i = 1; i < n_threads; i++) {
        if (n_threads > POOL_MAX_THREADS || pthread_create(&pool->threads[i], NULL, pool_thread, pool) != 0) {
            fprintf(stderr, "cannot start thread %d of %d\n", i, n_threads);
            exit(1);
        }
    }
}

static inline void pool_clear(struct pool *pool)
{
    pthread_mutex_lock(&pool->mutex);
    pool->is_closing = true;
    pthread_cond_broadcast(&pool->has_work);
    pthread_mutex_unlock(&pool->mutex);
    for (int i = 1; i < pool->n_threads; i++)
        pthread_join(pool->threads[i], NULL);
    pthread_cond_destroy(&pool->is_done);
    pthread_cond_destroy(&pool->has_work);
    pthread_mutex_destroy(&pool->mutex);
}

#endif
