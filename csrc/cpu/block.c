/* One block of elements of any dtype, seen as f32. */
#include "cpu/table.h"

#include <string.h>

const dsc_f32 *dsc_load_f32(const struct dsc_kernels *kernels, dsc_dtype dtype, const void *data, int64_t n,
                            dsc_f32 *scratch)
{
    if (dtype == DSC_DTYPE_F32)
        return data;
    if (dtype == DSC_DTYPE_BF16)
        kernels->widen_bf16(n, data, scratch);
    else
        kernels->widen_f16(n, data, scratch);
    return scratch;
}

void dsc_store_f32(const struct dsc_kernels *kernels, dsc_dtype dtype, const dsc_f32 *src, int64_t n, void *data)
{
    if (dtype == DSC_DTYPE_BF16)
        kernels->narrow_bf16(n, src, data);
    else if (dtype == DSC_DTYPE_F16)
        kernels->narrow_f16(n, src, data);
    else if (data != src)
        memcpy(data, src, (size_t)n * sizeof *src);
}
