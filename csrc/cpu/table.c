/* Compiled once per instruction set: this variant's table of kernels. */
#include "cpu/table.h"

const struct dsc_kernels DSC_K(kernels) = {
#define DSC_KERNEL(name, params) .name = DSC_K(name),
#include "cpu/kernels.inc"
#undef DSC_KERNEL
};
