/* The loops of dsc/nn.h as a table, one table per instruction set. */
#ifndef DSC_NN_TABLE_H
#define DSC_NN_TABLE_H

#include "cpu/table.h"
#include "dsc/nn.h"

/* Rows that mul_add writes are padded to a multiple of this. */
#define DSC_NN_LANES 16

/* Up to so many rows, the time of a product is that of reading its weight. */
#define DSC_NN_FEW_ROWS 16

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
