/* The elements of csrc/quant/loops/groups.c on a device: the same operations in the same order. */
#ifndef DSC_CUDA_QUANT_MATH_CUH
#define DSC_CUDA_QUANT_MATH_CUH

#include "cuda/common.cuh"
#include "quant/format.h"

namespace dsc_cuda {

constexpr uint32_t MAGNITUDE = 0x7fffffffu;

/* The nearest integer, ties to even, of |x| < 2^22. Unlike nearbyintf it makes +0 of -0, as the host does. */
__device__ inline float nearest(float x)
{
    return (x + 12582912.0f) - 12582912.0f;
}

/* Clamps to the format; a NaN stays. */
__device__ inline float clamp_to(const struct dsc_quant_numbers &numbers, float x)
{
    const float least = numbers.largest < x ? numbers.largest : x;

    return numbers.lowest > least ? numbers.lowest : least;
}

/* Rounds to an integer: to the nearest, or down after `random` is added. */
__device__ inline float integer_of(bool is_random, float x, float random)
{
    const float sum = is_random ? x + random : x;
    const float r = nearest(sum);

    return is_random && sum < r ? r - 1.0f : r;
}

/* Rounds x, which is in the format's range, to a number of a floating-point format. */
__device__ inline float float_of(const struct dsc_quant_numbers &numbers, bool is_random, float x, float random)
{
    const uint32_t shift = (uint32_t)numbers.mantissa_bits << 23;
    const uint32_t least = (uint32_t)(127 + numbers.least_exponent) << 23;
    const uint32_t exponent = __float_as_uint(x) & 0x7f800000u;
    const uint32_t taken = exponent > least ? exponent : least;
    const float per_step = __uint_as_float((254u << 23) - taken + shift);
    const float r = integer_of(is_random, x * per_step, random) * __uint_as_float(taken - shift);

    return __uint_as_float(__float_as_uint(r) | (__float_as_uint(x) & ~MAGNITUDE));
}

/* The number of the format that stands for x. */
__device__ inline float number_of(const struct dsc_quant_numbers &numbers, bool is_random,
                                  struct dsc_quant_affine affine, float x, float random)
{
    const float quotient = x / affine.scale;
    const float r = numbers.mantissa_bits < 0
                        ? integer_of(is_random, clamp_to(numbers, quotient + affine.zero_point), random)
                        : float_of(numbers, is_random, clamp_to(numbers, quotient), random);

    return is_random ? clamp_to(numbers, r) : r;
}

/* Numbers of a float8 format to its codes. */
__device__ inline uint32_t float8_of(const struct dsc_quant_numbers &numbers, float r)
{
    const int32_t bits = numbers.mantissa_bits;
    const uint32_t magnitude = __float_as_uint(r) & MAGNITUDE;
    const uint32_t normal = (magnitude >> (23 - bits)) - ((uint32_t)(126 + numbers.least_exponent) << bits);
    const float count = __uint_as_float(magnitude) * dsc_quant_power_of_two(bits - numbers.least_exponent);
    const uint32_t subnormal = __float_as_uint(count + 8388608.0f) & 0x7fu;
    const bool is_normal = magnitude >= (uint32_t)(127 + numbers.least_exponent) << 23;
    const uint32_t sign = (__float_as_uint(r) >> 24) & 0x80u;

    return magnitude > (uint32_t)DSC_QUANT_INF_BITS ? 0x7fu : (is_normal ? normal : subnormal) | sign;
}

__device__ inline float float8_value(const struct dsc_quant_numbers &numbers, uint32_t code)
{
    const int32_t bits = numbers.mantissa_bits;
    const uint32_t magnitude = code & 0x7fu;
    const uint32_t normal = (magnitude << (23 - bits)) + ((uint32_t)(126 + numbers.least_exponent) << 23);
    const uint32_t subnormal =
        __float_as_uint((float)(int32_t)magnitude * dsc_quant_power_of_two(numbers.least_exponent - bits));
    uint32_t value = magnitude >= 1u << bits ? normal : subnormal;

    if (bits == 2 ? magnitude > 0x7cu : magnitude == 0x7fu)
        value = DSC_QUANT_NAN_BITS;
    else if (bits == 2 && magnitude == 0x7cu)
        value = DSC_QUANT_INF_BITS;
    return __uint_as_float(value | (code & 0x80u) << 24);
}

/* A number to the low bits of its code, and back. */
__device__ inline uint32_t code_of(const struct dsc_quant_numbers &numbers, float r)
{
    if (numbers.mantissa_bits >= 0)
        return float8_of(numbers, r);

    const int32_t number = r == r ? (int32_t)r : 0;

    return numbers.code_bits == 4 ? (uint32_t)(number + 8) : (uint32_t)number & 0xffu;
}

__device__ inline float number_of_code(const struct dsc_quant_numbers &numbers, uint32_t code)
{
    if (numbers.mantissa_bits >= 0)
        return float8_value(numbers, code);
    return (float)(numbers.code_bits == 4 ? (int32_t)code - 8 : (int32_t)(int8_t)code);
}

}  // namespace dsc_cuda

#endif
