/*
 * The threads of this process for passes over memory: a parallel-for whose size does not depend on OMP_NUM_THREADS.
 *
 * Launchers set OMP_NUM_THREADS=1, which is right for many small operators and wrong for a pass over gigabytes of optimizer states. The pool has a
 * thread for each processor that is this rank's fair part of the host; the calling thread is one of them, the others start at the first work.
 *
 * Work is cut into as many shares as there are threads, always the same way: the thread that touched an element first (dsc_flat_zero) is the one that
 * updates it in each step, so that its page lies in that thread's NUMA node. Only a share that its thread has not begun when the caller is done
 * with its own is taken over by the caller: a processor that is busy with something else does not delay the rest.
 *
 * Any number of threads may call. While one has the pool, another does its own chunks by itself, one after the other, and shares what is left as soon as
 * the pool is free: it neither waits behind long work with a little of its own nor does much work alone while processors idle. So does a
 * body that shares out work itself. After fork() the child has no workers and starts its own; a body must not fork.
 */
#ifndef DSC_POOL_H
#define DSC_POOL_H

#include "dsc/status.h"
#include "dsc/types.h"

#ifdef __cplusplus
extern "C" {
#endif

#define DSC_POOL_MAX_THREADS 512

/*
 * The parallel-for of the pool; *out_par stays good for ever. Fewer than four chunks run in the calling thread: they are not worth waking another for.
 * The first call sets the size: DSC_NUM_THREADS if it is set, or else
 *
 *     min(processors that this process may run on, min(processors that its launcher may run on, cgroup quota) / LOCAL_WORLD_SIZE), at least 1
 *
 * where the launcher is the parent process: a rank that was bound to processors of its own has all of them, ranks that share theirs divide them.
 * DSC_EINVAL when one of the two variables is not a number in range.
 */
DSC_API dsc_status dsc_pool_par(struct dsc_par *out_par);

/* Threads of the pool, the caller among them: what it has, or would have if it were used now. Errors as dsc_pool_par. */
DSC_API dsc_status dsc_pool_n_threads(int32_t *out_n_threads);

/*
 * Ends the workers and sets another size, from 1 to DSC_POOL_MAX_THREADS; 0 goes back to the rule above. Waits for work in progress.
 * For tests and benchmarks. DSC_EINVAL for other numbers, with nothing changed.
 */
DSC_API dsc_status dsc_pool_resize(int32_t n_threads);

/* Workers that are running now: 0 before the first work, and never the caller. */
DSC_API int32_t dsc_pool_n_workers(void);

#ifdef __cplusplus
}
#endif
#endif
