/* The loops of dsc/nn.h as a table, one table per instruction set. */
#ifndef DSC_NN_TABLE_H
#define DSC_NN_TABLE_H

#include "cpu/table.h"
#include "dsc/nn.h"

/* Rows that mul_add writes are padded to a multiple of this. */
#define DSC_NN_LANES 16

/* y[i][j] = the sum over t of a[t * a_term + i * a_row] * b[t][j]. */
struct dsc_nn_outer_sum {
    int64_t n_terms;
    int64_t n_cols; /* of b and y */
    dsc_dtype dtype;
    const void *a;
    int64_t a_term; /* elements from a term to the next; this or a_row is 1 */
    int64_t a_row;  /* elements from a row to the next */
    const void *b;
    void *y;
};

struct dsc_nn_kernels {
#define DSC_NN_KERNEL(name, params) void(*name) params;
#include "nn/kernels.inc"
#undef DSC_NN_KERNEL
};

#ifdef DSC_ISA /* the variant that is being compiled */
#define DSC_NN_KERNEL(name, params) void DSC_K(nn_##name) params;
#include "nn/kernels.inc"
#undef DSC_NN_KERNEL
#endif

#define DSC_DECLARE_TABLE(isa, is_runnable) extern const struct dsc_nn_kernels DSC_K_OF(nn_kernels, isa);
DSC_ISA_MAP(DSC_DECLARE_TABLE)
#undef DSC_DECLARE_TABLE

/* The table in use. */
const struct dsc_nn_kernels *dsc_nn_kernels_get(void);

#endif
