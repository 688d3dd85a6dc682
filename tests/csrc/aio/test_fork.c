/*
 * Engines and files after fork, over every backend: a child is refused, its destructors do nothing, and the parent's
 * transfers end as if there were no child. This also holds while another thread is inside the engine, and with several
 * children at once. Also meant for the thread sanitizer.
 */
#include "aio/folder.h"

#include "aio/fault.c"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <sys/wait.h>

#define CREATE (DSC_AIO_READ | DSC_AIO_WRITE | DSC_AIO_CREATE | DSC_AIO_TRUNCATE)

enum { N_REQUESTS = 24, BYTES = 300001, CHILD_SECONDS = 200 };

__attribute__((visibility("default"))) const char *__tsan_default_options(void);

/* A child of fork() has one thread only. The thread sanitizer stops such a child unless this option allows it. */
const char *__tsan_default_options(void)
{
    return "die_after_fork=0";
}

/*
 * The address sanitizer leaves the locks of its allocator as they are when another thread holds one during fork (GCC
 * 12; others may not): an allocation in the child then waits for ever. Under GCC's address sanitizer, the child
 * therefore skips all steps that allocate.
 */
#ifdef __SANITIZE_ADDRESS__
enum { MAY_ALLOCATE = 0 };
#else
enum { MAY_ALLOCATE = 1 };
#endif

static unsigned char data[N_REQUESTS * BYTES];
static unsigned char got[N_REQUESTS * BYTES + 1];

/* The child's exit code, or 100 if a signal ended it. */
static int wait_for(pid_t child)
{
    int status = -1;

    if (child < 0 || waitpid(child, &status, 0) != child || !WIFEXITED(status))
        return 100;
    return WEXITSTATUS(status);
}

/*
 * Uses everything inherited from the parent, and then an engine that the child creates. Returns 0 or the number of the
 * failed step.
 */
static int child_of_fork(const char *backend, dsc_aio *aio, dsc_aio_file *file, dsc_aio_id id)
{
    unsigned char own[5000];
    struct dsc_aio_config config = DSC_AIO_CONFIG_INIT;
    dsc_aio_file *again = NULL;
    dsc_aio *mine = NULL;
    dsc_aio_id other = 0;
    int64_t n = -7;
    bool is_done = false;
    char owner[40];

    alarm(CHILD_SECONDS);
    snprintf(owner, sizeof owner, "engine belongs to process %ld,", (long)getppid());
    if (dsc_aio_wait(aio, id, &n) != DSC_ESTATE || n != -ENOENT || strstr(dsc_last_error(), owner) == NULL)
        return 1;
    if (dsc_aio_submit_read(aio, file, 0, own, sizeof own, &other) != DSC_ESTATE || other != 0 || strstr(dsc_last_error(), owner) == NULL)
        return 2;
    if (dsc_aio_wait_all(aio, &n) != DSC_ESTATE || n != 0)
        return 3;
    if (dsc_aio_poll(aio, id, &is_done) != DSC_ESTATE || dsc_aio_cancel(aio, id) != DSC_ESTATE)
        return 4;
    if (!MAY_ALLOCATE)
        return 0;
    config.backend = backend;
#ifdef __SANITIZE_THREAD__ /* it confuses threads of child and parent with the same stack */
    config.backend = strcmp(backend, "threads") == 0 ? "sync" : backend;
#endif
    config.queue_depth = 4;
    if (dsc_aio_create(&config, &mine) != DSC_OK)
        return 5;
    if (dsc_aio_submit_read(mine, file, 0, own, sizeof own, &other) != DSC_ESTATE || strstr(dsc_last_error(), "open file belongs to") == NULL)
        return 6;
    dsc_aio_destroy(aio);
    if (dsc_aio_close(file) != DSC_OK)
        return 7;
    if (dsc_aio_open(path, DSC_AIO_READ, true, &again) != DSC_OK || dsc_aio_submit_read(mine, again, 1, own, sizeof own, &other) != DSC_OK ||
        dsc_aio_wait(mine, other, &n) != DSC_OK)
        return 8;
    dsc_aio_destroy(mine);
    return dsc_aio_close(again) == DSC_OK ? 0 : 9;
}

static void test_in_flight(const char *backend, bool uses_direct, bool is_write)
{
    dsc_aio_file *file;
    dsc_aio *aio;
    dsc_aio_id ids[N_REQUESTS];
    pid_t children[3];
    int64_t res = 0;

    TEST_CASE("%s direct=%d write=%d", backend, uses_direct, is_write);
    folder_write(data, sizeof data);
    file = folder_open(is_write ? CREATE : DSC_AIO_READ, uses_direct);
    aio = folder_engine(backend, 16384, 8);
    memset(got, 0, sizeof got);
    for (int64_t i = 0; i < N_REQUESTS; i++)
        CHECK_STATUS(is_write ? dsc_aio_submit_write(aio, file, i * BYTES, data + i * BYTES, BYTES, &ids[i])
                              : dsc_aio_submit_read(aio, file, i * BYTES, got + i * BYTES, BYTES, &ids[i]),
                     DSC_OK);
    fflush(NULL);
    for (int i = 0; i < 3; i++) {
        children[i] = fork();
        if (children[i] == 0)
            _exit(child_of_fork(backend, aio, file, ids[0]));
        if (i == 1) /* with children that still run, and with none */
            for (int64_t k = 0; k < N_REQUESTS / 2; k++) {
                CHECK_STATUS(dsc_aio_wait(aio, ids[k], &res), DSC_OK);
                CHECK_EQ(res, BYTES);
            }
    }
    for (int i = 0; i < 3; i++)
        CHECK_EQ(wait_for(children[i]), 0);
    for (int64_t k = N_REQUESTS / 2; k < N_REQUESTS; k++) {
        CHECK_STATUS(dsc_aio_wait(aio, ids[k], &res), DSC_OK);
        CHECK_EQ(res, BYTES);
    }
    if (is_write)
        CHECK_EQ(folder_read(got, sizeof got), sizeof data);
    CHECK_BYTES(got, data, sizeof data);

    /* The parent reads once more after the children have ended. */
    CHECK_STATUS(dsc_aio_submit_read(aio, file, 7, got, BYTES, &ids[0]), DSC_OK);
    CHECK_STATUS(dsc_aio_wait(aio, ids[0], &res), DSC_OK);
    CHECK_BYTES(got, data + 7, BYTES);
    dsc_aio_destroy(aio);
    CHECK_STATUS(dsc_aio_close(file), DSC_OK);
}

