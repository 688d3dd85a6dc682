/*
 * Compiled once per instruction set: Muon's elementwise halves (Jordan 2024), before and after the caller's
 * orthogonalisation.
 */
#include "optim/loops.h"

static inline __attribute__((always_inline)) void momentum(const struct dsc_optim_scalars *scalars, int64_t n,
                                                           const struct dsc_optim_block *block, bool is_nesterov)
{
    const struct dsc_optim_scalars s = *scalars;
    dsc_f32 *restrict update = block->param;
    const dsc_f32 *restrict grad = block->grad;
    dsc_f32 *restrict velocity = block->state[0];

    for (int64_t i = 0; i < n; i++) {
        float g = grad[i] * s.grad_scale;
        float v = s.momentum * velocity[i] + g;

        velocity[i] = v;
        update[i] = is_nesterov ? g + s.momentum * v : v;
    }
}

void DSC_K(muon_momentum)(const struct dsc_optim_scalars *scalars, int64_t n, const struct dsc_optim_block *block)
{
    if (scalars->is_nesterov)
        momentum(scalars, n, block, true);
    else
        momentum(scalars, n, block, false);
}

void DSC_K(muon_apply)(const struct dsc_optim_scalars *scalars, int64_t n, const struct dsc_optim_block *block)
{
    const struct dsc_optim_scalars s = *scalars;
    dsc_f32 *restrict param = block->param;
    const dsc_f32 *restrict update = block->grad;

    for (int64_t i = 0; i < n; i++)
        param[i] = param[i] * s.decay - s.lr * update[i];
}
