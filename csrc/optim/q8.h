/* Quantised states (dsc/optim.h), block by block, for the step. */
#ifndef DSC_OPTIM_Q8_H
#define DSC_OPTIM_Q8_H

#include "quant/table.h"
#include "dsc/optim.h"

/* Reads the elements [begin, begin + n) of a tensor as f32. */
void dsc_q8_load(const struct dsc_quant_kernels *kernels, dsc_q8_code code, const void *codes, const void *scales,
                 int64_t begin, int64_t n, dsc_f32 *dst);

/*
 * Writes n elements from begin on. begin is the first element of a block; the range ends with a block or with the
 * tensor.
 */
void dsc_q8_store(const struct dsc_quant_kernels *kernels, dsc_q8_code code, const dsc_f32 *src, int64_t begin,
                  int64_t n, void *codes, void *scales);

#endif
