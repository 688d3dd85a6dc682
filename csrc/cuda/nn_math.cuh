/*
 * csrc/cpu/math.h and csrc/nn/loops/act.c on a device: the same operations in the same order, fused where those are
 * (Note: Same bits as the host).
 */
#ifndef DSC_CUDA_NN_MATH_CUH
#define DSC_CUDA_NN_MATH_CUH

#include "cuda/common.cuh"
#include "dsc/nn.h"

namespace dsc_cuda {

__device__ inline float exp_nonpositive(float x)
{
    const float least = -87.3f;
    const float clamped = x < least ? least : x;
    const float shifted = fmaf(clamped, 1.44269504f, 12582912.0f);
    const float n = shifted - 12582912.0f;
    const float r = fmaf(-n, 1.42860677e-6f, fmaf(-n, 0.693145752f, clamped));
    float p = 1.98909809e-4f;

    p = fmaf(p, r, 1.39336416e-3f);
    p = fmaf(p, r, 8.33331048e-3f);
    p = fmaf(p, r, 4.16664667e-2f);
    p = fmaf(p, r, 1.66666672e-1f);
    p = fmaf(p, r, 0.5f);
    p = 1.0f + fmaf(r * r, p, r);
    return x < least ? 0.0f : p * __uint_as_float((__float_as_uint(shifted) + 127u) << 23);
}

__device__ inline float sigmoid(float x)
{
    const float e = exp_nonpositive(-fabsf(x));

    return (x < 0.0f ? e : 1.0f) / (1.0f + e);
}

__device__ inline float normal_cdf(float x, float *density)
{
    const float t = fabsf(x) * 0.707106781f;
    const float u = 1.0f / (1.0f + 0.5f * t);
    const float e = exp_nonpositive(-(t * t));
    float p = -0.0600128062f;

    p = fmaf(p, u, 0.289165497f);
    p = fmaf(p, u, -0.496626943f);
    p = fmaf(p, u, 0.288694143f);
    p = fmaf(p, u, -0.0337807126f);
    p = fmaf(p, u, 0.205616340f);
    p = fmaf(p, u, 0.242395729f);
    p = fmaf(p, u, 0.282467157f);
    p = fmaf(p, u, 0.282081544f);

    const float tail = 0.5f * (e * (u * p));

    *density = 0.398942280f * e;
    return x < 0.0f ? tail : 1.0f - tail;
}

struct act_value {
    float value;
    float slope;
};

__device__ inline act_value act_gelu(float x)
{
    float density;
    const float cdf = normal_cdf(x, &density);

    return {x * cdf, cdf + x * density};
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
