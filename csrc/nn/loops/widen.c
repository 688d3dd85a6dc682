/* Compiled once per instruction set: rows of elements as f32. */
#include "cpu/wide.h"
#include "nn/table.h"

static inline __attribute__((always_inline)) void widen_step(dsc_dtype dtype, const void *src, int64_t begin,
                                                             dsc_f32 *dst, int64_t i, int64_t n)
{
    dsc_wide_store(dsc_wide_load_as(dtype, src, begin + i, n), dst + i, n);
}

#define WIDEN_ROWS(dtype, n_rows, n_cols, src, src_row, dst, dst_row) \
    for (int64_t row = 0; row < (n_rows); row++)                      \
    EACH_WIDE_AS(dtype, n_cols, widen_step, src, row *(src_row), (dst) + row * (dst_row))

void DSC_K(nn_widen_rows)(int64_t n_rows, int64_t n_cols, dsc_dtype dtype, const void *src, int64_t src_row,
                          dsc_f32 *dst, int64_t dst_row)
{
    WITH_DTYPE(dtype, WIDEN_ROWS, n_rows, n_cols, src, src_row, dst, dst_row);
}
