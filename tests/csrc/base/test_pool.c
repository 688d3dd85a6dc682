/*
 * base/pool.c: every chunk runs once, each share begins with the same thread each time, and threads take over the rest
 * of a slow thread's share. Covers several callers, nested calls, fork and sizes. Also meant for the thread sanitizer.
 */
#include "test.h"

#include "dsc/pool.h"

#include <fenv.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <sys/wait.h>
#include <unistd.h>

#define MAX_CHUNKS 257

/* A child of fork() starts workers. The thread sanitizer stops such a child unless this option allows it. */
__attribute__((visibility("default"))) const char *__tsan_default_options(void);
const char *__tsan_default_options(void)
{
    return "die_after_fork=0";
}

static struct dsc_par pool_of(int32_t n_threads)
{
    struct dsc_par par = {0};

    CHECK_STATUS(dsc_pool_resize(n_threads), DSC_OK);
    CHECK_STATUS(dsc_pool_par(&par), DSC_OK);
    return par;
}

struct counts {
    int32_t of_chunk[MAX_CHUNKS]; /* not atomic: two threads at one chunk are a race, which the thread sanitizer sees */
};

static void count_chunks(void *arg, int64_t first, int64_t last)
{
    struct counts *counts = arg;

    for (int64_t i = first; i < last; i++)
        counts->of_chunk[i]++;
}

static void test_every_chunk_once(void)
{
    static const int32_t sizes[] = {1, 2, 3, 7, 64}; /* most exceed the number of processors */
    static const int64_t n_chunks[] = {0, 1, 2, 3, 6, 7, 8, 64, 65, 257};
    struct counts counts;

    for (size_t s = 0; s < sizeof sizes / sizeof sizes[0]; s++) {
        struct dsc_par par = pool_of(sizes[s]);

        CHECK_EQ(dsc_pool_n_workers(), 0); /* no worker starts before the first work */
        for (int repeat = 0; repeat < 20; repeat++) {
            for (size_t c = 0; c < sizeof n_chunks / sizeof n_chunks[0]; c++) {
                TEST_CASE("%d threads, %d chunks, repeat %d", sizes[s], (int)n_chunks[c], repeat);
                memset(&counts, 0, sizeof counts);
                par.run(par.ctx, n_chunks[c], count_chunks, &counts);
                for (int64_t i = 0; i < MAX_CHUNKS; i++) {
                    TEST_AT(i);
                    CHECK_EQ(counts.of_chunk[i], i < n_chunks[c] ? 1 : 0);
                }
                if (repeat == 0 && n_chunks[c] <= 3)
                    CHECK_EQ(dsc_pool_n_workers(), 0); /* no worker starts for work too small to share */
            }
        }
        CHECK_EQ(dsc_pool_n_workers(), sizes[s] - 1);
    }
}

/*
 * Each thread waits in the first piece of its share until all threads are there. No thread can then take over that
 * piece of another thread's share, which fixes its thread.
 */
struct meeting {
    int64_t n_shares;
    _Atomic int64_t n_there;
    pthread_t of_chunk[MAX_CHUNKS];
};

static void meet(void *arg, int64_t first, int64_t last)
{
    struct meeting *meeting = arg;

    if (atomic_load(&meeting->n_there) < meeting->n_shares) {
        atomic_fetch_add(&meeting->n_there, 1);
        while (atomic_load(&meeting->n_there) < meeting->n_shares)
            sched_yield();
    }
    for (int64_t i = first; i < last; i++)
        meeting->of_chunk[i] = pthread_self();
}

