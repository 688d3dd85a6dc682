/* How ranks wait for one another, and how they notice that a rank will never arrive. */
#include "comm/end.h"

#include "base/fail.h"

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <poll.h>
#include <stdarg.h>
#include <stdio.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define SLICE_NS INT64_C(100000000) /* between looks at the other ranks */

int64_t dsc_comm_now_ns(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

void dsc_comm_relax(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static void wake(struct dsc_comm *comm)
{
    (void)syscall(SYS_futex, &dsc_comm_control_of(comm->segment)->tick, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

/*
 * [Note: Sleepers] Before a rank sleeps, it writes down the rank that it waits for, and then reads that rank's tick
 * again. A rank that makes progress writes its tick, and then looks for sleepers. All four accesses are sequentially
 * consistent, so at least one of the two ranks sees the other. A tick without sleepers costs no system call.
 */
void dsc_comm_publish(struct dsc_comm *comm, uint32_t tick)
{
    bool is_awaited = false;

    comm->tick = tick;
    atomic_store(&dsc_comm_control_of(comm->segment)->tick, tick);
    for (int32_t rank = 0; rank < comm->n_ranks; rank++)
        is_awaited |= atomic_load(&dsc_comm_control_at(comm, rank)->awaited) == comm->rank + 1;
    if (is_awaited)
        wake(comm);
}

static bool has_reached(const struct dsc_comm *comm, int32_t rank, uint32_t tick)
{
    uint32_t at = atomic_load_explicit(&dsc_comm_control_at(comm, rank)->tick, memory_order_acquire);

    return (int32_t)(at - tick) >= 0;
}

dsc_status dsc_comm_check(const struct dsc_comm *comm)
{
    int32_t failure = atomic_load_explicit(&comm->failure, memory_order_acquire);

    return failure == DSC_OK ? DSC_OK : dsc_fail((dsc_status)failure, "%s", comm->why);
}

dsc_status dsc_comm_break(struct dsc_comm *comm, dsc_status status, const char *format, ...)
{
    char text[DSC_COMM_WHY_BYTES];
    va_list args;
    int n = 0;

    if (comm->running != NULL)
        n = snprintf(text, sizeof text, "%s number %llu: ", dsc_comm_op_text(comm->running->op),
                     (unsigned long long)comm->n_calls);
    va_start(args, format);
    (void)vsnprintf(text + n, sizeof text - (size_t)n, format, args);
    va_end(args);
    return dsc_comm_break_with(comm, status, text);
}

dsc_status dsc_comm_break_with(struct dsc_comm *comm, dsc_status status, const char *text)
{
    struct dsc_comm_control *control = dsc_comm_control_of(comm->segment);

    pthread_mutex_lock(&comm->failure_mutex);
    if (atomic_load_explicit(&comm->failure, memory_order_relaxed) == DSC_OK) {
        (void)snprintf(comm->why, sizeof comm->why, "%s", text);
        (void)snprintf(control->why, sizeof control->why, "%s", text);
        atomic_store_explicit(&comm->failure, (int32_t)status, memory_order_release);
        atomic_store(&control->state, DSC_COMM_FAILED);
        wake(comm);
        dsc_comm_ring_all(comm);
    }
    pthread_mutex_unlock(&comm->failure_mutex);
    return dsc_comm_check(comm);
}

void dsc_comm_say_closed(struct dsc_comm *comm)
{
    uint32_t open = DSC_COMM_OPEN;

    /* An earlier state (failed) stays. */
    (void)atomic_compare_exchange_strong(&dsc_comm_control_of(comm->segment)->state, &open, DSC_COMM_CLOSED);
    wake(comm);
    dsc_comm_ring_all(comm);
}

bool dsc_comm_has_ended(const struct dsc_comm *comm, int32_t rank)
{
    struct pollfd look = {.fd = comm->peers[rank].pidfd, .events = POLLIN};

    return look.fd >= 0 && poll(&look, 1, 0) > 0;
}

/* Breaks the end if rank has not finished this call and never will. */
static dsc_status look_at(struct dsc_comm *comm, int32_t rank, bool is_dead)
{
    struct dsc_comm_control *control = dsc_comm_control_at(comm, rank);
    uint32_t state = atomic_load_explicit(&control->state, memory_order_acquire);
    int pid = (int)comm->peers[rank].segment->pid;

    /* The tick is read last: the rank may have finished the call before it closed or died. */
    if ((!is_dead && state == DSC_COMM_OPEN) || has_reached(comm, rank, comm->end_tick))
        return DSC_OK;
    if (state == DSC_COMM_FAILED)
        return dsc_comm_break(comm, DSC_EPEER, "rank %d (process %d) has failed: %.*s", (int)rank, pid,
                              (int)sizeof control->why - 1, control->why);
    return dsc_comm_break(comm, DSC_EPEER, "rank %d (process %d) has %s", (int)rank, pid,
                          state == DSC_COMM_CLOSED ? "closed its end" : "ended");
}

/* Checks whether it makes sense to go on waiting for the awaited rank. */
static dsc_status look_around(struct dsc_comm *comm, int32_t awaited, bool asks_kernel)
{
    bool is_dead[DSC_COMM_MAX_RANKS];

    /* A dead rank is reported first: other ranks may have failed because of it, and may have ended since. */
    for (int32_t rank = 0; rank < comm->n_ranks; rank++) {
        is_dead[rank] = asks_kernel && dsc_comm_has_ended(comm, rank);
        if (is_dead[rank] && atomic_load(&dsc_comm_control_at(comm, rank)->state) == DSC_COMM_OPEN)
            DSC_TRY(look_at(comm, rank, true));
    }
    for (int32_t rank = 0; rank < comm->n_ranks; rank++)
        if (rank != comm->rank)
            DSC_TRY(look_at(comm, rank, is_dead[rank]));
    if (atomic_load_explicit(&comm->is_closing, memory_order_acquire))
        return dsc_fail(DSC_ESTATE, "the end has been closed");
    if (dsc_comm_now_ns() < comm->deadline_ns)
        return DSC_OK;
    return dsc_comm_break(comm, DSC_ETIMEDOUT, "rank %d (process %d) has not come in %.3g s", (int)awaited,
                          (int)comm->peers[awaited].segment->pid, (double)comm->timeout_ns * 1e-9);
}

/* Sleeps until the rank makes progress or a slice of time is over. */
static void sleep_for(struct dsc_comm *comm, int32_t rank, uint32_t tick)
{
    struct dsc_comm_control *own = dsc_comm_control_of(comm->segment);
    _Atomic uint32_t *word = &dsc_comm_control_at(comm, rank)->tick;
    int64_t left_ns = comm->deadline_ns - dsc_comm_now_ns();
    struct timespec slice = {.tv_nsec = (long)(left_ns < SLICE_NS ? (left_ns > 0 ? left_ns : 1) : SLICE_NS)};

    atomic_store(&own->awaited, rank + 1);

    uint32_t at = atomic_load(word);

    if ((int32_t)(at - tick) < 0)
        (void)syscall(SYS_futex, word, FUTEX_WAIT, at, &slice, NULL, 0);
    atomic_store_explicit(&own->awaited, 0, memory_order_relaxed);
}

dsc_status dsc_comm_await(struct dsc_comm *comm, int32_t rank, uint32_t tick)
{
    if (has_reached(comm, rank, tick))
        return DSC_OK;
    for (int64_t until = dsc_comm_now_ns() + comm->spin_ns; dsc_comm_now_ns() < until;)
        for (int32_t i = 0; i < 16; i++) {
            if (has_reached(comm, rank, tick))
                return DSC_OK;
            dsc_comm_relax();
        }
    for (bool is_first = true; !has_reached(comm, rank, tick); is_first = false) {
        DSC_TRY(look_around(comm, rank, !is_first));
        DSC_TRY(dsc_comm_mail_advance(comm));
        if (!is_first && comm->stops != NULL && comm->stops(comm->stops_context))
            return dsc_fail(DSC_EAGAIN, "the wait was stopped");
        sleep_for(comm, rank, tick);
    }
    return DSC_OK;
}
