/* Dropout between a bias and a residual: csrc/nn/dropout.c on a device, with the same numbers. */
#include "cuda/kinds.h"
#include "cuda/nn_rows.cuh"
#include "cuda/philox.cuh"

namespace dsc_cuda {

constexpr double DROPOUT_NUMBERS = 65536.0;

struct dropping {
    uint64_t seed;
    uint32_t threshold; /* numbers below it are dropped: all where it is DROPOUT_NUMBERS */
    float scale;
};

inline dropping dropping_of(float p, uint64_t seed)
{
    const double threshold = nearbyint((double)p * DROPOUT_NUMBERS);

    return {seed, (uint32_t)threshold,
            threshold < DROPOUT_NUMBERS ? (float)(DROPOUT_NUMBERS / (DROPOUT_NUMBERS - threshold)) : 0.0f};
}

/* Number i of the halves of the words of Philox. */
__device__ inline uint32_t dropout_number(uint64_t seed, uint64_t i)
{
    uint32_t words[PHILOX_WORDS];

    philox(seed, i / 8, words);
    return words[i % 8 / 2] >> 16 * (i % 2) & 0xffffu;
}

__device__ inline float dropped(const dropping &how, int64_t i, float x)
{
    return dropout_number(how.seed, (uint64_t)i) >= how.threshold ? how.scale * x : 0.0f;
}

struct dropout_params {
    row_grid grid;
    dropping how;
    struct dsc_nn_dropout call;
};

__global__ void __launch_bounds__(N_THREADS) dropout_kernel(const __grid_constant__ dropout_params a)
{
    each_element(a.grid, [&](int64_t i) {
        const float x = load(a.call.dtype, a.call.x, i);
        const float y =
            dropped(a.how, i, a.call.bias == nullptr ? x : x + load(a.call.dtype, a.call.bias, i % a.grid.n_cols));

        store(a.call.dtype, a.call.y, i, a.call.residual == nullptr ? y : y + load(a.call.dtype, a.call.residual, i));
    });
}

dsc_status nn_dropout(const struct dsc_nn_dropout *call, void *stream)
{
    const dropout_params params = {grid_of_elements(call->n_rows, call->n_cols), dropping_of(call->p, call->seed),
                                   *call};

    if (call->n_rows == 0)
        return DSC_OK;
    DSC_TRY(check_pointer(call->x, "x"));
    return launch("nn_dropout", dropout_kernel, params.grid.n_blocks, params, stream);
}

struct dropout_grad_params {
    row_grid grid;
    int sum_dtype;
    void *sums[2];
    dropping how;
    struct dsc_nn_dropout_grad call;

    __device__ float gradient(int64_t i) const { return dropped(how, i, load(call.dtype, call.dy, i)); }
    __device__ void contribution(int64_t row, int64_t column, float out[2]) const
    {
        out[0] = gradient(row * grid.n_cols + column);
    }
};

__global__ void __launch_bounds__(N_THREADS) dropout_grad_kernel(const __grid_constant__ dropout_grad_params a)
{
    each_element(a.grid, [&](int64_t i) { store(a.call.dtype, a.call.dx, i, a.gradient(i)); });
}

dsc_status nn_dropout_grad(const struct dsc_nn_dropout_grad *call, void *stream)
{
    const dropout_grad_params params = {grid_of_elements(call->n_rows, call->n_cols),
                                        (int)call->dtype,
                                        {call->dbias, nullptr},
                                        dropping_of(call->p, call->seed),
                                        *call};

    if (call->n_rows > 0)
        DSC_TRY(check_pointer(call->dy, "dy"));
    DSC_TRY(sum_columns("nn_dropout_grad, sums", params, stream)); /* first: dx may take the place of dy */
    if (call->n_rows == 0)
        return DSC_OK;
    return launch("nn_dropout_grad", dropout_grad_kernel, params.grid.n_blocks, params, stream);
}

}  // namespace dsc_cuda
