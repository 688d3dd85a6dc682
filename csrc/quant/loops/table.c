/* Compiled once per instruction set: this variant's table of loops. */
#include "quant/table.h"

const struct dsc_quant_kernels DSC_K(quant_kernels) = {
#define DSC_QUANT_KERNEL(name, params) .name = DSC_K(quant_##name),
#include "quant/kernels.inc"
#undef DSC_QUANT_KERNEL
};
