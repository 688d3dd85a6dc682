/* Compiled once per instruction set: activations, alone and as gates. */
#include "cpu/gelu.h"
#include "cpu/wide.h"
#include "nn/table.h"

/*
 * An activation and its derivative, which share the costly part. The compiler removes whichever of the two is unused.
 */
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

static inline struct act sigmoid(wide x)
{
    wide s = dsc_wide_sigmoid(x);

    return (struct act){s, s * (1.0f - s)};
}

/* A NaN stays one. */
static inline struct act relu(wide x)
{
    wide zero = {0};

    return (struct act){dsc_wide_max(zero, x), dsc_wide_where_less(zero, x, dsc_wide_all(1.0f), zero)};
}

typedef struct act act_of(wide x);

/* Steps of EACH_WIDE_AS. They are inlined, and dtype, act and NULL pointers are then constants. */
#define STEP static inline __attribute__((always_inline)) void

static inline __attribute__((always_inline)) wide biased(dsc_dtype dtype, const void *x, const void *bias, int64_t i,
                                                         int64_t n)
{
    wide loaded = dsc_wide_load_as(dtype, x, i, n);

    return bias == NULL ? loaded : loaded + dsc_wide_load_as(dtype, bias, i, n);
}

STEP value_step(dsc_dtype dtype, act_of *act, const void *x, const void *bias, void *y, int64_t i, int64_t n)
{
    dsc_wide_store_as(dtype, act(biased(dtype, x, bias, i, n)).value, y, i, n);
}

STEP grad_step(dsc_dtype dtype, act_of *act, const void *x, const void *bias, const void *dy, void *dx, float *sum,
               int64_t i, int64_t n)
{
    wide found = dsc_wide_load_as(dtype, dy, i, n) * act(biased(dtype, x, bias, i, n)).slope;

    if (sum != NULL)
        dsc_wide_store(dsc_wide_load((dsc_f32 *)sum + i, n) + found, (dsc_f32 *)sum + i, n);
    dsc_wide_store_as(dtype, found, dx, i, n);
}

STEP gated_step(dsc_dtype dtype, act_of *act, const void *gate, const void *up, void *y, int64_t i, int64_t n)
{
    wide found = act(dsc_wide_load_as(dtype, gate, i, n)).value;

    dsc_wide_store_as(dtype, found * dsc_wide_load_as(dtype, up, i, n), y, i, n);
}

STEP gated_grad_step(dsc_dtype dtype, act_of *act, const void *gate, const void *up, const void *dy, void *dgate,
                     void *dup, int64_t i, int64_t n)
{
    struct act found = act(dsc_wide_load_as(dtype, gate, i, n));
    wide gradient = dsc_wide_load_as(dtype, dy, i, n);
    wide from_up = gradient * dsc_wide_load_as(dtype, up, i, n) * found.slope;

    dsc_wide_store_as(dtype, from_up, dgate, i, n);
    dsc_wide_store_as(dtype, gradient * found.value, dup, i, n);
}

#define DSC_NN_ACT(name)                                                                                             \
    void DSC_K(nn_##name)(int64_t n, dsc_dtype dtype, const void *x, const void *bias, void *y)                      \
    {                                                                                                                \
        if (bias == NULL)                                                                                            \
            WITH_DTYPE(dtype, EACH_WIDE_AS, n, value_step, name, x, NULL, y);                                        \
        else                                                                                                         \
            WITH_DTYPE(dtype, EACH_WIDE_AS, n, value_step, name, x, bias, y);                                        \
    }                                                                                                                \
    void DSC_K(nn_##name##_grad)(int64_t n, dsc_dtype dtype, const void *x, const void *bias, const void *dy,        \
                                 void *dx, float *sum)                                                               \
    {                                                                                                                \
        if (bias == NULL && sum == NULL)                                                                             \
            WITH_DTYPE(dtype, EACH_WIDE_AS, n, grad_step, name, x, NULL, dy, dx, NULL);                              \
        else                                                                                                         \
            WITH_DTYPE(dtype, EACH_WIDE_AS, n, grad_step, name, x, bias, dy, dx, sum);                               \
    }                                                                                                                \
    void DSC_K(nn_gated_##name)(int64_t n, dsc_dtype dtype, const void *gate, const void *up, void *y)               \
    {                                                                                                                \
        WITH_DTYPE(dtype, EACH_WIDE_AS, n, gated_step, name, gate, up, y);                                           \
    }                                                                                                                \
    void DSC_K(nn_gated_##name##_grad)(int64_t n, dsc_dtype dtype, const void *gate, const void *up, const void *dy, \
                                       void *dgate, void *dup)                                                       \
    {                                                                                                                \
        WITH_DTYPE(dtype, EACH_WIDE_AS, n, gated_grad_step, name, gate, up, dy, dgate, dup);                         \
    }

#include "dsc/activations.inc"
