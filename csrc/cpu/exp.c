/* Compiled once per instruction set: the loops of a softmax. */
#include "cpu/lanes.h"
#include "cpu/math.h"

void DSC_K(exp_f32)(int64_t n, const dsc_f32 *src, float shift, dsc_f32 *dst)
{
    EACH for (int64_t i = 0; i < n; i++) dst[i] = dsc_exp_nonpositive(src[i] - shift);
}

void DSC_K(sub_scale_f32)(int64_t n, float minus, float scale, dsc_f32 *restrict dst)
{
    for (int64_t i = 0; i < n; i++)
        dst[i] = (dst[i] - minus) * scale;
}

void DSC_K(max_f32)(int64_t n, const dsc_f32 *src, float *max)
{
    dsc_raise_to_largest(n, src, max);
}

void DSC_K(sum_f32)(int64_t n, const dsc_f32 *src, double *sum)
{
    dsc_add_up(n, src, sum);
}
