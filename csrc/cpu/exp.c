/*
 * Compiled once per instruction set: what a softmax is made of.
 *
 * The exponential is 2^n * e^r with n the nearest integer to x / ln 2 and |r| <= ln 2 / 2; ln 2 is subtracted in two
 * parts (Cody and Waite), e^r is a polynomial with the coefficients of Cephes' expf. Sums and maxima run in lanes that
 * are folded in halves, so that every instruction set gives the same bits (norm.c says why vector types).
 */
#include "base/half.h"
#include "cpu/table.h"

#include <math.h>
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
typedef int32_t ints __attribute__((vector_size(4 * REGISTER_LANES)));

/* Below, e^x is no normal f32; 0 stands for it. */
#define LEAST -87.3365402f
/* Above, 2^n does not fit the exponent; e^x is inf. */
#define MOST 88.7228394f
/* 1.5 * 2^23: adding it rounds to the nearest integer, which then stands in the low bits. */
#define TO_INTEGER 12582912.0f

static inline float power_of_2(int32_t n)
{
    uint32_t bits = (uint32_t)(n + 127) << 23;
    float power;

    memcpy(&power, &bits, sizeof power);
    return power;
}

static inline float exp_of(float x)
{
    /* NaN passes both. */
    float inside = x < LEAST ? LEAST : x;

    inside = inside > MOST ? MOST : inside;

    float shifted = inside * 1.44269504088896341f + TO_INTEGER;
    float n = shifted - TO_INTEGER;
    float r = inside - n * 0.693359375f;

    r = r - n * -2.12194440e-4f;

    float p = 1.9875691500e-4f;

    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;

    /* 2^n in two factors: n is -126 to 128, one more than exponents reach. */
    int32_t whole = (int32_t)(dsc_f32_bits(shifted) - dsc_f32_bits(TO_INTEGER));
    int32_t half = whole >> 1;

    p = p * power_of_2(half) * power_of_2(whole - half);
    p = x > MOST ? INFINITY : p;
    return x < LEAST ? 0.0f : p;
}

void DSC_K(exp_f32)(int64_t n, const dsc_f32 *src, float shift, dsc_f32 *dst)
{
    for (int64_t i = 0; i < n; i++)
        dst[i] = exp_of(src[i] - shift);
}

void DSC_K(sub_scale_f32)(int64_t n, float minus, float scale, dsc_f32 *restrict dst)
{
    for (int64_t i = 0; i < n; i++)
        dst[i] = (dst[i] - minus) * scale;
}

void DSC_K(max_f32)(int64_t n, const dsc_f32 *restrict src, float *max)
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
    for (; i < n; i++)
        lanes[0] = src[i] > lanes[0] ? src[i] : lanes[0];
    for (int lane = 0; lane < LANES; lane++)
        *max = lanes[lane] > *max ? lanes[lane] : *max;
}

void DSC_K(sum_f32)(int64_t n, const dsc_f32 *restrict src, double *sum)
{
    doubles sums[REGISTERS] = {0};
    double lanes[LANES];
    int64_t i = 0;

    for (; i + LANES <= n; i += LANES)
        for (int r = 0; r < REGISTERS; r++) {
            floats x;

            memcpy(&x, src + i + r * REGISTER_LANES, sizeof x);
            sums[r] += __builtin_convertvector(x, doubles);
        }
    memcpy(lanes, sums, sizeof lanes);
    for (int lane = 0; i < n; i++, lane++)
        lanes[lane] += (double)src[i];
    for (int half = LANES / 2; half > 0; half /= 2)
        for (int lane = 0; lane < half; lane++)
            lanes[lane] += lanes[lane + half];
    *sum += lanes[0];
}