static void test_shares_begin_with_their_threads(void)
{
    static const int64_t n_chunks[] = {64, 5, 4, 7, 257}; /* with 5 threads and 4 chunks, one thread has no chunk */
    static struct meeting first_time;
    static struct meeting again;
    struct dsc_par par = pool_of(5);

    for (size_t c = 0; c < sizeof n_chunks / sizeof n_chunks[0]; c++) {
        int64_t n_shares = n_chunks[c] < 5 ? n_chunks[c] : 5;

        memset(&first_time, 0, sizeof first_time);
        first_time.n_shares = n_shares;
        par.run(par.ctx, n_chunks[c], meet, &first_time);
        CHECK(pthread_equal(first_time.of_chunk[0], pthread_self()));
        CHECK_EQ(first_time.n_there, n_shares);
        for (int64_t a = 0; a < n_shares; a++) {
            for (int64_t b = 0; b < a; b++) {
                TEST_CASE("%d chunks, shares %d and %d", (int)n_chunks[c], (int)a, (int)b);
                CHECK(!pthread_equal(first_time.of_chunk[a * n_chunks[c] / n_shares],
                                     first_time.of_chunk[b * n_chunks[c] / n_shares]));
            }
        }
        for (int repeat = 0; repeat < 5; repeat++) {
            if (repeat == 2)
                usleep(5000); /* the workers sleep */
            memset(&again, 0, sizeof again);
            again.n_shares = n_shares;
            par.run(par.ctx, n_chunks[c], meet, &again);
            for (int64_t share = 0; share < n_shares; share++) {
                int64_t i = share * n_chunks[c] / n_shares;

                TEST_CASE("%d chunks, share %d, repeat %d", (int)n_chunks[c], (int)share, repeat);
                CHECK(pthread_equal(again.of_chunk[i], first_time.of_chunk[i]));
            }
        }
    }
}

/* One thread of two stays in its first piece until the other has run every other chunk. */
struct slow_thread {
    struct counts counts;
    int64_t n_chunks;
    pthread_t caller;
    bool is_caller_slow;
    _Atomic bool is_held;    /* the slow thread is in its piece */
    _Atomic int64_t n_quick; /* chunks that the other thread has run */
    int64_t n_held;
};

static void run_beside_a_slow_thread(void *arg, int64_t first, int64_t last)
{
    struct slow_thread *slow = arg;

    count_chunks(&slow->counts, first, last);
    if ((pthread_equal(pthread_self(), slow->caller) != 0) != slow->is_caller_slow) {
        while (!atomic_load(&slow->is_held)) /* so that no thread runs everything before the other has come */
            sched_yield();
        atomic_fetch_add(&slow->n_quick, last - first);
        return;
    }
    slow->n_held += last - first;
    atomic_store(&slow->is_held, true);
    while (atomic_load(&slow->n_quick) < slow->n_chunks - (last - first))
        sched_yield();
}

static void test_a_slow_thread_is_relieved(void)
{
    static const int64_t n_chunks[] = {4, 5, 63, 257};
    struct dsc_par par = pool_of(2);

    for (size_t c = 0; c < sizeof n_chunks / sizeof n_chunks[0]; c++) {
        for (int is_caller = 0; is_caller < 2; is_caller++) {
            struct slow_thread slow = {
                .n_chunks = n_chunks[c], .caller = pthread_self(), .is_caller_slow = is_caller != 0};

            TEST_CASE("%d chunks, slow %s", (int)n_chunks[c], is_caller ? "caller" : "worker");
            par.run(par.ctx, n_chunks[c], run_beside_a_slow_thread, &slow);
            for (int64_t i = 0; i < n_chunks[c]; i++)
                CHECK_EQ(slow.counts.of_chunk[i], 1);
            CHECK(slow.n_held > 0 && slow.n_held <= n_chunks[c] / 32 + 1);
            CHECK_EQ(slow.n_quick, n_chunks[c] - slow.n_held);
        }
    }
}

/* Several callers, whose work has different sizes. */
struct caller {
    struct dsc_par par;
    int64_t n_chunks;
    int64_t n_wrong;
};

static void *call_often(void *arg)
{
    struct caller *caller = arg;
    struct counts counts;

    for (int repeat = 0; repeat < 300; repeat++) {
        memset(&counts, 0, sizeof counts);
        caller->par.run(caller->par.ctx, caller->n_chunks, count_chunks, &counts);
        for (int64_t i = 0; i < MAX_CHUNKS; i++)
            caller->n_wrong += counts.of_chunk[i] != (i < caller->n_chunks);
    }
    return NULL;
}

