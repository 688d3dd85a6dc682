/*
 * Sums in f64 and maxima, in a fixed order: element i goes to lane i % LANES, and the lanes of a sum are folded in
 * halves. So every instruction set gives the same bits, however many lanes its registers hold. Written with vector
 * types, because for plain loops the compiler keeps the lanes in memory (five times slower).
 */
#ifndef DSC_CPU_LANES_H
#define DSC_CPU_LANES_H

#include "cpu/table.h"

#include <string.h>

#if defined(__AVX__)
#include <immintrin.h>
#endif

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
typedef int32_t ints __attribute__((vector_size(4 * REGISTER_LANES)));

/*
 * Uses the processor's own conversion, which is one operation. For __builtin_convertvector the compiler splits the
 * vector and joins the halves again; that would be half the time of a norm.
 */
static inline doubles dsc_widen(floats x)
{
#if defined(__AVX512F__)
    return (doubles)_mm512_cvtps_pd((__m256)x);
#elif defined(__AVX__)
    return (doubles)_mm256_cvtps_pd((__m128)x);
#else
    return __builtin_convertvector(x, doubles);
#endif
}

static inline doubles dsc_load_wide(const dsc_f32 *src)
{
    floats x;

    memcpy(&x, src, sizeof x);
    return dsc_widen(x);
}

/*
 * sums + a * b for values widened from f32. The product is exact in f64, so a fused addition gives the same bits as a
 * product and a sum on other instruction sets.
 */
static inline doubles dsc_add_product(doubles sums, doubles a, doubles b)
{
#if defined(__AVX512F__)
    return (doubles)_mm512_fmadd_pd((__m512d)a, (__m512d)b, (__m512d)sums);
#elif defined(__AVX__) && defined(__FMA__)
    return (doubles)_mm256_fmadd_pd((__m256d)a, (__m256d)b, (__m256d)sums);
#else
    return sums + a * b;
#endif
}

static inline double dsc_fold_all(int n_lanes, double lanes[])
{
    for (int half = n_lanes / 2; half > 0; half /= 2)
        for (int lane = 0; lane < half; lane++)
            lanes[lane] += lanes[lane + half];
    return lanes[0];
}

static inline double dsc_fold(double lanes[LANES])
{
    return dsc_fold_all(LANES, lanes);
}

/* Adds the elements to *sum. */
static inline void dsc_add_up(int64_t n, const dsc_f32 *src, double *sum)
{
    doubles sums[REGISTERS] = {0};
    double lanes[LANES];
    int64_t i = 0;

    for (; i + LANES <= n; i += LANES)
        for (int r = 0; r < REGISTERS; r++)
            sums[r] += dsc_load_wide(src + i + r * REGISTER_LANES);
    memcpy(lanes, sums, sizeof lanes);
    for (int lane = 0; i < n; i++, lane++)
        lanes[lane] += (double)src[i];
    *sum += dsc_fold(lanes);
}

/* Raises *max to the largest element; NaN is ignored. */
static inline void dsc_raise_to_largest(int64_t n, const dsc_f32 *src, float *max)
{
    floats most[REGISTERS];
    float lanes[LANES];
    int64_t i = 0;

    for (int r = 0; r < REGISTERS; r++)
        for (int lane = 0; lane < REGISTER_LANES; lane++)
            most[r][lane] = *max;
    for (; i + LANES <= n; i += LANES)
        for (int r = 0; r < REGISTERS; r++) {
            floats x;

            memcpy(&x, src + i + r * REGISTER_LANES, sizeof x);

            ints is_more = x > most[r];

            most[r] = (floats)((is_more & (ints)x) | (~is_more & (ints)most[r]));
        }
    memcpy(lanes, most, sizeof lanes);
    for (int lane = 0; i < n; i++, lane++)
        lanes[lane] = src[i] > lanes[lane] ? src[i] : lanes[lane];
    for (int lane = 0; lane < LANES; lane++)
        *max = lanes[lane] > *max ? lanes[lane] : *max;
}

#endif
