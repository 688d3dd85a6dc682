/* The loops of dsc/quant.h as a table, one table per instruction set. */
#ifndef DSC_QUANT_TABLE_H
#define DSC_QUANT_TABLE_H

#include "cpu/table.h"
#include "quant/format.h"

/* Rows of codes that the loops of a product take at once. */
#define DSC_PRODUCT_STRIP 4

struct dsc_quant_kernels {
#define DSC_QUANT_KERNEL(name, params) void(*name) params;
#include "quant/kernels.inc"
#undef DSC_QUANT_KERNEL
};

#ifdef DSC_ISA /* the variant that is being compiled */
#define DSC_QUANT_KERNEL(name, params) void DSC_K(quant_##name) params;
#include "quant/kernels.inc"
#undef DSC_QUANT_KERNEL
#endif

#define DSC_DECLARE_TABLE(isa, is_runnable) extern const struct dsc_quant_kernels DSC_K_OF(quant_kernels, isa);
DSC_ISA_MAP(DSC_DECLARE_TABLE)
#undef DSC_DECLARE_TABLE

/* The table in use. */
const struct dsc_quant_kernels *dsc_quant_kernels_get(void);

#endif