static void test_several_callers(void)
{
    enum { N_CALLERS = 4 };
    struct dsc_par par = pool_of(3);
    struct caller callers[N_CALLERS];
    pthread_t threads[N_CALLERS];

    for (int i = 0; i < N_CALLERS; i++) {
        callers[i] = (struct caller){par, 1 + 37 * i * i % MAX_CHUNKS, 0};
        CHECK_EQ(pthread_create(&threads[i], NULL, call_often, &callers[i]), 0);
    }
    for (int i = 0; i < N_CALLERS; i++) {
        TEST_CASE("caller %d", i);
        pthread_join(threads[i], NULL);
        CHECK_EQ(callers[i].n_wrong, 0);
    }
}

/*
 * The work of one caller ends only after the work of another. Neither would end if the second caller waited for the
 * pool.
 */
struct long_work {
    struct dsc_par par;
    _Atomic bool has_begun;
    _Atomic bool may_end;
};

static void hold_the_pool(void *arg, int64_t first, int64_t last)
{
    struct long_work *work = arg;

    (void)first;
    (void)last;
    atomic_store(&work->has_begun, true);
    while (!atomic_load(&work->may_end))
        sched_yield();
}

static void *call_long_work(void *arg)
{
    struct long_work *work = arg;

    work->par.run(work->par.ctx, 4, hold_the_pool, work);
    return NULL;
}

static void test_a_second_caller_does_not_wait(void)
{
    struct long_work work = {.par = pool_of(2)};
    struct counts counts = {0};
    pthread_t thread;

    TEST_CASE("second caller");
    CHECK_EQ(pthread_create(&thread, NULL, call_long_work, &work), 0);
    while (!atomic_load(&work.has_begun))
        sched_yield();
    work.par.run(work.par.ctx, 50, count_chunks, &counts);
    for (int64_t i = 0; i < MAX_CHUNKS; i++)
        CHECK_EQ(counts.of_chunk[i], i < 50);
    atomic_store(&work.may_end, true);
    pthread_join(thread, NULL);
}

struct nest {
    struct dsc_par par;
    struct counts counts[8];
};

static void call_again(void *arg, int64_t first, int64_t last)
{
    struct nest *nest = arg;

    for (int64_t i = first; i < last; i++)
        nest->par.run(nest->par.ctx, 9, count_chunks, &nest->counts[i]);
}

static void test_nested(void)
{
    struct nest nest = {.par = pool_of(3)};

    TEST_CASE("nested");
    nest.par.run(nest.par.ctx, 8, call_again, &nest);
    for (int64_t i = 0; i < 8; i++)
        for (int64_t chunk = 0; chunk < 9; chunk++)
            CHECK_EQ(nest.counts[i].of_chunk[chunk], 1);
}

struct roundings {
    struct meeting meeting;
    int of_chunk[MAX_CHUNKS];
};

static void note_rounding(void *arg, int64_t first, int64_t last)
{
    struct roundings *roundings = arg;

    meet(&roundings->meeting, first, last);
    for (int64_t i = first; i < last; i++)
        roundings->of_chunk[i] = fegetround();
}

/*
 * Results do not depend on the computing thread: workers adopt the caller's current rounding mode and treatment of
 * subnormals.
 */
static void test_floating_point_environment(void)
{
    static const int modes[] = {FE_UPWARD, FE_TONEAREST};
    static struct roundings roundings;
    struct dsc_par par = pool_of(4);

    for (int m = 0; m < 2; m++) {
        memset(&roundings, 0, sizeof roundings);
        roundings.meeting.n_shares = 4;
        CHECK_EQ(fesetround(modes[m]), 0);
        par.run(par.ctx, 4, note_rounding, &roundings);
        CHECK_EQ(fesetround(FE_TONEAREST), 0);
        for (int64_t i = 0; i < 4; i++) {
            TEST_CASE("mode %d, share %d", m, (int)i);
            CHECK_EQ(roundings.of_chunk[i], modes[m]);
        }
    }
}

