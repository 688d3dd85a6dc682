/* SGD, plain and with momentum: csrc/optim/sgd.c on a device. */
#include "cuda/step.cuh"

namespace dsc_cuda {

struct sgd_plain {
    static constexpr int n_states = 0;
    static constexpr bool touches_param = true, reads_grad = true, reads_state = false, writes_state = false,
                          uses_ratio = false;

    float grad_scale, weight_decay, lr;

    __device__ float operator()(float p, float grad, float *, float) const
    {
        return p - lr * (grad * grad_scale + weight_decay * p);
    }
};

struct sgd_momentum {
    static constexpr int n_states = 1;
    static constexpr bool touches_param = true, reads_grad = true, reads_state = true, writes_state = true,
                          uses_ratio = false;

    float grad_scale, weight_decay, lr, momentum, one_minus_dampening;
    bool is_first_step, is_nesterov;

    __device__ float operator()(float p, float grad, float *s, float) const
    {
        const float g = grad * grad_scale + weight_decay * p;
        /* The first step starts the velocity at the gradient, undampened, and ignores the buffer. */
        const float v = is_first_step ? g : momentum * s[0] + one_minus_dampening * g;

        s[0] = v;
        return p - lr * (is_nesterov ? g + momentum * v : v);
    }
};

dsc_status sgd_step(const struct dsc_optim_args *args, const struct dsc_optim_tensor *tensors, int64_t n_tensors,
                    void *stream)
{
    const scalars s = scalars_of(args);
    const sgd_plain plain = {s.grad_scale, s.weight_decay, s.lr};
    const sgd_momentum with_momentum = {s.grad_scale,          s.weight_decay,  s.lr,         s.momentum,
                                        s.one_minus_dampening, s.is_first_step, s.is_nesterov};

    if (!s.has_momentum)
        return run_step("sgd", plain, args, tensors, n_tensors, nullptr, stream);
    return run_step("sgd", with_momentum, args, tensors, n_tensors, nullptr, stream);
}

}  // namespace dsc_cuda
