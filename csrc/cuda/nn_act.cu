/* Activations with bias, and as gates: csrc/nn/act.c and gated.c on a device. */
#include "cuda/kinds.h"
#include "cuda/nn_rows.cuh"

namespace dsc_cuda {

struct act_params {
    row_grid grid;
    struct dsc_nn_bias_act call;
};

__device__ inline float biased(int dtype, const void *x, const void *bias, int64_t i, int64_t column)
{
    const float value = load(dtype, x, i);

    return bias == nullptr ? value : value + load(dtype, bias, column);
}

__global__ void __launch_bounds__(N_THREADS) act_kernel(const __grid_constant__ act_params a)
{
    each_element(a.grid, [&](int64_t i) {
        const float x = biased(a.call.dtype, a.call.x, a.call.bias, i, i % a.grid.n_cols);

        store(a.call.dtype, a.call.y, i, act_of(a.call.act, x).value);
    });
}

dsc_status nn_bias_act(const struct dsc_nn_bias_act *call, void *stream)
{
    const act_params params = {grid_of_elements(call->n_rows, call->n_cols), *call};

    if (call->n_rows == 0)
        return DSC_OK;
    DSC_TRY(check_pointer(call->x, "x"));
    return launch("nn_bias_act", act_kernel, params.grid.n_blocks, params, stream);
}

struct act_grad_params {
    row_grid grid;
    int sum_dtype;
    void *sums[2];
    struct dsc_nn_bias_act_grad call;

    __device__ float gradient(int64_t i, int64_t column) const
    {
        return load(call.dtype, call.dy, i) * act_of(call.act, biased(call.dtype, call.x, call.bias, i, column)).slope;
    }
    __device__ void contribution(int64_t row, int64_t column, float out[2]) const
    {
        out[0] = gradient(row * grid.n_cols + column, column);
    }
};

__global__ void __launch_bounds__(N_THREADS) act_grad_kernel(const __grid_constant__ act_grad_params a)
{
    each_element(a.grid, [&](int64_t i) { store(a.call.dtype, a.call.dx, i, a.gradient(i, i % a.grid.n_cols)); });
}

dsc_status nn_bias_act_grad(const struct dsc_nn_bias_act_grad *call, void *stream)
{
    const act_grad_params params = {
        grid_of_elements(call->n_rows, call->n_cols), (int)call->dtype, {call->dbias, nullptr}, *call};

    if (call->n_rows > 0)
        DSC_TRY(check_pointer(call->x, "x"));
    DSC_TRY(sum_columns("nn_bias_act_grad, sums", params, stream)); /* first: dx may take the place of dy */
    if (call->n_rows == 0)
        return DSC_OK;
    return launch("nn_bias_act_grad", act_grad_kernel, params.grid.n_blocks, params, stream);
}

struct gated_params {
    row_grid grid;
    struct dsc_nn_gated call;
};

__global__ void __launch_bounds__(N_THREADS) gated_kernel(const __grid_constant__ gated_params a)
{
    each_element(a.grid, [&](int64_t i) {
        const int64_t from = i / a.grid.n_cols * a.call.in_stride + i % a.grid.n_cols;
        const float gate = load(a.call.dtype, a.call.gate, from);

        store(a.call.dtype, a.call.y, i, act_of(a.call.act, gate).value * load(a.call.dtype, a.call.up, from));
    });
}

dsc_status nn_gated(const struct dsc_nn_gated *call, void *stream)
{
    const gated_params params = {grid_of_elements(call->n_rows, call->n_cols), *call};

    if (call->n_rows == 0)
        return DSC_OK;
    DSC_TRY(check_pointer(call->gate, "gate"));
    return launch("nn_gated", gated_kernel, params.grid.n_blocks, params, stream);
}

struct gated_grad_params {
    row_grid grid;
    struct dsc_nn_gated_grad call;
};

__global__ void __launch_bounds__(N_THREADS) gated_grad_kernel(const __grid_constant__ gated_grad_params a)
{
    each_element(a.grid, [&](int64_t i) {
        const int64_t from = i / a.grid.n_cols * a.call.in_stride + i % a.grid.n_cols;
        const float up = load(a.call.dtype, a.call.up, from);
        const float dy = load(a.call.dtype, a.call.dy, i);
        const act_value act = act_of(a.call.act, load(a.call.dtype, a.call.gate, from));

        store(a.call.dtype, a.call.dgate, from, dy * up * act.slope);
        store(a.call.dtype, a.call.dup, from, dy * act.value);
    });
}

dsc_status nn_gated_grad(const struct dsc_nn_gated_grad *call, void *stream)
{
    const gated_grad_params params = {grid_of_elements(call->n_rows, call->n_cols), *call};

    if (call->n_rows == 0)
        return DSC_OK;
    DSC_TRY(check_pointer(call->gate, "gate"));
    return launch("nn_gated_grad", gated_grad_kernel, params.grid.n_blocks, params, stream);
}

}  // namespace dsc_cuda
