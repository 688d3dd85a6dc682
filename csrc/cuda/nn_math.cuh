/*
 * csrc/cpu/math.h, csrc/cpu/gelu.h and csrc/nn/loops/act.c on a device: the same operations in the same order, fused
 * where those are (Note: Same bits as the host).
 */
#ifndef DSC_CUDA_NN_MATH_CUH
#define DSC_CUDA_NN_MATH_CUH

#include "cuda/common.cuh"
#include "dsc/nn.h"

namespace dsc_cuda {

__device__ inline float exp_nonpositive(float x)
{
    const float least = -87.3f;
    const float rounder = 12582912.0f + 127.0f;
    const float shifted = fmaf(x, 1.44269504f, rounder);
    const float n = rounder - shifted;
    const float r = fmaf(n, 1.42860677e-6f, fmaf(n, 0.693145752f, x));
    float p = 1.38145406e-3f;

    p = fmaf(p, r, 8.36874545e-3f);
    p = fmaf(p, r, 4.1668389e-2f);
    p = fmaf(p, r, 1.66665211e-1f);
    p = fmaf(p, r, 0.49999994f);
    p = fmaf(p, r, 1.0f);
    p = fmaf(p, r, 1.0f);
    return x < least ? 0.0f : p * __uint_as_float(__float_as_uint(shifted) << 23);
}

__device__ inline float sigmoid(float x)
{
    const float e = exp_nonpositive(-fabsf(x));

    return (x < 0.0f ? e : 1.0f) / (1.0f + e);
}

#define DSC_GELU_TABLE(name, ...) static __device__ const float name[8][16] = {__VA_ARGS__};
#include "cpu/gelu.inc"
#undef DSC_GELU_TABLE

/* Threads of a warp read one row of the table at a time, which is half a cache line. */
__device__ inline float gelu_polynomial(const float (*table)[16], float r, int index)
{
    float p = table[7][index];

    for (int k = 6; k >= 0; k--)
        p = fmaf(p, r, table[k][index]);
    return p;
}

struct act_value {
    float value;
    float slope;
};

__device__ inline act_value act_gelu(float x)
{
    const float limit = 6.5625f;
    const float t = limit < fabsf(x) ? limit : fabsf(x);
    const float shifted = fmaf(t, 2.28571429f, 12582912.0f);
    const float r = fmaf(12582912.0f - shifted, 0.4375f, t);
    const int index = __float_as_uint(shifted) & 15;
    const float tail = gelu_polynomial(dsc_gelu_tail, r, index);
    const float slope = gelu_polynomial(dsc_gelu_slope, r, index);

    return {x * (x < 0.0f ? tail : 1.0f - tail), x < 0.0f ? slope : 1.0f - slope};
}

__device__ inline act_value act_gelu_tanh(float x)
{
    const float square = x * x;
    const float s = sigmoid(x * (1.59576912f + 0.0713548163f * square));

    return {x * s, s + x * (s * (1.0f - s)) * (1.59576912f + 3.0f * 0.0713548163f * square)};
}

__device__ inline act_value act_silu(float x)
{
    const float s = sigmoid(x);

    return {x * s, s + x * (s * (1.0f - s))};
}

__device__ inline act_value act_relu(float x)
{
    return {x < 0.0f ? 0.0f : x, x > 0.0f ? 1.0f : 0.0f};
}

__device__ inline act_value act_sigmoid(float x)
{
    const float s = sigmoid(x);

    return {s, s * (1.0f - s)};
}

__device__ inline act_value act_of(int act, float x)
{
    switch (act) {
#define DSC_NN_ACT(name)    \
    case DSC_NN_ACT_##name: \
        return act_##name(x);
#include "dsc/activations.inc"
#undef DSC_NN_ACT
    default:
        return {x, 1.0f};
    }
}

}  // namespace dsc_cuda

#endif
