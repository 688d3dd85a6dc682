/* The CPU loops, one table per instruction set, chosen once at run time. */
#ifndef DSC_KERNELS_H
#define DSC_KERNELS_H

#include "dsc/status.h"
#include "dsc/types.h"

#ifdef __cplusplus
extern "C" {
#endif

/*
 * The table in use, by name: "scalar", "avx2", "avx512", "neon". It is the best table that this processor can run,
 * unless another table has been forced.
 */
DSC_API const char *dsc_cpu_isa_name(void);

/* Returns the name of the i-th table of this build, NULL past the end, and whether this processor can run the table. */
DSC_API const char *dsc_cpu_isa_at(int32_t i, bool *out_is_runnable);

/*
 * Forces a table by name for the calls that follow, process-wide. NULL goes back to the automatic choice. DSC_ENOTSUP,
 * with nothing changed, for a name that is not built or that this processor does not run.
 */
DSC_API dsc_status dsc_cpu_isa_force(const char *name);

#ifdef __cplusplus
}
#endif
#endif
