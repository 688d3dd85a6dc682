/* Adam (arXiv 1412.6980) and AdamW (arXiv 1711.05101): csrc/optim/adam.c on a device. */
#include "cuda/step.cuh"

namespace dsc_cuda {

template <bool IS_DECOUPLED>
struct adam {
    static constexpr int n_states = 2;
    static constexpr bool touches_param = true, reads_grad = true, reads_state = true, writes_state = true,
                          uses_ratio = false;

    float grad_scale, weight_decay, decay, one_minus_beta1, beta2, one_minus_beta2, corrected_lr, corrected_eps;

    explicit adam(const scalars &s)
        : grad_scale(s.grad_scale), weight_decay(s.weight_decay), decay(s.decay), one_minus_beta1(s.one_minus_beta1),
          beta2(s.beta2), one_minus_beta2(s.one_minus_beta2), corrected_lr(s.corrected_lr),
          corrected_eps(s.corrected_eps)
    {
    }
    adam() = default;

    __device__ float operator()(float p, float grad, float *s, float) const
    {
        float g = grad * grad_scale;

        if (IS_DECOUPLED)
            p *= decay;
        else
            g += weight_decay * p;
        s[0] = s[0] + one_minus_beta1 * (g - s[0]);
        s[1] = s[1] * beta2 + one_minus_beta2 * g * g;
        return p - corrected_lr * s[0] / (sqrtf(s[1]) + corrected_eps);
    }
};

dsc_status adam_step(const struct dsc_optim_args *args, const struct dsc_optim_tensor *tensors, int64_t n_tensors,
                     void *stream)
{
    return run_step("adam", adam<false>(scalars_of(args)), args, tensors, n_tensors, nullptr, stream);
}

dsc_status adamw_step(const struct dsc_optim_args *args, const struct dsc_optim_tensor *tensors, int64_t n_tensors,
                      void *stream)
{
    return run_step("adamw", adam<true>(scalars_of(args)), args, tensors, n_tensors, nullptr, stream);
}

}  // namespace dsc_cuda
