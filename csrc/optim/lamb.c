/*
 * Compiled once per instruction set: LAMB (arXiv 1904.00962, algorithm 2) in three loops, because the update is scaled by norms over the
 * whole tensor: the moments, the norms, the update. The update is worked out twice rather than kept: it would cost a buffer.
 */
#include "cpu/lanes.h"
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
    return m / s->bias_correction1 / (sqrtf(v) / s->sqrt_bias_correction2 + s->eps) + s->weight_decay * p;
}

void DSC_K(lamb_norms)(const struct dsc_optim_scalars *scalars, int64_t n, const struct dsc_optim_block *block)
{
    const struct dsc_optim_scalars s = *scalars;
    const dsc_f32 *restrict param = block->param;
    const dsc_f32 *restrict exp_avg = block->state[0];
    const dsc_f32 *restrict exp_avg_sq = block->state[1];
    double param_sums[DSC_LANES] = {0};
    double update_sums[DSC_LANES] = {0};
    int64_t n_whole = n - n % DSC_LANES;

    for (int64_t i = 0; i < n_whole; i += DSC_LANES) {
        for (int lane = 0; lane < DSC_LANES; lane++) {
            double p = (double)param[i + lane];
            double u = (double)update_of(&s, param[i + lane], exp_avg[i + lane], exp_avg_sq[i + lane]);

            param_sums[lane] += p * p;
            update_sums[lane] += u * u;
        }
    }
    for (int64_t i = n_whole; i < n; i++) {
        double p = (double)param[i];
        double u = (double)update_of(&s, param[i], exp_avg[i], exp_avg_sq[i]);

        param_sums[i - n_whole] += p * p;
        update_sums[i - n_whole] += u * u;
    }
    block->sumsq[0] += dsc_lanes_sum(param_sums);
    block->sumsq[1] += dsc_lanes_sum(update_sums);
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
