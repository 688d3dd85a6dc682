/*
 * Compiled once per instruction set: the steps of a softmax over one row, and its gradient. A NaN is passed over by the
 * maximum, and comes back in the sum.
 */
#include "cpu/lanes.h"
#include "cpu/math.h"
#include "nn/table.h"

void DSC_K(nn_scores)(int64_t n, const dsc_f32 *x, float scale, const dsc_f32 *mask, dsc_f32 *y, float *max)
{
    if (mask == NULL) {
        EACH for (int64_t i = 0; i < n; i++) y[i] = scale * x[i];
    } else {
        EACH for (int64_t i = 0; i < n; i++) y[i] = scale * x[i] + mask[i];
    }
    dsc_raise_to_largest(n, y, max);
}

void DSC_K(nn_scores_kept)(int64_t n, const dsc_f32 *x, float scale, const uint8_t *keep, dsc_f32 *y, float *max)
{
    EACH for (int64_t i = 0; i < n; i++) y[i] = keep[i] != 0 ? scale * x[i] : -INFINITY;
    dsc_raise_to_largest(n, y, max);
}

void DSC_K(nn_exps)(int64_t n, const dsc_f32 *x, float max, dsc_f32 *y, double *sum)
{
    EACH for (int64_t i = 0; i < n; i++) y[i] = dsc_exp_nonpositive(x[i] - max);
    dsc_add_up(n, y, sum);
}

void DSC_K(nn_softmax_grad)(int64_t n, const dsc_f32 *y, const dsc_f32 *dy, float sum, float scale, dsc_f32 *dx)
{
    EACH for (int64_t i = 0; i < n; i++) dx[i] = scale * (y[i] * (dy[i] - sum));
}
