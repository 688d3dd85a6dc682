/* Compiled once per instruction set: SGD with momentum, dampening and Nesterov's variant, as torch.optim defines them.
 */
#include "optim/loops.h"

static void plain(const struct dsc_optim_scalars *scalars, int64_t n, const struct dsc_optim_block *block)
{
    const struct dsc_optim_scalars s = *scalars;
    dsc_f32 *restrict param = block->param;
    const dsc_f32 *restrict grad = block->grad;

    for (int64_t i = 0; i < n; i++) {
        float g = grad[i] * s.grad_scale + s.weight_decay * param[i];

        param[i] -= s.lr * g;
    }
}

static inline __attribute__((always_inline)) void with_momentum(const struct dsc_optim_scalars *scalars, int64_t n,
                                                                const struct dsc_optim_block *block, bool is_first_step,
                                                                bool is_nesterov)
{
    const struct dsc_optim_scalars s = *scalars;
    dsc_f32 *restrict param = block->param;
    const dsc_f32 *restrict grad = block->grad;
    dsc_f32 *restrict velocity = block->state[0];

    for (int64_t i = 0; i < n; i++) {
        float g = grad[i] * s.grad_scale + s.weight_decay * param[i];
        /* The first step starts the velocity at the gradient, undampened, and ignores the buffer. */
        float v = is_first_step ? g : s.momentum * velocity[i] + s.one_minus_dampening * g;

        velocity[i] = v;
        param[i] -= s.lr * (is_nesterov ? g + s.momentum * v : v);
    }
}

void DSC_K(sgd_step)(const struct dsc_optim_scalars *scalars, int64_t n, const struct dsc_optim_block *block)
{
    if (!scalars->has_momentum)
        plain(scalars, n, block);
    else if (scalars->is_first_step && scalars->is_nesterov)
        with_momentum(scalars, n, block, true, true);
    else if (scalars->is_first_step)
        with_momentum(scalars, n, block, true, false);
    else if (scalars->is_nesterov)
        with_momentum(scalars, n, block, false, true);
    else
        with_momentum(scalars, n, block, false, false);
}
