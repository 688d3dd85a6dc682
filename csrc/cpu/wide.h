/*
 * Vectors as wide as a register, for loops that the compiler does not vectorise well by itself: maxima, fused chains,
 * and functions in pieces. Every operation is in f32 with one rounding, so that all widths give the same bits.
 */
#ifndef DSC_CPU_WIDE_H
#define DSC_CPU_WIDE_H

#include "cpu/math.h"
#include "cpu/table.h"

#include <float.h>
#include <string.h>

#if defined(__AVX__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
#define WIDE_LANES 16
#elif defined(__AVX2__)
#define WIDE_LANES 8
#else
#define WIDE_LANES 4
#endif

typedef float wide __attribute__((vector_size(4 * WIDE_LANES)));
typedef int32_t wide_ints __attribute__((vector_size(4 * WIDE_LANES)));
typedef uint32_t wide_bits __attribute__((vector_size(4 * WIDE_LANES)));

/* Loads the first n lanes of a register and sets the others to 0; with a constant n of WIDE_LANES this is one load. */
static inline wide dsc_wide_load(const dsc_f32 *src, int64_t n)
{
    wide x = {0};

    memcpy(&x, src, n == WIDE_LANES ? sizeof x : (size_t)n * sizeof *src);
    return x;
}

static inline void dsc_wide_store(wide x, dsc_f32 *dst, int64_t n)
{
    memcpy(dst, &x, n == WIDE_LANES ? sizeof x : (size_t)n * sizeof *dst);
}

/* Stores a register past the caches, to memory aligned to sizeof x: a plain store would first read the line. */
static inline void dsc_wide_stream(wide x, dsc_f32 *dst)
{
#if defined(__AVX512F__)
    _mm512_stream_ps(dst, (__m512)x);
#elif defined(__AVX2__)
    _mm256_stream_ps(dst, (__m256)x);
#else
    memcpy(dst, &x, sizeof x);
#endif
}

/* Orders streamed stores before the stores that follow, such as the one that says that the work is done. */
static inline void dsc_wide_stream_end(void)
{
#if defined(__AVX2__)
    _mm_sfence();
#endif
}

#if defined(__AVX512F__)
/* Places word i of a register in the upper half of lane i, if the lower halves are then masked. */
static inline __m512i dsc_words_apart(void)
{
    return _mm512_set_epi16(15, 15, 14, 14, 13, 13, 12, 12, 11, 11, 10, 10, 9, 9, 8, 8, 7, 7, 6, 6, 5, 5, 4, 4, 3, 3, 2,
                            2, 1, 1, 0, 0);
}

/* Places the upper half of lane i in word i. */
static inline __m512i dsc_upper_words(void)
{
    return _mm512_set_epi16(31, 29, 27, 25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1, 31, 29, 27, 25, 23, 21, 19, 17,
                            15, 13, 11, 9, 7, 5, 3, 1);
}
#endif

/* bf16 and f16 as base/half.h has them, NaN included. */
static inline wide dsc_wide_of_bf16(const dsc_half half[WIDE_LANES])
{
#if defined(__AVX512F__)
    /* One permutation, because a widening and a shift occupy the units of permutations twice. */
    __m512i halves = _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i *)(const void *)half));

    return (wide)_mm512_maskz_permutexvar_epi16(0xaaaaaaaau, dsc_words_apart(), halves);
#elif defined(__AVX2__)
    __m128i halves = _mm_loadu_si128((const __m128i *)(const void *)half);

    return (wide)_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16);
#else
    wide x;

    for (int lane = 0; lane < WIDE_LANES; lane++)
        x[lane] = dsc_bf16_to_f32(half[lane]);
    return x;
#endif
}

static inline wide dsc_wide_of_f16(const dsc_half half[WIDE_LANES])
{
#if defined(__AVX512F__)
    return (wide)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(const void *)half));
#elif defined(__AVX2__) && defined(__F16C__)
    return (wide)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)half));
#else
    wide x;

    for (int lane = 0; lane < WIDE_LANES; lane++)
        x[lane] = dsc_f16_to_f32(half[lane]);
    return x;
