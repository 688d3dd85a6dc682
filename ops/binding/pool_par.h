/* The pool of the process, for files with and without a torch header. */
#ifndef DSC_POOL_PAR_H
#define DSC_POOL_PAR_H

#include "dsc/types.h"

namespace dsc {

/*
 * The parallel-for of the process's pool (dsc/pool.h). The GIL may be held or not. Fails as the callback of
 * on_unsized_pool (handles.h) does. dsc_pool_par alone would give one thread until another operator has sized the pool.
 */
struct dsc_par pool_par();

}  // namespace dsc

#endif
