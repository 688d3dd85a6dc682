/*
 * Compiled once per instruction set: f32 <-> 16-bit conversion. The loops around base/half.h vectorise everywhere. A
 * processor's own conversion of f16 gives the same bits in a fifth of the time; if there is one, it converts all whole
 * vectors of an array.
 */
#include "base/half.h"
#include "cpu/table.h"

#if defined(__F16C__)
#include <immintrin.h>

#define F16_LANES 8

static inline void widen_f16_lanes(const dsc_half *src, dsc_f32 *dst)
{
    _mm256_storeu_ps((float *)dst, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)src)));
}

static inline void narrow_f16_lanes(const dsc_f32 *src, dsc_half *dst)
{
    _mm_storeu_si128((__m128i *)(void *)dst,
                     _mm256_cvtps_ph(_mm256_loadu_ps((const float *)src), _MM_FROUND_TO_NEAREST_INT));
}
#endif

void DSC_K(widen_bf16)(int64_t n, const dsc_half *restrict src, dsc_f32 *restrict dst)
{
    for (int64_t i = 0; i < n; i++)
        dst[i] = dsc_bf16_to_f32(src[i]);
}

void DSC_K(widen_f16)(int64_t n, const dsc_half *restrict src, dsc_f32 *restrict dst)
{
    int64_t i = 0;

#if defined(F16_LANES)
    for (; i + F16_LANES <= n; i += F16_LANES)
        widen_f16_lanes(src + i, dst + i);
#endif
    for (; i < n; i++)
        dst[i] = dsc_f16_to_f32(src[i]);
}

void DSC_K(narrow_bf16)(int64_t n, const dsc_f32 *restrict src, dsc_half *restrict dst)
{
    for (int64_t i = 0; i < n; i++)
        dst[i] = dsc_f32_to_bf16(src[i]);
}

void DSC_K(narrow_f16)(int64_t n, const dsc_f32 *restrict src, dsc_half *restrict dst)
{
    int64_t i = 0;

#if defined(F16_LANES)
    for (; i + F16_LANES <= n; i += F16_LANES)
        narrow_f16_lanes(src + i, dst + i);
#endif
    for (; i < n; i++)
        dst[i] = dsc_f32_to_f16(src[i]);
}