/* Another thread uses the engine all the time, so that forks happen in the middle of its calls. */
struct busy {
    dsc_aio *aio;
    dsc_aio_file *file;
    atomic_bool is_over;
    atomic_int n_done;
    atomic_int n_wrong;
};

static void *read_on(void *arg)
{
    static unsigned char into[BYTES];
    struct busy *busy = arg;

    while (!atomic_load(&busy->is_over)) {
        dsc_aio_id id = 0;
        int64_t res = 0;

        if (dsc_aio_submit_read(busy->aio, busy->file, 3, into, sizeof into, &id) != DSC_OK || dsc_aio_wait(busy->aio, id, &res) != DSC_OK ||
            res != BYTES || memcmp(into, data + 3, BYTES) != 0)
            atomic_fetch_add(&busy->n_wrong, 1);
        atomic_fetch_add(&busy->n_done, 1);
    }
    return NULL;
}

static void test_busy(const char *backend)
{
    struct busy busy = {.is_over = false};
    pthread_t thread;

    TEST_CASE("%s, busy", backend);
    folder_write(data, sizeof data);
    busy.file = folder_open(DSC_AIO_READ, true);
    busy.aio = folder_engine(backend, 16384, 8);
    fflush(NULL);
    if (!CHECK_EQ(pthread_create(&thread, NULL, read_on, &busy), 0))
        return;
    for (int i = 0; i < 10; i++) {
        int n_done = atomic_load(&busy.n_done);
        pid_t child;

        while (atomic_load(&busy.n_done) == n_done)
            sched_yield();
        child = fork();
        if (child == 0) {
            alarm(CHILD_SECONDS);
            dsc_aio_destroy(busy.aio);
            _exit(dsc_aio_close(busy.file) == DSC_OK ? 0 : 1);
        }
        CHECK_EQ(wait_for(child), 0);
    }
    atomic_store(&busy.is_over, true);
    pthread_join(thread, NULL);
    CHECK_EQ(atomic_load(&busy.n_wrong), 0);
    dsc_aio_destroy(busy.aio);
    CHECK_STATUS(dsc_aio_close(busy.file), DSC_OK);
}

/* The number of this process's mappings that a child does not inherit. */
static int64_t count_unshared_maps(void)
{
    FILE *maps = fopen("/proc/self/smaps", "re");
    char line[512];
    int64_t n = 0;

    while (maps != NULL && fgets(line, sizeof line, maps) != NULL)
        if (strncmp(line, "VmFlags:", 8) == 0 && strstr(line, " dc") != NULL)
            n++;
    if (maps != NULL)
        fclose(maps);
    return n;
}

/*
 * [Note: Direct transfers and fork] of aio/file.c: a child does not inherit the engine's ring of buffers. It does
 * not inherit io_uring's rings either, because it could consume their results.
 */
static void test_rings_stay(void)
{
    int64_t n_before = count_unshared_maps();
    dsc_aio_file *file;
    dsc_aio *aio;
    dsc_aio_id id;

    TEST_CASE("rings");
    folder_write(data, 100000);
    file = folder_open(DSC_AIO_READ, true);
    if (dsc_aio_backend_probe("uring") == DSC_OK) {
        aio = folder_engine("uring", 16384, 8);
        CHECK(count_unshared_maps() > n_before);
        dsc_aio_destroy(aio);
    }
    if (dsc_aio_file_is_direct(file)) {
        aio = folder_engine("sync", 16384, 8);
        CHECK_EQ(count_unshared_maps(), n_before);
        CHECK_STATUS(dsc_aio_submit_read(aio, file, 1, got, 50000, &id), DSC_OK);
        CHECK_STATUS(dsc_aio_wait(aio, id, NULL), DSC_OK);
        CHECK(count_unshared_maps() > n_before);
        dsc_aio_destroy(aio);
    }
    CHECK_EQ(count_unshared_maps(), n_before);
    CHECK_STATUS(dsc_aio_close(file), DSC_OK);
}

static void test_backend(const char *name)
{
    for (int i = 0; i < 4; i++)
        test_in_flight(name, i % 2 != 0, i < 2);
    test_busy(name);
}

int main(void)
{
    const struct dsc_aio_fault_plan plan = {.seed = 3, .short_chance = 60, .late_chance = 100, .reorders = true, .takes_part = true};
    const char *name;

    folder_make();
    folder_fill(data, sizeof data, 17);
    for (int32_t i = 0; (name = dsc_aio_backend_at(i)) != NULL; i++)
        if (dsc_aio_backend_probe(name) == DSC_OK)
            test_backend(name);
    dsc_aio_plug_backend(&dsc_aio_backend_fault, false);
    dsc_aio_fault_set(&plan);
    for (int i = 0; i < 4; i++)
        test_in_flight("fault", i % 2 != 0, i < 2);
    test_rings_stay();
    folder_remove();
    return test_finish(__FILE__);
}
