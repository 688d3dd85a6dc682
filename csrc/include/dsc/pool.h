/*
 * The threads of this process for passes over memory: a parallel-for whose size the caller sets, not an environment
 * variable.
 *
 * Launchers set OMP_NUM_THREADS=1, which is right for many small operators and wrong for a pass over gigabytes of
 * optimizer states. The calling thread belongs to the pool, the others start at the first work. How many there should
 * be is the caller's to decide (deepspeed_c/threads.py).
 *
 * Work is cut into as many shares as there are threads, always the same way: the thread that touched an element first
 * (dsc_flat_zero) updates it in each step, so that its page lies in that thread's NUMA node. Only a share that its
 * thread has not begun when the caller is done with its own is taken over by the caller: a processor that is busy with
 * something else does not delay the rest.
 *
 * Any number of threads may call. While one has the pool, another does its own chunks by itself, one after the other,
 * and shares the rest as soon as the pool is free: a short job does not wait behind a long one, and a long job does not
 * run alone while processors idle. So does a body that shares out work itself. After fork() the child has no workers
 * and starts its own, as many; a body must not fork.
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
 * The parallel-for of the pool; *out_par stays good for ever. Fewer than four chunks run in the calling thread: they
 * are not worth waking another for. All do until dsc_pool_resize has said how many threads there are. DSC_ENOMEM
 * without memory to make the pool safe to fork.
 */
DSC_API dsc_status dsc_pool_par(struct dsc_par *out_par);

/* Threads of the pool, the caller among them; 0 when nobody has said how many. */
DSC_API int32_t dsc_pool_n_threads(void);

/*
 * Ends the workers and says how many threads there are from now on, from 1 to DSC_POOL_MAX_THREADS, or 0 for not yet
 * said. Waits for work in progress. DSC_EINVAL for other numbers, with nothing changed.
 */
DSC_API dsc_status dsc_pool_resize(int32_t n_threads);

/* Workers that are running now: 0 before the first work, and never the caller. */
DSC_API int32_t dsc_pool_n_workers(void);

#ifdef __cplusplus
}
#endif
#endif
