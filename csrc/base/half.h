/*
 * bf16 and f16 <-> f32 by bit arithmetic, one element at a time, without branches, so that a loop around such a
 * function vectorises on every instruction set. Narrowing rounds to nearest, ties to even; overflow gives inf,
 * subnormals are exact, a NaN stays a NaN.
 */
#ifndef DSC_BASE_HALF_H
#define DSC_BASE_HALF_H

#include <stdint.h>
#include <string.h>

/* Before the name of a function that CUDA sources share with the host. */
#ifdef __CUDACC__
#define DSC_ON_DEVICE_TOO __host__ __device__
#else
#define DSC_ON_DEVICE_TOO
#endif

static inline DSC_ON_DEVICE_TOO uint32_t dsc_f32_bits(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline DSC_ON_DEVICE_TOO float dsc_f32_from_bits(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline DSC_ON_DEVICE_TOO float dsc_bf16_to_f32(uint16_t half)
{
    return dsc_f32_from_bits((uint32_t)half << 16);
}

static inline DSC_ON_DEVICE_TOO uint16_t dsc_f32_to_bf16(float value)
{
    uint32_t bits = dsc_f32_bits(value);
    uint32_t rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
    uint32_t quiet = bits | 0x400000u; /* a NaN with payload only in the low bits would become inf */

    return (uint16_t)((value != value ? quiet : rounded) >> 16);
}

static inline DSC_ON_DEVICE_TOO float dsc_f16_to_f32(uint16_t half)
{
    uint32_t sign = (uint32_t)(half & 0x8000u) << 16;
    uint32_t magnitude = half & 0x7fffu;
    /* Normal numbers: move the fields and rebias the exponent from 15 to 127; inf and NaN: once more, up to 255. */
    uint32_t normal = (magnitude << 13) + (112u << 23);
    uint32_t special = normal + (112u << 23);
    /*
     * Subnormals: the fraction is an integer count of 2^-24; exact, and a normal f32, so flush-to-zero modes do not
     * matter.
     */
    uint32_t subnormal = dsc_f32_bits((float)(int32_t)magnitude * 0x1p-24f);
    uint32_t bits = magnitude < 0x0400u ? subnormal : normal;

    bits = magnitude >= 0x7c00u ? special : bits;
    bits |= magnitude > 0x7c00u ? 0x400000u : 0u; /* makes a NaN quiet, as the processors' own conversions do */
    return dsc_f32_from_bits(bits | sign);
}

static inline DSC_ON_DEVICE_TOO uint16_t dsc_f32_to_f16(float value)
{
    uint32_t bits = dsc_f32_bits(value);
    uint32_t sign = (bits >> 16) & 0x8000u;
    uint32_t magnitude = bits & 0x7fffffffu;
    uint32_t normal = (magnitude - (112u << 23) + 0x0fffu + ((magnitude >> 13) & 1u)) >> 13;
    /* Below 2^-14: adding 0.5, whose last place is 2^-24, lets the adder round; the fraction is then the result. */
    uint32_t subnormal = dsc_f32_bits(dsc_f32_from_bits(magnitude) + 0.5f) - (126u << 23);
    uint32_t nan = 0x7e00u | ((magnitude >> 13) & 0x01ffu);
    uint32_t half = magnitude < (113u << 23) ? subnormal : normal;

    half = magnitude >= (143u << 23) ? 0x7c00u
                                     : half; /* 65536 and above. In [65520, 65536) rounding already carries into inf */
    half = magnitude > 0x7f800000u ? nan : half;
    return (uint16_t)(half | sign);
}

#endif