#endif
}

/* For _mm512_fixupimm_ps: either kind of NaN becomes the quiet NaN of the source, all else stays. */
#define QUIET_NAN 0x22

static inline void dsc_wide_to_bf16(wide x, dsc_half half[WIDE_LANES])
{
#if defined(__AVX512F__)
    /* Adds 0x7fff, or 0x8000 if the lowest bit that stays is set; a NaN is taken from x instead, and made quiet. */
    __m512i bits = (__m512i)x;
    __mmask16 is_odd = _mm512_test_epi32_mask(bits, _mm512_set1_epi32(0x10000));
    __m512i down = _mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff));
    __m512i rounded = _mm512_mask_add_epi32(down, is_odd, bits, _mm512_set1_epi32(0x8000));
    __m512i chosen = (__m512i)_mm512_fixupimm_ps((__m512)rounded, (__m512)x, _mm512_set1_epi32(QUIET_NAN), 0);

    _mm256_storeu_si256((__m256i *)(void *)half,
                        _mm512_castsi512_si256(_mm512_permutexvar_epi16(dsc_upper_words(), chosen)));
#elif defined(__AVX2__)
    wide_bits bits = (wide_bits)x;
    wide_bits rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
    wide_bits quiet = bits | 0x400000u;
    __m256 is_nan = _mm256_cmp_ps((__m256)x, (__m256)x, _CMP_UNORD_Q);
    __m256i chosen = _mm256_srli_epi32((__m256i)_mm256_blendv_ps((__m256)rounded, (__m256)quiet, is_nan), 16);
    __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(chosen, chosen), 0x08);

    _mm_storeu_si128((__m128i *)(void *)half, _mm256_castsi256_si128(packed));
#else
    for (int lane = 0; lane < WIDE_LANES; lane++)
        half[lane] = dsc_f32_to_bf16(x[lane]);
#endif
}

static inline void dsc_wide_to_f16(wide x, dsc_half half[WIDE_LANES])
{
#if defined(__AVX512F__)
    _mm256_storeu_si256((__m256i *)(void *)half, _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__AVX2__) && defined(__F16C__)
    _mm_storeu_si128((__m128i *)(void *)half, _mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT));
#else
    for (int lane = 0; lane < WIDE_LANES; lane++)
        half[lane] = dsc_f32_to_f16(x[lane]);
#endif
}

/* Loads elements i to i + n of data. n is the constant WIDE_LANES or the rest of a row; dtype is a constant. */
static inline __attribute__((always_inline)) wide dsc_wide_load_as(dsc_dtype dtype, const void *data, int64_t i,
                                                                   int64_t n)
{
    const dsc_half *halves = (const dsc_half *)data + i;
    dsc_half padded[WIDE_LANES] = {0};

    if (dtype == DSC_DTYPE_F32)
        return dsc_wide_load((const dsc_f32 *)data + i, n);
    if (n < WIDE_LANES) {
        memcpy(padded, halves, (size_t)n * sizeof *halves);
        halves = padded;
    }
    return dtype == DSC_DTYPE_BF16 ? dsc_wide_of_bf16(halves) : dsc_wide_of_f16(halves);
}

/* Element i of data. */
static inline __attribute__((always_inline)) float dsc_element(dsc_dtype dtype, const void *data, int64_t i)
{
    if (dtype == DSC_DTYPE_F32)
        return ((const dsc_f32 *)data)[i];
    return dtype == DSC_DTYPE_BF16 ? dsc_bf16_to_f32(((const dsc_half *)data)[i])
                                   : dsc_f16_to_f32(((const dsc_half *)data)[i]);
}

static inline __attribute__((always_inline)) void dsc_put_element(dsc_dtype dtype, float value, void *data, int64_t i)
{
    if (dtype == DSC_DTYPE_F32)
        ((dsc_f32 *)data)[i] = value;
    else
        ((dsc_half *)data)[i] = dtype == DSC_DTYPE_BF16 ? dsc_f32_to_bf16(value) : dsc_f32_to_f16(value);
}

