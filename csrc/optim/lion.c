/* Compiled once per instruction set: Lion (arXiv 2302.06675, algorithm 2). */
#include "base/half.h"
#include "optim/loops.h"

/*
 * -1, 0 or 1. A NaN stays a NaN, so that a bad gradient shows in the weights and does not just move them by one step.
 */
static inline float sign_of(float x)
{
    float magnitude = x == 0.0f ? 0.0f : 1.0f;
    float sign = dsc_f32_from_bits(dsc_f32_bits(magnitude) | (dsc_f32_bits(x) & 0x80000000u));

    return x != x ? x : sign;
}

void DSC_K(lion_step)(const struct dsc_optim_scalars *scalars, int64_t n, const struct dsc_optim_block *block)
{
    const struct dsc_optim_scalars s = *scalars;
    dsc_f32 *restrict param = block->param;
    const dsc_f32 *restrict grad = block->grad;
    dsc_f32 *restrict exp_avg = block->state[0];

    for (int64_t i = 0; i < n; i++) {
        float g = grad[i] * s.grad_scale;
        float m = exp_avg[i];
        float update = s.beta1 * m + s.one_minus_beta1 * g;

        param[i] = param[i] * s.decay - s.lr * sign_of(update);
        exp_avg[i] = s.beta2 * m + s.one_minus_beta2 * g;
    }
}
