/* Lion (arXiv 2302.06675, algorithm 2): csrc/optim/lion.c on a device. */
#include "cuda/step.cuh"

namespace dsc_cuda {

/* -1, 0 or 1; a NaN stays a NaN. */
__device__ inline float sign_of(float x)
{
    const float magnitude = x == 0.0f ? 0.0f : 1.0f;

    return x != x ? x : copysignf(magnitude, x);
}

struct lion {
    static constexpr int n_states = 1;
    static constexpr bool touches_param = true, reads_grad = true, reads_state = true, writes_state = true,
                          uses_ratio = false;

    float grad_scale, lr, decay, beta1, one_minus_beta1, beta2, one_minus_beta2;

    __device__ float operator()(float p, float grad, float *s, float) const
    {
        const float g = grad * grad_scale;
        const float m = s[0];
        const float update = beta1 * m + one_minus_beta1 * g;

        s[0] = beta2 * m + one_minus_beta2 * g;
        return p * decay - lr * sign_of(update);
    }
};

dsc_status lion_step(const struct dsc_optim_args *args, const struct dsc_optim_tensor *tensors, int64_t n_tensors,
                     void *stream)
{
    const scalars s = scalars_of(args);
    const lion op = {s.grad_scale, s.lr, s.decay, s.beta1, s.one_minus_beta1, s.beta2, s.one_minus_beta2};

    return run_step("lion", op, args, tensors, n_tensors, nullptr, stream);
}

}  // namespace dsc_cuda