static inline __attribute__((always_inline)) void dsc_wide_store_as(dsc_dtype dtype, wide x, void *data, int64_t i,
                                                                    int64_t n)
{
    dsc_half *halves = (dsc_half *)data + i;
    dsc_half padded[WIDE_LANES];

    if (dtype == DSC_DTYPE_F32) {
        dsc_wide_store(x, (dsc_f32 *)data + i, n);
        return;
    }
    if (n == WIDE_LANES && dtype == DSC_DTYPE_BF16) {
        dsc_wide_to_bf16(x, halves);
    } else if (n == WIDE_LANES) {
        dsc_wide_to_f16(x, halves);
    } else {
        if (dtype == DSC_DTYPE_BF16)
            dsc_wide_to_bf16(x, padded);
        else
            dsc_wide_to_f16(x, padded);
        memcpy(halves, padded, (size_t)n * sizeof *halves);
    }
}

/*
 * Brings the line of element i of a result into the cache. For a loop that only reads, before another loop that would
 * wait for the lines that it writes.
 */
static inline __attribute__((always_inline)) void dsc_wide_expect_store(dsc_dtype dtype, const void *dst, int64_t i)
{
    size_t bytes = dtype == DSC_DTYPE_F32 ? sizeof(float) : sizeof(dsc_half);

    __builtin_prefetch((const char *)dst + (size_t)i * bytes, 1);
}

/* Runs step(..., i, n_lanes) over n elements, a register at a time; the last register may be partly filled. */
#define EACH_WIDE(n, step, ...)                          \
    do {                                                 \
        int64_t at = 0;                                  \
                                                         \
        for (; at + WIDE_LANES <= (n); at += WIDE_LANES) \
            step(__VA_ARGS__, at, WIDE_LANES);           \
        if (at < (n))                                    \
            step(__VA_ARGS__, at, (n)-at);               \
    } while (0)

/* Runs call(dtype, ...), with a constant for dtype. */
#define WITH_DTYPE(dtype, call, ...)           \
    do {                                       \
        if ((dtype) == DSC_DTYPE_F32)          \
            call(DSC_DTYPE_F32, __VA_ARGS__);  \
        else if ((dtype) == DSC_DTYPE_BF16)    \
            call(DSC_DTYPE_BF16, __VA_ARGS__); \
        else                                   \
            call(DSC_DTYPE_F16, __VA_ARGS__);  \
    } while (0)

/* EACH_WIDE of step(dtype, ..., i, n_lanes), for WITH_DTYPE. */
#define EACH_WIDE_AS(dtype, n, step, ...) EACH_WIDE(n, step, dtype, __VA_ARGS__)

static inline wide dsc_wide_all(float x)
{
    return x - (wide){0};
}

/* a * b + c with one rounding. */
static inline wide dsc_wide_fma(wide a, wide b, wide c)
{
#if defined(__AVX512F__)
    return (wide)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__) && defined(__FMA__)
    return (wide)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    for (int lane = 0; lane < WIDE_LANES; lane++)
        c[lane] = fmaf(a[lane], b[lane], c[lane]);
    return c;
#endif
}

/* a > b ? a : b; so a NaN in a is ignored. */
static inline wide dsc_wide_max(wide a, wide b)
{
#if defined(__AVX512F__)
    return (wide)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
    return (wide)_mm256_max_ps((__m256)a, (__m256)b);
#else
    wide_ints is_more = a > b;

    return (wide)((is_more & (wide_ints)a) | (~is_more & (wide_ints)b));
#endif
}

/* a < b ? a : b: b for a NaN in a. */
static inline wide dsc_wide_min(wide a, wide b)
{
#if defined(__AVX512F__)
    return (wide)_mm512_min_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
    return (wide)_mm256_min_ps((__m256)a, (__m256)b);
#else
    wide_ints is_less = a < b;

    return (wide)((is_less & (wide_ints)a) | (~is_less & (wide_ints)b));
#endif
}

