/*
 * Compiled once per instruction set: LAMB (arXiv 1904.00962, algorithm 2) in three loops, because the update is scaled
 * by norms over the whole tensor: the moments, the norms, the update. The update is computed twice, because storing it
 * would take a buffer.
 */
#include "base/par.h"
#include "optim/loops.h"

#include <math.h>

void DSC_K(lamb_moments)(const struct dsc_optim_scalars *scalars, int64_t n, const struct dsc_optim_block *block)
{
    const struct dsc_optim_scalars s = *scalars;
    const dsc_f32 *restrict grad = block->grad;
    dsc_f32 *restrict exp_avg = block->state[0];
    dsc_f32 *restrict exp_avg_sq = block->state[1];

    for (int64_t i = 0; i < n; i++) {
        float g = grad[i] * s.grad_scale;

        exp_avg[i] = exp_avg[i] + s.one_minus_beta1 * (g - exp_avg[i]);
        exp_avg_sq[i] = exp_avg_sq[i] * s.beta2 + s.one_minus_beta2 * g * g;
    }
}

static inline float update_of(const struct dsc_optim_scalars *s, float p, float m, float v)
{
    return s->corrected_one * m / (sqrtf(v) + s->corrected_eps) + s->weight_decay * p;
}

void DSC_K(lamb_norms)(const struct dsc_optim_scalars *scalars, int64_t n, const struct dsc_optim_block *block)
{
    const struct dsc_optim_scalars s = *scalars;
    const dsc_f32 *restrict param = block->param;
    const dsc_f32 *restrict exp_avg = block->state[0];
    const dsc_f32 *restrict exp_avg_sq = block->state[1];
    DSC_ALIGNED dsc_f32 update[DSC_BLOCK_ELEMS];
    int64_t n_nonfinite = 0;

    for (int64_t i = 0; i < n; i++)
        update[i] = update_of(&s, param[i], exp_avg[i], exp_avg_sq[i]);
    DSC_K(sumsq_f32)(n, param, &block->sumsq[0], &n_nonfinite);
    DSC_K(sumsq_f32)(n, update, &block->sumsq[1], &n_nonfinite);
    if (n_nonfinite > 0) /* sumsq_f32 leaves out non-finite elements, but a norm must show them */
        block->sumsq[0] = block->sumsq[1] = (double)NAN;
}

void DSC_K(lamb_apply)(const struct dsc_optim_scalars *scalars, int64_t n, const struct dsc_optim_block *block)
{
    const struct dsc_optim_scalars s = *scalars;
    const float step_size = s.lr * block->ratio;
    dsc_f32 *restrict param = block->param;
    const dsc_f32 *restrict exp_avg = block->state[0];
    const dsc_f32 *restrict exp_avg_sq = block->state[1];

    for (int64_t i = 0; i < n; i++)
        param[i] -= step_size * update_of(&s, param[i], exp_avg[i], exp_avg_sq[i]);
}
