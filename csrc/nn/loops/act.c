/* Compiled once per instruction set: activations, alone and as gates. */
#include "cpu/math.h"
#include "nn/table.h"

/* An activation and its derivative, both from one evaluation of what is costly. */
struct act {
    float value;
    float slope;
};

static inline struct act gelu(float x)
{
    float density;
    float cdf = dsc_normal_cdf(x, &density);

    return (struct act){x * cdf, cdf + x * density};
}

/* (1 + tanh z) / 2 is sigmoid(2 z), with z = sqrt(2 / pi) (x + 0.044715 x^3). */
#define TWICE_SQRT_2_PI 1.59576912f
#define CUBIC 0.0713548163f /* TWICE_SQRT_2_PI * 0.044715 */

static inline struct act gelu_tanh(float x)
{
    float square = x * x;
    float s = dsc_sigmoid(x * (TWICE_SQRT_2_PI + CUBIC * square));

    return (struct act){x * s, s + x * (s * (1.0f - s)) * (TWICE_SQRT_2_PI + 3.0f * CUBIC * square)};
}

static inline struct act silu(float x)
{
    float s = dsc_sigmoid(x);

    return (struct act){x * s, s + x * (s * (1.0f - s))};
}

/* A NaN stays one. */
static inline struct act relu(float x)
{
    return (struct act){x < 0.0f ? 0.0f : x, x > 0.0f ? 1.0f : 0.0f};
}

#define DSC_NN_ACT(name)                                                                                     \
    void DSC_K(nn_##name)(int64_t n, const dsc_f32 *x, dsc_f32 *y)                                           \
    {                                                                                                        \
        EACH for (int64_t i = 0; i < n; i++) y[i] = name(x[i]).value;                                        \
    }                                                                                                        \
    void DSC_K(nn_##name##_grad)(int64_t n, const dsc_f32 *x, const dsc_f32 *dy, dsc_f32 *dx)                \
    {                                                                                                        \
        EACH for (int64_t i = 0; i < n; i++) dx[i] = dy[i] * name(x[i]).slope;                               \
    }                                                                                                        \
    void DSC_K(nn_gated_##name)(int64_t n, const dsc_f32 *gate, const dsc_f32 *up, dsc_f32 *y)               \
    {                                                                                                        \
        EACH for (int64_t i = 0; i < n; i++) y[i] = name(gate[i]).value * up[i];                             \
    }                                                                                                        \
    void DSC_K(nn_gated_##name##_grad)(int64_t n, const dsc_f32 *gate, const dsc_f32 *up, const dsc_f32 *dy, \
                                       dsc_f32 *dgate, dsc_f32 *dup)                                         \
    {                                                                                                        \
        EACH for (int64_t i = 0; i < n; i++)                                                                 \
        {                                                                                                    \
            struct act act = name(gate[i]);                                                                  \
            float from_up = dy[i] * up[i] * act.slope;                                                       \
            float from_gate = dy[i] * act.value;                                                             \
                                                                                                             \
            dgate[i] = from_up;                                                                              \
            dup[i] = from_gate;                                                                              \
        }                                                                                                    \
    }

#include "dsc/activations.inc"