static inline float dsc_wide_least(wide x)
{
#if defined(__AVX512F__)
    return _mm512_reduce_min_ps((__m512)x);
#else
    float least = x[0];

    for (int lane = 1; lane < WIDE_LANES; lane++)
        least = x[lane] < least ? x[lane] : least;
    return least;
#endif
}

/* a < b ? x : y. */
static inline wide dsc_wide_where_less(wide a, wide b, wide x, wide y)
{
#if defined(__AVX512F__)
    return (wide)_mm512_mask_blend_ps(_mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_LT_OQ), (__m512)y, (__m512)x);
#elif defined(__AVX2__)
    return (wide)_mm256_blendv_ps((__m256)y, (__m256)x, _mm256_cmp_ps((__m256)a, (__m256)b, _CMP_LT_OQ));
#else
    wide_ints is_less = a < b;

    return (wide)((is_less & (wide_ints)x) | (~is_less & (wide_ints)y));
#endif
}

/* x where the byte of a lane is not 0, else y. */
static inline wide dsc_wide_where_kept(const uint8_t keep[WIDE_LANES], wide x, wide y)
{
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
    __m128i bytes = _mm_loadu_si128((const __m128i *)(const void *)keep);

    return (wide)_mm512_mask_blend_ps(_mm_test_epi8_mask(bytes, bytes), (__m512)y, (__m512)x);
#else
    for (int lane = 0; lane < WIDE_LANES; lane++)
        y[lane] = keep[lane] != 0 ? x[lane] : y[lane];
    return y;
#endif
}

static inline wide_ints dsc_wide_max_ints(wide_ints a, wide_ints b)
{
#if defined(__AVX512F__)
    return (wide_ints)_mm512_max_epi32((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
    return (wide_ints)_mm256_max_epi32((__m256i)a, (__m256i)b);
#else
    wide_ints is_more = a > b;

    return (is_more & a) | (~is_more & b);
#endif
}

static inline int32_t dsc_wide_largest_int(wide_ints x)
{
#if defined(__AVX512F__)
    return _mm512_reduce_max_epi32((__m512i)x);
#else
    int32_t largest = x[0];

    for (int lane = 1; lane < WIDE_LANES; lane++)
        largest = x[lane] > largest ? x[lane] : largest;
    return largest;
#endif
}

/* The low byte of each lane. */
static inline void dsc_wide_to_bytes(wide_ints x, int8_t bytes[WIDE_LANES])
{
#if defined(__AVX512F__)
    _mm_storeu_si128((__m128i *)(void *)bytes, _mm512_cvtepi32_epi8((__m512i)x));
#else
    for (int lane = 0; lane < WIDE_LANES; lane++)
        bytes[lane] = (int8_t)x[lane];
#endif
}

static inline wide_ints dsc_wide_of_bytes(const int8_t bytes[WIDE_LANES])
{
#if defined(__AVX512F__)
    return (wide_ints)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(const void *)bytes));
#else
    wide_ints x;

    for (int lane = 0; lane < WIDE_LANES; lane++)
        x[lane] = bytes[lane];
    return x;
#endif
}

static inline wide dsc_wide_abs(wide x)
{
    return (wide)((wide_ints)x & 0x7fffffff);
}

/* Number of entries of a lookup table that fits one register or two. */
#define DSC_ENTRIES 16

/*
 * Entry index % 16 of a table, for each lane. The lookup happens in registers, because reading memory by index costs a
 * load for each lane.
 */
static inline wide dsc_wide_lookup(const float table[DSC_ENTRIES], wide_ints index)
{
#if defined(__AVX512F__)
    return (wide)_mm512_permutexvar_ps((__m512i)index, _mm512_loadu_ps(table));
#elif defined(__AVX2__)
    __m256 low = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table), (__m256i)index);
    __m256 high = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table + 8), (__m256i)index);

    return (wide)_mm256_blendv_ps(low, high, (__m256)_mm256_slli_epi32((__m256i)index, 28));
