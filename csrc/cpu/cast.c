/* Compiled once per instruction set: f32 <-> 16-bit conversion. */
#include "base/half.h"
#include "cpu/table.h"

void DSC_K(widen_bf16)(int64_t n, const dsc_half *restrict src, dsc_f32 *restrict dst)
{
    for (int64_t i = 0; i < n; i++)
        dst[i] = dsc_bf16_to_f32(src[i]);
}

void DSC_K(widen_f16)(int64_t n, const dsc_half *restrict src, dsc_f32 *restrict dst)
{
    for (int64_t i = 0; i < n; i++)
        dst[i] = dsc_f16_to_f32(src[i]);
}

void DSC_K(narrow_bf16)(int64_t n, const dsc_f32 *restrict src, dsc_half *restrict dst)
{
    for (int64_t i = 0; i < n; i++)
        dst[i] = dsc_f32_to_bf16(src[i]);
}

void DSC_K(narrow_f16)(int64_t n, const dsc_f32 *restrict src, dsc_half *restrict dst)
{
    for (int64_t i = 0; i < n; i++)
        dst[i] = dsc_f32_to_f16(src[i]);
}
