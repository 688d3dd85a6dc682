/* Compiled once per instruction set: this variant's table of loops on rows. */
#include "nn/table.h"

const struct dsc_nn_kernels DSC_K(nn_kernels) = {
#define DSC_NN_KERNEL(name, params) .name = DSC_K(nn_##name),
#include "nn/kernels.inc"
#undef DSC_NN_KERNEL
};
