/* Compiled once per instruction set: sum of squares and finite check in one pass. */
#include "base/half.h"
#include "cpu/lanes.h"
#include "cpu/table.h"

void DSC_K(sumsq_f32)(int64_t n, const dsc_f32 *restrict src, double *sumsq, int64_t *n_nonfinite)
{
    double sums[DSC_LANES] = {0};
    int32_t bad[DSC_LANES] = {0};
    int64_t n_whole = n - n % DSC_LANES;

    for (int64_t i = 0; i < n_whole; i += DSC_LANES) {
        for (int lane = 0; lane < DSC_LANES; lane++) {
            uint32_t bits = dsc_f32_bits(src[i + lane]);
            uint32_t is_bad = (bits & 0x7f800000u) == 0x7f800000u;
            double x = (double)dsc_f32_from_bits(is_bad ? 0u : bits);

            sums[lane] += x * x;
            bad[lane] += (int32_t)is_bad;
        }
    }
    for (int64_t i = n_whole; i < n; i++) {
        uint32_t bits = dsc_f32_bits(src[i]);
        uint32_t is_bad = (bits & 0x7f800000u) == 0x7f800000u;
        double x = (double)dsc_f32_from_bits(is_bad ? 0u : bits);

        sums[i - n_whole] += x * x;
        bad[i - n_whole] += (int32_t)is_bad;
    }
    for (int lane = 0; lane < DSC_LANES; lane++)
        *n_nonfinite += bad[lane];
    *sumsq += dsc_lanes_sum(sums);
}