/* Runs in the child. Returns 0 when the pool works there with newly started workers. */
static int child_of_fork(struct dsc_par par, int32_t n_threads)
{
    struct counts counts = {0};
    int n_wrong = dsc_pool_n_workers() != 0;

    alarm(200); /* ends a child that hangs; the parent sees the signal */
    for (int repeat = 0; repeat < 3; repeat++)
        par.run(par.ctx, MAX_CHUNKS, count_chunks, &counts);
    for (int64_t i = 0; i < MAX_CHUNKS; i++)
        n_wrong += counts.of_chunk[i] != 3;
    n_wrong += dsc_pool_n_workers() != n_threads - 1;
    return n_wrong == 0 ? 0 : 1;
}

static void *call_until_told(void *arg)
{
    struct long_work *work = arg;
    struct counts counts;

    while (!atomic_load(&work->may_end)) {
        work->par.run(work->par.ctx, 64, count_chunks, &counts);
        atomic_store(&work->has_begun, true);
    }
    return NULL;
}

/* Another thread uses the pool all the time, so that forks happen in the middle of its calls. */
static void test_fork(void)
{
    struct long_work work = {.par = pool_of(3)};
    struct counts counts = {0};
    pthread_t thread;

    CHECK_EQ(pthread_create(&thread, NULL, call_until_told, &work), 0);
    while (!atomic_load(&work.has_begun))
        sched_yield();
    for (int i = 0; i < 10; i++) {
        int status = -1;
        pid_t child = fork();

        if (child == 0)
            _exit(child_of_fork(work.par, 3));
        TEST_CASE("fork %d", i);
        CHECK(child > 0);
        CHECK_EQ(waitpid(child, &status, 0), child);
        CHECK_EQ(status, 0);
    }
    atomic_store(&work.may_end, true);
    pthread_join(thread, NULL);
    CHECK_EQ(dsc_pool_n_workers(), 2);
    work.par.run(work.par.ctx, MAX_CHUNKS, count_chunks, &counts);
    for (int64_t i = 0; i < MAX_CHUNKS; i++)
        CHECK_EQ(counts.of_chunk[i], 1);
}

/* Until a size is set, the calling thread does all the work. */
static void test_no_size(void)
{
    struct dsc_par par = {0};
    struct counts counts = {0};

    TEST_CASE("no size");
    CHECK_EQ(dsc_pool_n_threads(), 0);
    CHECK_STATUS(dsc_pool_par(&par), DSC_OK);
    par.run(par.ctx, MAX_CHUNKS, count_chunks, &counts);
    for (int64_t i = 0; i < MAX_CHUNKS; i++)
        CHECK_EQ(counts.of_chunk[i], 1);
    CHECK_EQ(dsc_pool_n_workers(), 0);
    CHECK_EQ(dsc_pool_n_threads(), 0);
}

static void test_size(void)
{
    struct dsc_par par = pool_of(3);
    struct counts counts = {0};

    TEST_CASE("size");
    setenv("DSC_NUM_THREADS", "7", 1); /* the cores read no environment */
    setenv("LOCAL_WORLD_SIZE", "100000", 1);
    CHECK_EQ(dsc_pool_n_threads(), 3);
    CHECK_ERROR(dsc_pool_resize(-1), DSC_EINVAL, "-1");
    CHECK_ERROR(dsc_pool_resize(DSC_POOL_MAX_THREADS + 1), DSC_EINVAL, "513");
    CHECK_EQ(dsc_pool_n_threads(), 3);
    par.run(par.ctx, MAX_CHUNKS, count_chunks, &counts);
    CHECK_EQ(dsc_pool_n_workers(), 2);
    CHECK_STATUS(dsc_pool_resize(0), DSC_OK);
    CHECK_EQ(dsc_pool_n_workers(), 0);
    test_no_size();
    unsetenv("DSC_NUM_THREADS");
    unsetenv("LOCAL_WORLD_SIZE");
}

int main(void)
{
    alarm(280); /* a pool that hangs is a failed test */
    test_no_size();
    test_every_chunk_once();
    test_shares_begin_with_their_threads();
    test_a_slow_thread_is_relieved();
    test_several_callers();
    test_a_second_caller_does_not_wait();
    test_nested();
    test_floating_point_environment();
    test_fork();
    test_size();
    CHECK_STATUS(dsc_pool_resize(1), DSC_OK); /* no worker outlives the test */
    return test_finish(__FILE__);
}
