/*
 * Compiled once per instruction set: one block of f32 <-> 8-bit codes and a scale, by the formulas of dsc/optim.h. Uses
 * only roots and products. IEEE 754 requires their correct rounding, so every instruction set gives the same bits
 * without a table of codes.
 */
#include "base/half.h"
#include "quant/table.h"

#include <math.h>

#define MAX_SIGNED 127.0f
#define MAX_UNSIGNED 255.0f

/*
 * The smallest scales. Even their smallest codes stand for normal numbers, (1 / 127)^4 * 2^-98 and (1 / 255)^8 * 2^-62.
 * So values read back give the same codes again, also on processors that flush subnormals. A signed block whose scale
 * would be smaller becomes zeros. An unsigned block may not become 0, so it keeps the smallest scale and uses lower
 * codes.
 */
#define MIN_SIGNED_SCALE 0x1p-98f
#define MIN_UNSIGNED_SCALE 0x1p-62f

/* The bits of the largest magnitude. Bits of magnitudes have the order of the numbers, with NaN above all. */
static inline int32_t largest_bits(int64_t n, const dsc_f32 *src)
{
    int32_t largest = 0;

    for (int64_t i = 0; i < n; i++) {
        int32_t bits = (int32_t)(dsc_f32_bits(src[i]) & 0x7fffffffu);

        largest = bits > largest ? bits : largest;
    }
    return largest;
}

/* below is the scale for a nonzero block whose largest magnitude is less than min. */
static inline float scale_of(int32_t largest, float min, float below)
{
    float scale = dsc_f32_from_bits((uint32_t)largest);

    if (largest == 0)
        return 0.0f;
    if (largest >= DSC_QUANT_INF_BITS) /* make values that cannot be stored visible */
        return dsc_f32_from_bits(DSC_QUANT_NAN_BITS);
    return scale < min ? below : scale;
}

void DSC_K(quant_q8_signed)(int64_t n, const dsc_f32 *restrict src, int8_t *restrict codes, dsc_f32 *restrict scale)
{
    float largest = scale_of(largest_bits(n, src), MIN_SIGNED_SCALE, 0.0f);
    float factor = largest == 0.0f ? 0.0f : MAX_SIGNED / sqrtf(sqrtf(largest));

    *scale = largest;
    for (int64_t i = 0; i < n; i++) {
        float x = src[i];
        float root = sqrtf(sqrtf(fabsf(x))) * factor + 0.5f;
        int32_t code =
            (int32_t)(root < MAX_SIGNED ? root
                                        : MAX_SIGNED); /* gives a NaN a code too, so that the conversion is defined */

        codes[i] = (int8_t)(x < 0.0f ? -code : code);
    }
}

void DSC_K(quant_q8_unsigned)(int64_t n, const dsc_f32 *restrict src, uint8_t *restrict codes, dsc_f32 *restrict scale)
{
    float largest = scale_of(largest_bits(n, src), MIN_UNSIGNED_SCALE, MIN_UNSIGNED_SCALE);
    float factor = largest == 0.0f ? 0.0f : MAX_UNSIGNED / sqrtf(sqrtf(sqrtf(largest)));

    *scale = largest;
    for (int64_t i = 0; i < n; i++) {
        float x = src[i] > 0.0f ? src[i] : 0.0f;
        float root = sqrtf(sqrtf(sqrtf(x))) * factor + 0.5f;
        float lowest = x > 0.0f ? 1.0f : 0.0f;

        root = root < MAX_UNSIGNED ? root : MAX_UNSIGNED;
        codes[i] = (uint8_t)(int32_t)(root > lowest ? root : lowest);
    }
}

/*
 * For both kinds of codes, the largest code times the rounded reciprocal is exactly 1, so that a block's largest
 * magnitude is read back as its scale.
 */

void DSC_K(quant_values_of_q8_signed)(int64_t n, const int8_t *restrict codes, float scale, dsc_f32 *restrict dst)
{
    for (int64_t i = 0; i < n; i++) {
        float root = (float)codes[i] * (1.0f / MAX_SIGNED);
        float square = root * root;
        float value = square * square * scale;

        dst[i] = root < 0.0f ? -value : value;
    }
}

void DSC_K(quant_values_of_q8_unsigned)(int64_t n, const uint8_t *restrict codes, float scale, dsc_f32 *restrict dst)
{
    for (int64_t i = 0; i < n; i++) {
        float root = (float)codes[i] * (1.0f / MAX_UNSIGNED);
        float square = root * root;
        float fourth = square * square;

        dst[i] = fourth * fourth * scale;
    }
}