#else
    wide found;

    for (int lane = 0; lane < WIDE_LANES; lane++)
        found[lane] = table[index[lane] & (DSC_ENTRIES - 1)];
    return found;
#endif
}

/* As dsc_exp_nonpositive, operation for operation. */
static inline wide dsc_wide_exp_nonpositive(wide x)
{
    wide least = dsc_wide_all(MIN_EXPONENT);
    wide shifted = dsc_wide_fma(x, dsc_wide_all(LOG2_E), dsc_wide_all(EXPONENT_ROUNDER));
    wide n = dsc_wide_all(EXPONENT_ROUNDER) - shifted;
    wide r = dsc_wide_fma(n, dsc_wide_all(LN2_LOW), dsc_wide_fma(n, dsc_wide_all(LN2_HIGH), x));
    wide p = dsc_wide_all(1.38145406e-3f);

    p = dsc_wide_fma(p, r, dsc_wide_all(8.36874545e-3f));
    p = dsc_wide_fma(p, r, dsc_wide_all(4.1668389e-2f));
    p = dsc_wide_fma(p, r, dsc_wide_all(1.66665211e-1f));
    p = dsc_wide_fma(p, r, dsc_wide_all(0.49999994f));
    p = dsc_wide_fma(p, r, dsc_wide_all(1.0f));
    p = dsc_wide_fma(p, r, dsc_wide_all(1.0f));

    wide power = (wide)((wide_bits)shifted << 23);

#if defined(__AVX512F__)
    return (wide)_mm512_maskz_mul_ps(_mm512_cmp_ps_mask((__m512)x, (__m512)least, _CMP_NLT_UQ), (__m512)p,
                                     (__m512)power);
#else
    return dsc_wide_where_less(x, least, (wide){0}, p * power);
#endif
}

/* 1 / (1 + exp(-x)). */
static inline wide dsc_wide_sigmoid(wide x)
{
    wide e = dsc_wide_exp_nonpositive(-dsc_wide_abs(x));

    return dsc_wide_where_less(x, (wide){0}, e, dsc_wide_all(1.0f)) / (1.0f + e);
}

/*
 * The natural logarithm within 1 ulp, of positive numbers. Numbers below FLT_MIN count as FLT_MIN, and a NaN stays one.
 * Cephes' polynomial (Moshier, logf) on [sqrt(1/2), sqrt(2)).
 */
static inline wide dsc_wide_log(wide x)
{
    wide positive = dsc_wide_max(dsc_wide_all(FLT_MIN), x);
    wide_ints bits = (wide_ints)positive;
    wide_ints exponent = (bits - 0x3f3504f3) >> 23;
    wide n = __builtin_convertvector(exponent, wide);
    wide f = (wide)(bits - (wide_ints)((wide_bits)exponent << 23)) - 1.0f;
    wide square = f * f;
    wide p = dsc_wide_all(7.0376836292e-2f);

    p = dsc_wide_fma(p, f, dsc_wide_all(-1.1514610310e-1f));
    p = dsc_wide_fma(p, f, dsc_wide_all(1.1676998740e-1f));
    p = dsc_wide_fma(p, f, dsc_wide_all(-1.2420140846e-1f));
    p = dsc_wide_fma(p, f, dsc_wide_all(1.4249322787e-1f));
    p = dsc_wide_fma(p, f, dsc_wide_all(-1.6668057665e-1f));
    p = dsc_wide_fma(p, f, dsc_wide_all(2.0000714765e-1f));
    p = dsc_wide_fma(p, f, dsc_wide_all(-2.4999993993e-1f));
    p = dsc_wide_fma(p, f, dsc_wide_all(3.3333331174e-1f));
    p = dsc_wide_fma(n, dsc_wide_all(LN2_LOW), square * (f * p));
    p = dsc_wide_fma(dsc_wide_all(-0.5f), square, p);
    /* The exponent is that of the largest NaN, too, so NaN comes back with x - x. */
    return dsc_wide_fma(n, dsc_wide_all(LN2_HIGH), f + p) + (positive - positive);
}

#endif
