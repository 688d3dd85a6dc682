/*
 * The pool. Each worker has a mailbox, at which it spins for a moment and then sleeps.
 *
 * [Note: mailboxes] The caller opens the mailbox of each worker that has a share. A worker joins the job by changing
 * OPEN to IDLE. When no chunk is left, the caller closes the mailboxes of workers that have not joined, by the same
 * change. A worker reads the job, and the cursors of shares, only after it has joined. The job cannot end, and the next
 * job cannot be written, before that worker has left. So a worker that comes too late can at worst join a later job,
 * and then it reads that later job.
 *
 * A share is taken in pieces, from its cursor. A thread takes the pieces of its own share first, and then pieces of
 * other shares. So a thread that wakes late, or that loses its processor for a moment, delays the job by a piece.
 */
#include "dsc/pool.h"

#include "base/cores.h"
#include "base/fail.h"

#include <fenv.h>
#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define MAX_WORKERS (DSC_POOL_MAX_THREADS - 1)
#define MIN_CHUNKS                                                                                                    \
    4 /* fewer are done sooner (some 10 us each) than a sleeping thread has woken and fetched its part into its cache \
       */
#define PIECES 32 /* of a share: a piece of a millisecond's work takes some 30 us, and taking it less than 1 */
/*
 * A thread that waits spins for so long, about as long as a sleeping thread takes to start. (A longer spin would take
 * the processor from torch's own threads, which run between our calls.) The thread sleeps at once if it sees that
 * another thread has used its processor.
 */
#define SPIN_NS 50000
#define PREEMPTED_NS 100000 /* longer between two looks at the clock: another thread has run */
#define PAUSES_A_LOOK 32
#define CACHE_LINE_BYTES 64

enum mailbox_state { IDLE = 0, OPEN, ASLEEP, QUIT };

struct mailbox {
    _Alignas(CACHE_LINE_BYTES) _Atomic uint32_t state;
};

/* The part of a share that nobody has taken yet: from next to end, which lies below next if all is taken. */
struct cursor {
    _Alignas(CACHE_LINE_BYTES) _Atomic int64_t next;
    int64_t end;
};

struct job {
    dsc_par_body body;
    void *arg;
    int64_t first; /* of its chunks */
    int64_t piece; /* chunks that a thread takes at once */
    int64_t n_shares;
    fenv_t environment; /* modes for rounding and subnormals of the calling thread, so that the bits are the same for
                           any number of threads */
};

#define N_LEFT_SLEEPS 0x80000000u /* flag in n_left: the caller sleeps and must be woken */

/* Held by the thread that has the pool; it guards everything below except the atomics and the job's own data. */
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static _Atomic int32_t n_threads; /* 0: not set yet */
static _Atomic int32_t n_workers;
static pthread_t workers[MAX_WORKERS];

static pthread_once_t fork_once = PTHREAD_ONCE_INIT;
static int fork_error; /* written once under fork_once */

static struct mailbox mailboxes[MAX_WORKERS];
static struct job job;
static struct cursor cursors[DSC_POOL_MAX_THREADS];        /* of the job's shares */
static _Alignas(CACHE_LINE_BYTES) _Atomic uint32_t n_left; /* workers that have joined or may still join */
static _Atomic bool may_spin;

static void futex_wait(_Atomic uint32_t *word, uint32_t value)
{
    (void)syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, NULL, NULL,
                  0); /* the caller checks again after every return */
}

static void futex_wake(_Atomic uint32_t *word)
{
    (void)syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0);
}

