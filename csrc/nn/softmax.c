/* Compiled once per instruction set: the steps of a softmax over one row, and its gradient. */
#include "cpu/lanes.h"
#include "nn/math.h"
#include "nn/table.h"

/* The largest of them, and of *max; a NaN is passed over here, and comes back in the sum. */
static void raise_to_largest(int64_t n, const dsc_f32 *x, float *max)
{
    float lanes[LANES];
    int64_t i = 0;

    for (int lane = 0; lane < LANES; lane++)
        lanes[lane] = *max;
    for (; i + LANES <= n; i += LANES)
        for (int lane = 0; lane < LANES; lane++)
            lanes[lane] = x[i + lane] > lanes[lane] ? x[i + lane] : lanes[lane];
    for (int lane = 0; i < n; i++, lane++)
        lanes[lane] = x[i] > lanes[lane] ? x[i] : lanes[lane];
    for (int lane = 0; lane < LANES; lane++)
        *max = lanes[lane] > *max ? lanes[lane] : *max;
}

void DSC_K(nn_scores)(int64_t n, const dsc_f32 *x, float scale, const dsc_f32 *mask, dsc_f32 *y, float *max)
{
    if (mask == NULL) {
        EACH for (int64_t i = 0; i < n; i++) y[i] = scale * x[i];
    } else {
        EACH for (int64_t i = 0; i < n; i++) y[i] = scale * x[i] + mask[i];
    }
    raise_to_largest(n, y, max);
}

void DSC_K(nn_scores_kept)(int64_t n, const dsc_f32 *x, float scale, const uint8_t *keep, dsc_f32 *y, float *max)
{
    EACH for (int64_t i = 0; i < n; i++) y[i] = keep[i] != 0 ? scale * x[i] : -INFINITY;
    raise_to_largest(n, y, max);
}

void DSC_K(nn_exps)(int64_t n, const dsc_f32 *x, float max, dsc_f32 *y, double *sum)
{
    doubles sums[REGISTERS] = {0};
    double lanes[LANES];
    int64_t i = 0;

    EACH for (int64_t j = 0; j < n; j++) y[j] = dsc_exp_nonpositive(x[j] - max);
    for (; i + LANES <= n; i += LANES)
        for (int r = 0; r < REGISTERS; r++)
            sums[r] += dsc_load_wide(y + i + r * REGISTER_LANES);
    memcpy(lanes, sums, sizeof lanes);
    for (int lane = 0; i < n; i++, lane++)
        lanes[lane] += (double)y[i];
    *sum += dsc_fold(lanes);
}

void DSC_K(nn_softmax_grad)(int64_t n, const dsc_f32 *y, const dsc_f32 *dy, float sum, float scale, dsc_f32 *dx)
{
    EACH for (int64_t i = 0; i < n; i++) dx[i] = scale * (y[i] * (dy[i] - sum));
}
