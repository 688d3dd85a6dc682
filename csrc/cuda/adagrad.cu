/* Adagrad (Duchi, Hazan and Singer 2011): csrc/optim/adagrad.c on a device. */
#include "cuda/step.cuh"

namespace dsc_cuda {

struct adagrad {
    static constexpr int n_states = 1;
    static constexpr bool touches_param = true, reads_grad = true, reads_state = true, writes_state = true,
                          uses_ratio = false;

    float grad_scale, weight_decay, decayed_lr, eps;

    __device__ float operator()(float p, float grad, float *s, float) const
    {
        const float g = grad * grad_scale + weight_decay * p;

        s[0] += g * g;
        return p - decayed_lr * g / (sqrtf(s[0]) + eps);
    }
};

dsc_status adagrad_step(const struct dsc_optim_args *args, const struct dsc_optim_tensor *tensors, int64_t n_tensors,
                        void *stream)
{
    const scalars s = scalars_of(args);
    const adagrad op = {s.grad_scale, s.weight_decay, s.decayed_lr, s.eps};

    return run_step("adagrad", op, args, tensors, n_tensors, nullptr, stream);
}

}  // namespace dsc_cuda