static void pause_briefly(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static int64_t now_ns(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static bool is_reached(_Atomic uint32_t *word, bool is_wanted_zero, uint32_t *out_seen)
{
    *out_seen = atomic_load_explicit(word, memory_order_acquire);
    return (*out_seen == 0) == is_wanted_zero;
}

/*
 * Waits a while, without sleep, until *word is zero (is_wanted_zero) or nonzero (otherwise); returns the last value
 * read.
 */
static uint32_t spin(_Atomic uint32_t *word, bool is_wanted_zero)
{
    uint32_t seen;

    if (is_reached(word, is_wanted_zero, &seen) || !atomic_load_explicit(&may_spin, memory_order_relaxed))
        return seen;

    int64_t begin_ns = now_ns();
    int64_t look_ns = begin_ns;

    for (int32_t i = 1;; i++) {
        pause_briefly();
        if (is_reached(word, is_wanted_zero, &seen))
            return seen;
        if (i % PAUSES_A_LOOK == 0) {
            int64_t last_ns = look_ns;

            look_ns = now_ns();
            if (look_ns - begin_ns >= SPIN_NS || look_ns - last_ns >= PREEMPTED_NS)
                return seen;
        }
    }
}

/*
 * Runs the chunks of share number `share` that nobody has taken yet. The chunks of a share depend only on the numbers
 * of chunks and shares; the sizes of shares differ by at most one chunk.
 */
static void run_share(int64_t share)
{
    struct cursor *cursor = &cursors[share];

    while (atomic_load_explicit(&cursor->next, memory_order_relaxed) < cursor->end) {
        int64_t first = atomic_fetch_add_explicit(&cursor->next, job.piece, memory_order_relaxed);
        int64_t last = first + job.piece < cursor->end ? first + job.piece : cursor->end;

        if (first < last)
            job.body(job.arg, job.first + first, job.first + last);
    }
}

/* Runs the own share, then the rest of the others, in reverse order, because the last worker is woken last. */
static void run_shares(int64_t own)
{
    run_share(own);
    for (int64_t i = 1; i < job.n_shares; i++)
        run_share((own + job.n_shares - i) % job.n_shares);
}

static bool claim(struct mailbox *mailbox)
{
    uint32_t expected = OPEN;

    return atomic_compare_exchange_strong_explicit(&mailbox->state, &expected, IDLE, memory_order_acquire,
                                                   memory_order_relaxed);
}

/* OPEN or QUIT. */
static uint32_t wait_for_mail(struct mailbox *mailbox)
{
    for (;;) {
        uint32_t state = spin(&mailbox->state, false);

        if (state == IDLE && atomic_compare_exchange_strong(&mailbox->state, &state, ASLEEP))
            state = ASLEEP;
        while (state == ASLEEP) {
            futex_wait(&mailbox->state, ASLEEP);
            state = atomic_load_explicit(&mailbox->state, memory_order_acquire);
        }
        if (state != IDLE) /* IDLE: others did the share while this thread woke */
            return state;
    }
}

static void *work(void *arg)
{
    struct mailbox *mailbox = arg;
    int64_t share = mailbox - mailboxes + 1;

    while (wait_for_mail(mailbox) != QUIT) {
        if (!claim(mailbox))
            continue;
        fesetenv(&job.environment);
        run_shares(share);
        if (atomic_fetch_sub(&n_left, 1) == (N_LEFT_SLEEPS | 1))
            futex_wake(&n_left);
    }
    return NULL;
}

static void post(struct mailbox *mailbox, uint32_t state)
{
    if (atomic_exchange(&mailbox->state, state) == ASLEEP)
        futex_wake(&mailbox->state);
}

/*
 * After fork() the child has no workers. fork() waits for the current user of the pool, so that no job is half done in
 * the child.
 */
static void before_fork(void)
{
    pthread_mutex_lock(&mutex);
}

static void after_fork_in_parent(void)
{
    pthread_mutex_unlock(&mutex);
}

static void after_fork_in_child(void)
{
    atomic_store(&n_workers, 0);
    for (int32_t i = 0; i < MAX_WORKERS; i++)
        atomic_store_explicit(&mailboxes[i].state, IDLE, memory_order_relaxed);
    pthread_mutex_unlock(&mutex);
}

static void add_fork_handlers(void)
{
    fork_error = pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
}

/* Must be called before the mutex is taken for the first time. */
static dsc_status handle_forks(void)
{
    pthread_once(&fork_once, add_fork_handlers);
    if (fork_error != 0)
        return dsc_fail(DSC_ENOMEM, "no memory to make the thread pool safe to fork (errno %d)", fork_error);
    return DSC_OK;
}

/* Starts the workers. If the system allows fewer threads, the pool is smaller. The caller holds the mutex. */
static void start_workers(void)
{
    const int32_t n_wanted = atomic_load(&n_threads) - 1;
    int32_t n = 0;
    struct dsc_cores cores;
    sigset_t all;
    sigset_t before;

    dsc_cores_of(getpid(), &cores);
    /* If there are more threads than processors, a spinning thread blocks others. */
    atomic_store(&may_spin, n_wanted < dsc_cores_count(&cores));
    sigfillset(&all); /* signals are for the program's own threads */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    for (; n < n_wanted; n++) {
        struct dsc_cores near;
        char name[32]; /* the kernel keeps 15 characters of the name */

        atomic_store(&mailboxes[n].state, IDLE);
        if (pthread_create(&workers[n], NULL, work, &mailboxes[n]) != 0)
            break;
        snprintf(name, sizeof name, "dsc_pool/%d", n + 1);
        pthread_setname_np(workers[n], name);
        /*
         * Keeps the worker within its node, so that the pages it touched first stay local. If this is not allowed, the
         * worker runs anywhere.
         */
        dsc_cores_near("", &cores, n + 1, n_wanted + 1, &near);
        pthread_setaffinity_np(workers[n], sizeof near.bits, &near.bits.set);
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    atomic_store(&n_workers, n);
    atomic_store(&n_threads, n + 1);
}

/* With the mutex. */
static void end_workers(void)
{
    int32_t n = atomic_load(&n_workers);

    for (int32_t i = 0; i < n; i++)
        post(&mailboxes[i], QUIT);
    for (int32_t i = 0; i < n; i++)
        pthread_join(workers[i], NULL);
    atomic_store(&n_workers, 0);
}

static void wait_for_workers(void)
{
    if (spin(&n_left, true) == 0)
        return;

    uint32_t seen = atomic_fetch_or(&n_left, N_LEFT_SLEEPS) | N_LEFT_SLEEPS;

    while (seen != N_LEFT_SLEEPS) {
        futex_wait(&n_left, seen);
        seen = atomic_load_explicit(&n_left, memory_order_acquire);
    }
}

/* With the mutex. */
static void share_out(int64_t first, int64_t last, dsc_par_body body, void *arg)
{
    int64_t n_chunks;
    int64_t n_shares;

    if (atomic_load(&n_workers) == 0)
        start_workers();
    n_shares = atomic_load(&n_workers) + 1;
    if (n_shares > last - first)
        n_shares = last - first;
    n_chunks = last - first;
    job = (struct job){
        .body = body,
        .arg = arg,
        .first = first,
        .piece = n_chunks / n_shares / PIECES > 0 ? n_chunks / n_shares / PIECES : 1,
        .n_shares = n_shares,
    };
    for (int64_t share = 0; share < n_shares; share++) {
        atomic_store_explicit(&cursors[share].next, share * n_chunks / n_shares, memory_order_relaxed);
        cursors[share].end = (share + 1) * n_chunks / n_shares;
    }
    fegetenv(&job.environment);
    atomic_store(&n_left, (uint32_t)(n_shares - 1));
    for (int64_t share = 1; share < n_shares; share++)
        post(&mailboxes[share - 1], OPEN);
    run_shares(0);
    for (int64_t share = 1; share < n_shares; share++)
        if (claim(&mailboxes[share - 1]))
            atomic_fetch_sub(&n_left, 1);
    wait_for_workers();
}

static void run(void *ctx, int64_t n_chunks, dsc_par_body body, void *arg)
{
    int64_t first = 0;

    (void)ctx;
    if (n_chunks < MIN_CHUNKS || atomic_load(&n_threads) <= 1) {
        body(arg, 0, n_chunks);
        return;
    }
    while (first < n_chunks - 1 && pthread_mutex_trylock(&mutex) != 0) { /* busy, possibly because a body that has the
                                                                            pool has called it again */
        body(arg, first, first + 1);
        first++;
    }
    if (first >= n_chunks - 1) {
        body(arg, first, n_chunks);
        return;
    }
    share_out(first, n_chunks, body, arg);
    pthread_mutex_unlock(&mutex);
}

dsc_status dsc_pool_par(struct dsc_par *out_par)
{
    DSC_TRY(handle_forks());
    *out_par = (struct dsc_par){.ctx = NULL, .run = run};
    return DSC_OK;
}

int32_t dsc_pool_n_threads(void)
{
    return atomic_load(&n_threads);
}

dsc_status dsc_pool_resize(int32_t n)
{
    if (n < 0 || n > DSC_POOL_MAX_THREADS)
        return dsc_fail(DSC_EINVAL, "%d threads; the pool has 1 to %d, or 0 for not yet said", n, DSC_POOL_MAX_THREADS);
    DSC_TRY(handle_forks());
    pthread_mutex_lock(&mutex);
    end_workers();
    atomic_store(&n_threads, n);
    pthread_mutex_unlock(&mutex);
    return DSC_OK;
}

int32_t dsc_pool_n_workers(void)
{
    return atomic_load(&n_workers);
}
