/* Compiled once per instruction set: sum of squares and finite check in one pass. */
#include "base/half.h"
#include "cpu/lanes.h"

/* Twice as many lanes as in other sums: with fewer lanes, each addition would wait for the previous addition. */
#define SQUARE_LANES (2 * LANES)
#define SQUARE_REGISTERS (SQUARE_LANES / REGISTER_LANES)

static bool is_nonfinite(float x)
{
    return (dsc_f32_bits(x) & 0x7f800000u) == 0x7f800000u;
}

static double sum_all(int64_t n, const dsc_f32 *restrict src)
{
    doubles sums[SQUARE_REGISTERS] = {0};
    double lanes[SQUARE_LANES];
    int64_t i = 0;

    for (; i + SQUARE_LANES <= n; i += SQUARE_LANES) {
        for (int r = 0; r < SQUARE_REGISTERS; r++) {
            doubles wide = dsc_load_wide(src + i + r * REGISTER_LANES);

            sums[r] = dsc_add_product(sums[r], wide, wide);
        }
    }
    memcpy(lanes, sums, sizeof lanes);
    for (int lane = 0; i < n; i++, lane++)
        lanes[lane] += (double)src[i] * (double)src[i];
    return dsc_fold_all(SQUARE_LANES, lanes);
}

static double sum_finite(int64_t n, const dsc_f32 *src, int64_t *n_nonfinite)
{
    double lanes[SQUARE_LANES] = {0};

    for (int64_t i = 0; i < n; i++) {
        if (is_nonfinite(src[i]))
            ++*n_nonfinite;
        else
            lanes[i % SQUARE_LANES] += (double)src[i] * (double)src[i];
    }
    return dsc_fold_all(SQUARE_LANES, lanes);
}

void DSC_K(sumsq_f32)(int64_t n, const dsc_f32 *restrict src, double *sumsq, int64_t *n_nonfinite)
{
    double sum = sum_all(n, src);

    /*
     * Squares of finite f32 have a finite sum in f64. So a non-finite sum means a non-finite element, and the check
     * costs nothing.
     */
    if (sum - sum != 0.0)
        sum = sum_finite(n, src, n_nonfinite);
    *sumsq += sum;
}
