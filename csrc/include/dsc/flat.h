/*
 * Passes over flat buffers: norm and finite check, reduction of ranks' pieces, scale, cast, zero. Same bits for any
 * thread count and any ISA.
 */
#ifndef DSC_FLAT_H
#define DSC_FLAT_H

#include "dsc/status.h"
#include "dsc/types.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A borrowed run of elements. */
struct dsc_span {
    void *data;      /* NULL only when n_elems is 0 */
    int64_t n_elems; /* >= 0 */
    dsc_dtype dtype;
};

/*
 * Sum of squares of all elements of n_spans spans, and how many are inf or NaN, in one pass. Elements are squared and
 * summed in f64, where the square of an f32 neither underflows nor overflows: even gradients of 1e-30 have a norm.
 * Non-finite elements are counted and left out of the sum.
 */
DSC_API dsc_status dsc_flat_sumsq(const struct dsc_span *spans, int64_t n_spans, const struct dsc_par *par,
                                  double *out_sumsq, int64_t *out_n_nonfinite);

/*
 * Adds up the pieces of n_srcs ranks, in the order given: acc = (accumulate ? acc : 0) + scale * (sum of all src). The
 * sum is held in f32 and rounded once. All spans have acc's length; sources share one dtype; acc may have another. acc
 * may be one of the sources (same address, same dtype); any other overlap is forbidden. out_sumsq and out_n_nonfinite
 * (each may be NULL) describe acc as it was written, so that the global norm needs no separate pass.
 */
DSC_API dsc_status dsc_flat_reduce(const struct dsc_span *srcs, int64_t n_srcs, float scale, bool accumulate,
                                   const struct dsc_span *acc, const struct dsc_par *par, double *out_sumsq,
                                   int64_t *out_n_nonfinite);

/* data *= scale, in f32, rounded once. */
DSC_API dsc_status dsc_flat_scale(const struct dsc_span *spans, int64_t n_spans, float scale,
                                  const struct dsc_par *par);

/* dst = src converted, round-to-nearest-even, inf and NaN kept (a NaN stays a NaN). Lengths are equal, no overlap. */
DSC_API dsc_status dsc_flat_cast(const struct dsc_span *src, const struct dsc_span *dst, const struct dsc_par *par);

/* A borrowed run of elements of any type. */
struct dsc_region {
    void *data;         /* NULL only when n_elems is 0 */
    int64_t n_elems;    /* >= 0 */
    int64_t elem_bytes; /* > 0; n_elems * elem_bytes fits int64_t */
};

/*
 * Sets all bytes to 0. The elements are cut into the same chunks as in every other pass over a list of as many
 * elements. So, if par is from dsc_pool_par, pages that the system has not yet allocated are placed in the NUMA node of
 * the thread that will update them. Where the system gives huge pages on request (transparent_hugepage: madvise), this
 * requests the 2 MiB pages that lie wholly within a region.
 */
DSC_API dsc_status dsc_flat_zero(const struct dsc_region *regions, int64_t n_regions, const struct dsc_par *par);

#ifdef __cplusplus
}
#endif
#endif
