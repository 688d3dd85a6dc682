/*
 * Compiled once per instruction set: Adam (arXiv 1412.6980) and AdamW (arXiv 1711.05101), in the order of operations of
 * torch.optim, except that the bias corrections are folded into the step size and eps (1412.6980, end of section 2):
 * one division an element instead of two.
 */
#include "optim/loops.h"

#include <math.h>

static inline __attribute__((always_inline)) void adam(const struct dsc_optim_scalars *scalars, int64_t n,
                                                       const struct dsc_optim_block *block, bool is_decoupled)
{
    const struct dsc_optim_scalars s = *scalars;
    dsc_f32 *restrict param = block->param;
    const dsc_f32 *restrict grad = block->grad;
    dsc_f32 *restrict exp_avg = block->state[0];
    dsc_f32 *restrict exp_avg_sq = block->state[1];

    for (int64_t i = 0; i < n; i++) {
        float p = param[i];
        float g = grad[i] * s.grad_scale;

        if (is_decoupled)
            p *= s.decay;
        else
            g += s.weight_decay * p;

        float m = exp_avg[i] + s.one_minus_beta1 * (g - exp_avg[i]);
        float v = exp_avg_sq[i] * s.beta2 + s.one_minus_beta2 * g * g;

        exp_avg[i] = m;
        exp_avg_sq[i] = v;
        param[i] = p - s.corrected_lr * m / (sqrtf(v) + s.corrected_eps);
    }
}

void DSC_K(adam_step)(const struct dsc_optim_scalars *scalars, int64_t n, const struct dsc_optim_block *block)
{
    adam(scalars, n, block, false);
}

void DSC_K(adamw_step)(const struct dsc_optim_scalars *scalars, int64_t n, const struct dsc_optim_block *block)
{
    adam(scalars, n, block, true);
}
