/* Muon's elementwise halves (Jordan 2024): csrc/optim/muon.c on a device. */
#include "cuda/step.cuh"

namespace dsc_cuda {

/* The result is the update, written through the copy. */
struct momentum_half {
    static constexpr int n_states = 1;
    static constexpr bool touches_param = false, reads_grad = true, reads_state = true, writes_state = true,
                          uses_ratio = false;

    float grad_scale, momentum;
    bool is_nesterov;

    __device__ float operator()(float, float grad, float *s, float) const
    {
        const float g = grad * grad_scale;
        const float v = momentum * s[0] + g;

        s[0] = v;
        return is_nesterov ? g + momentum * v : v;
    }
};

/* The gradient's place holds the orthogonalised update. */
struct apply_half {
    static constexpr int n_states = 0;
    static constexpr bool touches_param = true, reads_grad = true, reads_state = false, writes_state = false,
                          uses_ratio = false;

    float decay, lr;

    __device__ float operator()(float p, float update, float *, float) const { return p * decay - lr * update; }
};

dsc_status muon_momentum(const struct dsc_optim_args *args, const struct dsc_optim_tensor *tensors, int64_t n_tensors,
                         void *stream)
{
    const scalars s = scalars_of(args);
    const momentum_half op = {s.grad_scale, s.momentum, s.is_nesterov};

    return run_step("muon_momentum", op, args, tensors, n_tensors, nullptr, stream);
}

dsc_status muon_apply(const struct dsc_optim_args *args, const struct dsc_optim_tensor *tensors, int64_t n_tensors,
                      void *stream)
{
    const scalars s = scalars_of(args);
    const apply_half op = {s.decay, s.lr};

    return run_step("muon_apply", op, args, tensors, n_tensors, nullptr, stream);
}

}  // namespace dsc_cuda
