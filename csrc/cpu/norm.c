/* Compiled once per instruction set: sum of squares and finite check in one pass. */
#include "base/half.h"
#include "cpu/lanes.h"

static bool is_nonfinite(float x)
{
    return (dsc_f32_bits(x) & 0x7f800000u) == 0x7f800000u;
}

static double sum_all(int64_t n, const dsc_f32 *restrict src)
{
    doubles sums[REGISTERS] = {0};
    double lanes[LANES];
    int64_t i = 0;

    for (; i + LANES <= n; i += LANES) {
        for (int r = 0; r < REGISTERS; r++) {
            doubles wide = dsc_load_wide(src + i + r * REGISTER_LANES);

            sums[r] += wide * wide;
        }
    }
    memcpy(lanes, sums, sizeof lanes);
    for (int lane = 0; i < n; i++, lane++)
        lanes[lane] += (double)src[i] * (double)src[i];
    return dsc_fold(lanes);
}

static double sum_finite(int64_t n, const dsc_f32 *src, int64_t *n_nonfinite)
{
    double lanes[LANES] = {0};

    for (int64_t i = 0; i < n; i++) {
        if (is_nonfinite(src[i]))
            ++*n_nonfinite;
        else
            lanes[i % LANES] += (double)src[i] * (double)src[i];
    }
    return dsc_fold(lanes);
}

void DSC_K(sumsq_f32)(int64_t n, const dsc_f32 *restrict src, double *sumsq, int64_t *n_nonfinite)
{
    double sum = sum_all(n, src);

    /*
     * Squares of finite f32 add up to something finite in f64, so the sum itself tells whether an element was not: the
     * check costs nothing.
     */
    if (sum - sum != 0.0)
        sum = sum_finite(n, src, n_nonfinite);
    *sumsq += sum;
}
