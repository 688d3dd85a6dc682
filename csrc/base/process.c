/* Distinguishes a process from its forked children. */
#include "dsc/process.h"

#include "base/fail.h"

#include <pthread.h>
#include <stdatomic.h>
#include <unistd.h>

static atomic_int_least64_t n_forks;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static int handler_error; /* written once under once */

static void after_fork_in_child(void)
{
    atomic_fetch_add_explicit(&n_forks, 1, memory_order_relaxed);
}

static void count_forks(void)
{
    handler_error = pthread_atfork(NULL, NULL, after_fork_in_child);
}

dsc_status dsc_process_note(struct dsc_process *out_process)
{
    pthread_once(&once, count_forks);
    if (handler_error != 0)
        return dsc_fail(DSC_ENOMEM, "no memory to tell this process from its children (errno %d)", handler_error);
    *out_process =
        (struct dsc_process){.pid = getpid(), .n_forks = atomic_load_explicit(&n_forks, memory_order_relaxed)};
    return DSC_OK;
}

bool dsc_process_is_this(const struct dsc_process *process)
{
    return process->n_forks == atomic_load_explicit(&n_forks, memory_order_relaxed);
}

dsc_status dsc_process_check(const struct dsc_process *process, const char *what)
{
    if (dsc_process_is_this(process))
        return DSC_OK;
    return dsc_fail(DSC_ESTATE,
                    "%s belongs to process %lld, and this process (%lld) was forked from it: make another one here",
                    what, (long long)process->pid, (long long)getpid());
}
