/*
 * aio/threads.c, and engines of several threads at once over every backend: all threads read the data written by one.
 * Also meant for the thread sanitizer.
 */
#include "aio/folder.h"

#include "pool.h"

#define CREATE (DSC_AIO_READ | DSC_AIO_WRITE | DSC_AIO_CREATE | DSC_AIO_TRUNCATE)

/* Several threads write to one file, each with its own engine and its own stripes. Stripes share pages. */
struct job {
    const char *backend;
    dsc_aio_file *file;
    unsigned char *data;
    int64_t n_wrong;
};

enum { N_STRIPES = 64, STRIPE_BYTES = 10007, N_JOBS = 4 };

static void run_job(void *arg, int64_t first, int64_t last)
{
    struct job *job = arg;

    for (int64_t j = first; j < last; j++) {
        struct dsc_aio_config config = DSC_AIO_CONFIG_INIT;
        unsigned char *got = test_alloc(STRIPE_BYTES);
        dsc_aio *aio = NULL;
        dsc_aio_id id;
        int64_t n_done = 0;
        int64_t res = 0;

        config.backend = job->backend;
        config.queue_depth = 3;
        config.block_bytes = 8192;
        if (dsc_aio_create(&config, &aio) != DSC_OK)
            continue; /* the missing stripes reveal the failure */
        for (int64_t s = j; s < N_STRIPES; s += N_JOBS)
            (void)dsc_aio_submit_write(aio, job->file, s * STRIPE_BYTES, job->data + s * STRIPE_BYTES, STRIPE_BYTES, &id);
        (void)dsc_aio_wait_all(aio, &n_done);
        for (int64_t s = j; s < N_STRIPES; s += N_JOBS) {
            (void)dsc_aio_submit_read(aio, job->file, s * STRIPE_BYTES, got, STRIPE_BYTES, &id);
            (void)dsc_aio_wait(aio, id, &res);
            if (res != STRIPE_BYTES || memcmp(got, job->data + s * STRIPE_BYTES, STRIPE_BYTES) != 0)
                __atomic_fetch_add(&job->n_wrong, 1, __ATOMIC_RELAXED);
        }
        dsc_aio_destroy(aio);
        free(got);
    }
}

static void test_threads(const char *backend)
{
    static unsigned char data[N_STRIPES * STRIPE_BYTES];
    static unsigned char got[N_STRIPES * STRIPE_BYTES + 1];
    struct pool pool;
    struct job job = {backend, folder_open(CREATE, true), data, 0};

    TEST_CASE("%s", backend);
    folder_fill(data, sizeof data, 21);
    pool_init(&pool, N_JOBS, 1);
    pool.par.run(pool.par.ctx, N_JOBS, run_job, &job);
    pool_clear(&pool);
    CHECK_EQ(job.n_wrong, 0);
    CHECK_EQ(folder_read(got, sizeof got), sizeof data);
    CHECK_BYTES(got, data, sizeof data);
    CHECK_STATUS(dsc_aio_close(job.file), DSC_OK);
}

/* Runs with more workers than blocks, with fewer, and with one. */
static void test_workers(int32_t n_threads, int32_t queue_depth)
{
    static unsigned char data[300000];
    static unsigned char got[300001];
    struct dsc_aio_config config = DSC_AIO_CONFIG_INIT;
    dsc_aio_file *file = folder_open(CREATE, false);
    dsc_aio *aio = NULL;
    int64_t n_done = 0;

    TEST_CASE("n_threads=%d queue_depth=%d", (int)n_threads, (int)queue_depth);
    config.backend = "threads";
    config.n_threads = n_threads;
    config.queue_depth = queue_depth;
    config.block_bytes = 4096;
    CHECK_STATUS(dsc_aio_create(&config, &aio), DSC_OK);
    CHECK_STR(dsc_aio_backend_name(aio), "threads");
    folder_fill(data, sizeof data, (uint64_t)queue_depth);
    for (int i = 0; i < 3; i++) {
        dsc_aio_id id;

        CHECK_STATUS(dsc_aio_submit_write(aio, file, i * 100000, data + i * 100000, 100000, &id), DSC_OK);
    }
    CHECK_STATUS(dsc_aio_wait_all(aio, &n_done), DSC_OK);
    CHECK_EQ(n_done, 3);
    CHECK_EQ(folder_read(got, sizeof got), sizeof data);
    CHECK_BYTES(got, data, sizeof data);
    dsc_aio_destroy(aio);
    CHECK_STATUS(dsc_aio_close(file), DSC_OK);
}

int main(void)
{
    const char *name;

    folder_make();
    for (int32_t i = 0; (name = dsc_aio_backend_at(i)) != NULL; i++)
        if (dsc_aio_backend_probe(name) == DSC_OK)
            test_threads(name);
    test_workers(1, 1);
    test_workers(1, 64);
    test_workers(4, 3);
    test_workers(256, 20);
    folder_remove();
    return test_finish(__FILE__);
}
