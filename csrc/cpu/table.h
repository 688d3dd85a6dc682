/* The CPU kernels as a table, one table per instruction set, and the choice of the table in use. */
#ifndef DSC_CPU_TABLE_H
#define DSC_CPU_TABLE_H

#include "cpu/isa.h"
#include "dsc/status.h"
#include "dsc/types.h"

/*
 * Elements as callers hand them in: at any address, and written through any type. The compiler generates unaligned
 * loads for them, which cost the same on the processors we build for.
 */
typedef float dsc_f32 __attribute__((aligned(1), may_alias));
typedef uint16_t dsc_half __attribute__((aligned(1), may_alias));

/*
 * Aligns arrays of dsc_f32 that we declare ourselves. Their type has alignment 1, and a full-register access across a
 * cache line costs as much as two accesses.
 */
#define DSC_ALIGNED _Alignas(64)

/*
 * Units of square_sums_f32, with squares below 2^(2 top - 252) that are multiples of 2^(2 (top - WINDOW) - 300). At
 * most 65 of them go to a lane: below 2^51 coarse units (2^44 a square), and 2^51 fine units (2^44 a coarse unit).
 */
#define DSC_SQUARES_COARSE (-296)
#define DSC_SQUARES_FINE (-340)
#define DSC_SQUARES_WINDOW 20

struct dsc_kernels {
#define DSC_KERNEL(name, params) void(*name) params;
#include "cpu/kernels.inc"
#undef DSC_KERNEL
};

#ifdef DSC_ISA /* the variant that is being compiled */
#define DSC_KERNEL(name, params) void DSC_K(name) params;
#include "cpu/kernels.inc"
#undef DSC_KERNEL
#endif

#define DSC_DECLARE_TABLE(isa, is_runnable) extern const struct dsc_kernels DSC_K_OF(kernels, isa);
DSC_ISA_MAP(DSC_DECLARE_TABLE)
#undef DSC_DECLARE_TABLE

/* Index of the entry of DSC_ISA_MAP in use; other cores index their own per-ISA tables with it. */
int32_t dsc_isa_index(void);

/* The table in use. */
const struct dsc_kernels *dsc_kernels_get(void);

/*
 * Returns n elements of any dtype as f32: data itself if it is f32, otherwise a conversion in scratch. data is at most
 * DSC_BLOCK_ELEMS long.
 */
const dsc_f32 *dsc_load_f32(const struct dsc_kernels *kernels, dsc_dtype dtype, const void *data, int64_t n,
                            dsc_f32 *scratch);

/* Writes n f32 elements to data in its dtype. src may be data itself when that is f32. */
void dsc_store_f32(const struct dsc_kernels *kernels, dsc_dtype dtype, const dsc_f32 *src, int64_t n, void *data);

#endif
