/*
 * The threads of this process for passes over memory: a parallel-for whose size the caller sets, not an environment
 * variable.
 *
 * Launchers set OMP_NUM_THREADS=1, which is right for many small operators and wrong for a pass over gigabytes of
 * optimizer states. The calling thread belongs to the pool; the other threads start with the first work. The caller
 * decides how many threads there are (deepspeed_c/threads.py).
 *
 * Work is cut into one share for each thread, always the same way. So the thread that touched an element first
 * (dsc_flat_zero) also updates it in each step, and its page lies in that thread's NUMA node. A thread that has
 * finished its own share takes over unbegun pieces of other shares, one at a time. So a processor that is busy with
 * something else does not delay the rest.
 *
 * A thread without work spins for 50 us before it sleeps, or until another thread has used its processor.
 *
 * Any number of threads may call. While one caller has the pool, another caller processes its chunks alone, one after
 * the other, and shares the rest as soon as the pool is free. So a short job does not wait behind a long job, and a
 * long job does not run alone while processors idle. The same holds for a body that itself calls the pool. After fork()
 * the child has no workers, and starts as many of its own; a body must not fork.
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
 * The parallel-for of the pool; *out_par stays valid for ever. Work of fewer than four chunks runs in the calling
 * thread, because it is not worth waking another. All work does so until dsc_pool_resize has set the number of threads.
 * DSC_ENOMEM if there is no memory to make the pool safe to fork.
 */
DSC_API dsc_status dsc_pool_par(struct dsc_par *out_par);

/* Number of threads of the pool, the caller included; 0 until it has been set. */
DSC_API int32_t dsc_pool_n_threads(void);

/*
 * Ends the workers and sets the number of threads, from 1 to DSC_POOL_MAX_THREADS; 0 unsets it. Waits for work in
 * progress. DSC_EINVAL for other numbers, with nothing changed.
 */
DSC_API dsc_status dsc_pool_resize(int32_t n_threads);

/* Number of workers that are running now, without the caller; 0 before the first work. */
DSC_API int32_t dsc_pool_n_workers(void);

#ifdef __cplusplus
}
#endif
#endif
