/*
 * Compiled once per instruction set: one block of f32 <-> 8-bit codes and a scale, by the formulas of dsc/optim.h. Roots and products alone, all of which IEEE 754
 * rounds correctly, so that every instruction set gives the same bits without a table to look codes up in.
 */
#include "base/half.h"
#include "cpu/table.h"

#include <math.h>

#define MAX_SIGNED 127.0f
#define MAX_UNSIGNED 255.0f

/*
 * The smallest scale of a block that is not all zeros. Its smallest code still stands for a normal number, (1 / 255)^4 * 2^-94 > 2^-126, so that what is read back
 * gives the same codes again, in processors that flush subnormals as well.
 */
#define MIN_SCALE 0x1p-94f

#define INF_BITS 0x7f800000
#define NAN_BITS 0x7fc00000u

/* The largest magnitude as its bits, which are ordered as the numbers are; NaN lies above all. */
static inline int32_t largest_bits(int64_t n, const dsc_f32 *src)
{
    int32_t largest = 0;

    for (int64_t i = 0; i < n; i++) {
        int32_t bits = (int32_t)(dsc_f32_bits(src[i]) & 0x7fffffffu);

        largest = bits > largest ? bits : largest;
    }
    return largest;
}

static inline float scale_of(int32_t largest)
{
    float scale = dsc_f32_from_bits((uint32_t)largest);

    if (largest == 0)
        return 0.0f;
    if (largest >= INF_BITS) /* what cannot be stored must be seen */
        return dsc_f32_from_bits(NAN_BITS);
    return scale < MIN_SCALE ? MIN_SCALE : scale;
}

void DSC_K(quantize_q8_signed)(int64_t n, const dsc_f32 *restrict src, int8_t *restrict codes, dsc_f32 *restrict scale)
{
    float largest = scale_of(largest_bits(n, src));
    float factor = largest == 0.0f ? 0.0f : MAX_SIGNED / sqrtf(largest);

    *scale = largest;
    for (int64_t i = 0; i < n; i++) {
        float x = src[i];
        float root = sqrtf(fabsf(x)) * factor + 0.5f;
        int32_t code = (int32_t)(root < MAX_SIGNED ? root : MAX_SIGNED); /* a NaN too gets a code, for the conversion to be defined */

        codes[i] = (int8_t)(x < 0.0f ? -code : code);
    }
}

void DSC_K(quantize_q8_unsigned)(int64_t n, const dsc_f32 *restrict src, uint8_t *restrict codes, dsc_f32 *restrict scale)
{
    float largest = scale_of(largest_bits(n, src));
    float factor = largest == 0.0f ? 0.0f : MAX_UNSIGNED / sqrtf(sqrtf(largest));

    *scale = largest;
    for (int64_t i = 0; i < n; i++) {
        float x = src[i] > 0.0f ? src[i] : 0.0f;
        float root = sqrtf(sqrtf(x)) * factor + 0.5f;
        float lowest = x > 0.0f ? 1.0f : 0.0f;

        root = root < MAX_UNSIGNED ? root : MAX_UNSIGNED;
        codes[i] = (uint8_t)(int32_t)(root > lowest ? root : lowest);
    }
}

/* The largest code times the rounded reciprocal is exactly 1 for both, so that a block's largest magnitude comes back as its scale. */

void DSC_K(dequantize_q8_signed)(int64_t n, const int8_t *restrict codes, float scale, dsc_f32 *restrict dst)
{
    for (int64_t i = 0; i < n; i++) {
        float root = (float)codes[i] * (1.0f / MAX_SIGNED);

        dst[i] = root * fabsf(root) * scale;
    }
}

void DSC_K(dequantize_q8_unsigned)(int64_t n, const uint8_t *restrict codes, float scale, dsc_f32 *restrict dst)
{
    for (int64_t i = 0; i < n; i++) {
        float root = (float)codes[i] * (1.0f / MAX_UNSIGNED);
        float square = root * root;

        dst[i] = square * square * scale;
    }
}
