/* Compiled once per instruction set: sums and scaling of f32. */
#include "cpu/table.h"

void DSC_K(add_f32)(int64_t n, const dsc_f32 *restrict src, dsc_f32 *restrict dst)
{
    for (int64_t i = 0; i < n; i++)
        dst[i] += src[i];
}

void DSC_K(sum_two_f32)(int64_t n, const dsc_f32 *a, const dsc_f32 *b, dsc_f32 *dst)
{
#pragma GCC ivdep
    for (int64_t i = 0; i < n; i++)
        dst[i] = a[i] + b[i];
}

void DSC_K(scale_f32)(int64_t n, float scale, dsc_f32 *dst)
{
    for (int64_t i = 0; i < n; i++)
        dst[i] *= scale;
}

void DSC_K(blend_f32)(int64_t n, float keep, float add, const dsc_f32 *restrict src, dsc_f32 *restrict dst)
{
    for (int64_t i = 0; i < n; i++)
        dst[i] = keep * dst[i] + add * src[i];
}
