/* The table of formats, and the scale of a group from its range; devices compute it by the same functions. */
#ifndef DSC_QUANT_FORMAT_H
#define DSC_QUANT_FORMAT_H

#include "base/half.h"
#include "dsc/quant.h"

#include <math.h>

struct dsc_quant_numbers {
    float lowest;
    float largest;
    float span;
    int32_t code_bits;
    int32_t exponent;
    int32_t mantissa_bits; /* -1: integers */
    int32_t least_exponent;
};

/* By format, on the host. */
extern const struct dsc_quant_numbers dsc_quant_numbers[DSC_QUANT_FORMAT_COUNT];

/*
 * The smallest scale. Products with the smallest number of any format are normal, so processors that flush subnormals
 * give the same bits.
 */
#define DSC_QUANT_MIN_EXPONENT (-100)
#define DSC_QUANT_MIN_SCALE 0x1p-100f

#define DSC_QUANT_INF_BITS 0x7f800000
#define DSC_QUANT_NAN_BITS 0x7fc00000u

struct dsc_quant_range {
    float low;            /* min(0, smallest element) */
    float high;           /* max(0, largest element) */
    int32_t largest_bits; /* bits of the largest magnitude; NaN is above all */
};

struct dsc_quant_affine {
    float scale;
    float zero_point;
};

/* C++ has no compound literals. */
static inline DSC_ON_DEVICE_TOO struct dsc_quant_affine dsc_quant_affine_with(float scale, float zero_point)
{
    struct dsc_quant_affine affine = {scale, zero_point};

    return affine;
}

static inline DSC_ON_DEVICE_TOO float dsc_quant_power_of_two(int32_t exponent)
{
    return dsc_f32_from_bits((uint32_t)(exponent + 127) << 23);
}

static inline DSC_ON_DEVICE_TOO float dsc_quant_rounded_scale(dsc_quant_scale type, float scale)
{
    if (type == DSC_QUANT_SCALE_BF16)
        return dsc_bf16_to_f32(dsc_f32_to_bf16(scale));
    if (type == DSC_QUANT_SCALE_F16)
        return dsc_f16_to_f32(dsc_f32_to_f16(scale));
    return scale;
}

static inline DSC_ON_DEVICE_TOO float dsc_quant_e8m0(const struct dsc_quant_numbers *numbers, int32_t largest_bits)
{
    int32_t exponent = (largest_bits >> 23) - 127 - numbers->exponent;

    if (largest_bits == 0)
        return 1.0f;
    return dsc_quant_power_of_two(exponent < DSC_QUANT_MIN_EXPONENT ? DSC_QUANT_MIN_EXPONENT : exponent);
}

static inline DSC_ON_DEVICE_TOO struct dsc_quant_affine dsc_quant_affine_of(const struct dsc_quant *call,
                                                                            const struct dsc_quant_numbers *numbers,
                                                                            struct dsc_quant_range range)
{
    float largest = dsc_f32_from_bits((uint32_t)range.largest_bits);
    float scale;

    if (range.largest_bits >= DSC_QUANT_INF_BITS)
        return dsc_quant_affine_with(dsc_f32_from_bits(DSC_QUANT_NAN_BITS), 0.0f);
    if (call->scale_type == DSC_QUANT_SCALE_E8M0)
        return dsc_quant_affine_with(dsc_quant_e8m0(numbers, range.largest_bits), 0.0f);
    scale =
        call->is_symmetric ? largest / numbers->span : (range.high - range.low) / (numbers->largest - numbers->lowest);
    scale = dsc_quant_rounded_scale(call->scale_type, scale);
    if (!(scale <= 0x1.fffffep127f)) /* the range, or the rounded scale, is too large */
        return dsc_quant_affine_with(dsc_f32_from_bits(DSC_QUANT_NAN_BITS), 0.0f);
    if (scale < DSC_QUANT_MIN_SCALE)
        scale = 1.0f;
    if (call->is_symmetric)
        return dsc_quant_affine_with(scale, 0.0f);

    float zero_point = nearbyintf(numbers->lowest - range.low / scale);

    zero_point = zero_point > numbers->largest ? numbers->largest : zero_point;
    return dsc_quant_affine_with(scale, zero_point < numbers->lowest ? numbers->lowest : zero_point);
}

/* The scale and zero point of group g that the call was given. */
static inline DSC_ON_DEVICE_TOO struct dsc_quant_affine dsc_quant_given(const struct dsc_quant *call, int64_t g)
{
    return dsc_quant_affine_with(call->scales[g], call->is_symmetric ? 0.0f : (float)call->zero_points[g]);
}

/* Writes the scale and zero point of group g, where they are wanted. */
static inline DSC_ON_DEVICE_TOO void dsc_quant_note(const struct dsc_quant *call, int64_t g,
                                                    struct dsc_quant_affine affine)
{
    if (call->scales == NULL)
        return;
    call->scales[g] = affine.scale;
    if (!call->is_symmetric)
        call->zero_points[g] = (int8_t)affine.zero_point;
}

#endif
