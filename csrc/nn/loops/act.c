/* Compiled once per instruction set: activations, alone and as gates. */
#include "cpu/gelu.h"
#include "cpu/wide.h"
#include "nn/table.h"

/* An activation and its derivative, both from one evaluation of what is costly; the compiler leaves out the unused. */
struct act {
    wide value;
    wide slope;
};

static inline struct act gelu(wide x)
{
    struct gelu_piece piece = dsc_gelu_piece(x);

    return (struct act){dsc_gelu_of(x, piece), dsc_gelu_slope_of(x, piece)};
}

/* (1 + tanh z) / 2 is sigmoid(2 z), with z = sqrt(2 / pi) (x + 0.044715 x^3). */
#define TWICE_SQRT_2_PI 1.59576912f
#define CUBIC 0.0713548163f /* TWICE_SQRT_2_PI * 0.044715 */

static inline struct act gelu_tanh(wide x)
{
    wide square = x * x;
    wide s = dsc_wide_sigmoid(x * (TWICE_SQRT_2_PI + CUBIC * square));

    return (struct act){x * s, s + x * (s * (1.0f - s)) * (TWICE_SQRT_2_PI + 3.0f * CUBIC * square)};
}

static inline struct act silu(wide x)
{
    wide s = dsc_wide_sigmoid(x);

    return (struct act){x * s, s + x * (s * (1.0f - s))};
}

/* A NaN stays one. */
static inline struct act relu(wide x)
{
    wide zero = {0};

    return (struct act){dsc_wide_max(zero, x), dsc_wide_where_less(zero, x, dsc_wide_all(1.0f), zero)};
}

typedef struct act act_of(wide x);

/* Steps of EACH_WIDE; act is a constant where they are inlined. */
#define STEP static inline __attribute__((always_inline)) void

STEP value_step(act_of *act, const dsc_f32 *x, dsc_f32 *y, int64_t i, int64_t n)
{
    dsc_wide_store(act(dsc_wide_load(x + i, n)).value, y + i, n);
}

STEP grad_step(act_of *act, const dsc_f32 *x, const dsc_f32 *dy, dsc_f32 *dx, int64_t i, int64_t n)
{
    dsc_wide_store(dsc_wide_load(dy + i, n) * act(dsc_wide_load(x + i, n)).slope, dx + i, n);
}

STEP gated_step(act_of *act, const dsc_f32 *gate, const dsc_f32 *up, dsc_f32 *y, int64_t i, int64_t n)
{
    dsc_wide_store(act(dsc_wide_load(gate + i, n)).value * dsc_wide_load(up + i, n), y + i, n);
}

STEP gated_grad_step(act_of *act, const dsc_f32 *gate, const dsc_f32 *up, const dsc_f32 *dy, dsc_f32 *dgate,
                     dsc_f32 *dup, int64_t i, int64_t n)
{
    struct act found = act(dsc_wide_load(gate + i, n));
    wide gradient = dsc_wide_load(dy + i, n);
    wide from_up = gradient * dsc_wide_load(up + i, n) * found.slope;

    dsc_wide_store(from_up, dgate + i, n);
    dsc_wide_store(gradient * found.value, dup + i, n);
}

#define DSC_NN_ACT(name)                                                                                     \
    void DSC_K(nn_##name)(int64_t n, const dsc_f32 *x, dsc_f32 *y)                                           \
    {                                                                                                        \
        EACH_WIDE(n, value_step, name, x, y);                                                                \
    }                                                                                                        \
    void DSC_K(nn_##name##_grad)(int64_t n, const dsc_f32 *x, const dsc_f32 *dy, dsc_f32 *dx)                \
    {                                                                                                        \
        EACH_WIDE(n, grad_step, name, x, dy, dx);                                                            \
    }                                                                                                        \
    void DSC_K(nn_gated_##name)(int64_t n, const dsc_f32 *gate, const dsc_f32 *up, dsc_f32 *y)               \
    {                                                                                                        \
        EACH_WIDE(n, gated_step, name, gate, up, y);                                                         \
    }                                                                                                        \
    void DSC_K(nn_gated_##name##_grad)(int64_t n, const dsc_f32 *gate, const dsc_f32 *up, const dsc_f32 *dy, \
                                       dsc_f32 *dgate, dsc_f32 *dup)                                         \
    {                                                                                                        \
        EACH_WIDE(n, gated_grad_step, name, gate, up, dy, dgate, dup);                                       \
    }

#include "dsc/activations.inc"
