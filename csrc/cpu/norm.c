/*
 * Compiled once per instruction set: sum of squares and finite check in one pass.
 *
 * The order of the sum is part of the function: element i is added to lane i % LANES, and the lanes are folded in
 * halves. Every instruction set gives the same bits, however many lanes its registers hold. Written with vector types
 * because the compiler, left alone, keeps the lanes in memory (five times slower).
 */
#include "base/half.h"
#include "cpu/table.h"

#include <string.h>

#define LANES 16

#if defined(__AVX512F__)
#define REGISTER_LANES 8
#elif defined(__AVX__)
#define REGISTER_LANES 4
#else
#define REGISTER_LANES 2
#endif
#define REGISTERS (LANES / REGISTER_LANES)

typedef float floats __attribute__((vector_size(4 * REGISTER_LANES)));
typedef double doubles __attribute__((vector_size(8 * REGISTER_LANES)));

static bool is_nonfinite(float x)
{
    return (dsc_f32_bits(x) & 0x7f800000u) == 0x7f800000u;
}

static double fold(double lanes[LANES])
{
    for (int half = LANES / 2; half > 0; half /= 2)
        for (int lane = 0; lane < half; lane++)
            lanes[lane] += lanes[lane + half];
    return lanes[0];
}

static double sum_all(int64_t n, const dsc_f32 *restrict src)
{
    doubles sums[REGISTERS] = {0};
    double lanes[LANES];
    int64_t i = 0;

    for (; i + LANES <= n; i += LANES) {
        for (int r = 0; r < REGISTERS; r++) {
            floats x;

            memcpy(&x, src + i + r * REGISTER_LANES, sizeof x);

            doubles wide = __builtin_convertvector(x, doubles);

            sums[r] += wide * wide;
        }
    }
    memcpy(lanes, sums, sizeof lanes);
    for (int lane = 0; i < n; i++, lane++)
        lanes[lane] += (double)src[i] * (double)src[i];
    return fold(lanes);
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
    return fold(lanes);
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
