/* Compiled once per instruction set: Adagrad (Duchi, Hazan and Singer 2011), in the order of operations of torch.optim.
 */
#include "optim/loops.h"

#include <math.h>

void DSC_K(adagrad_step)(const struct dsc_optim_scalars *scalars, int64_t n, const struct dsc_optim_block *block)
{
    const struct dsc_optim_scalars s = *scalars;
    dsc_f32 *restrict param = block->param;
    const dsc_f32 *restrict grad = block->grad;
    dsc_f32 *restrict sum = block->state[0];

    for (int64_t i = 0; i < n; i++) {
        float g = grad[i] * s.grad_scale + s.weight_decay * param[i];
        float total = sum[i] + g * g;

        sum[i] = total;
        param[i] -= s.decayed_lr * g / (sqrtf(total) + s.eps);
    }
}
