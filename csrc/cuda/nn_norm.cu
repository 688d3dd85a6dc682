/* Layer and RMS norm: csrc/nn/norm.c on a device. One block a row; sums over columns in a second launch. */
#include "cuda/kinds.h"
#include "cuda/nn_rows.cuh"

namespace dsc_cuda {

struct norm_params {
    row_grid grid;
    struct dsc_nn_norm call;
};

__global__ void __launch_bounds__(N_THREADS) norm_kernel(const __grid_constant__ norm_params a)
{
    const struct dsc_nn_norm &call = a.call;
    const bool has_residual = call.residual != nullptr;
    const void *from = has_residual ? call.sum : call.x;

    for (int64_t row = blockIdx.x; row < a.grid.n_rows; row += a.grid.n_blocks) {
        const int64_t begin = row * a.grid.n_cols;
        double sums[2] = {0.0, 0.0};

        for (int64_t c = threadIdx.x; c < a.grid.n_cols; c += N_THREADS) {
            float x = load(call.dtype, call.x, begin + c);

            if (has_residual) {
                store(call.dtype, call.sum, begin + c, x + load(call.dtype, call.residual, begin + c));
                x = load(call.dtype, call.sum, begin + c); /* as it was rounded */
            }
            sums[0] += (double)x;
            sums[1] += (double)x * (double)x;
        }
        share_sums(sums);

        const double n_cols = (double)a.grid.n_cols;
        const double mean = call.is_rms ? 0.0 : sums[0] / n_cols;
        const double variance = sums[1] / n_cols - mean * mean;
        const double rstd = 1.0 / sqrt((variance < 0.0 ? 0.0 : variance) + (double)call.eps);

        if (threadIdx.x == 0) {
            call.rstd[row] = (float)rstd;
            if (!call.is_rms)
                call.mean[row] = (float)mean;
        }
        for (int64_t c = threadIdx.x; c < a.grid.n_cols; c += N_THREADS) {
            float y = (load(call.dtype, from, begin + c) - (float)mean) * (float)rstd;

            if (call.weight != nullptr)
                y = y * load(call.weight_dtype, call.weight, c);
            if (call.bias != nullptr)
                y = y + load(call.weight_dtype, call.bias, c);
            store(call.dtype, call.y, begin + c, y);
        }
    }
}

dsc_status nn_norm(const struct dsc_nn_norm *call, void *stream)
{
    const norm_params params = {grid_of_rows(call->n_rows, call->n_cols), *call};

    if (call->n_rows == 0)
        return DSC_OK;
    DSC_TRY(check_pointer(call->x, "x"));
    return launch("nn_norm", norm_kernel, params.grid.n_blocks, params, stream);
}

struct norm_grad_params {
    row_grid grid;
    int sum_dtype;
    void *sums[2];
    struct dsc_nn_norm_grad call;

    __device__ float normed(int64_t row, int64_t column) const
    {
        const float mean = call.is_rms ? 0.0f : call.mean[row];

        return (load(call.dtype, call.sum, row * grid.n_cols + column) - mean) * call.rstd[row];
    }
    __device__ float gradient(int64_t row, int64_t column) const
    {
        const float dy = load(call.dtype, call.dy, row * grid.n_cols + column);

        return call.weight == nullptr ? dy : dy * load(call.weight_dtype, call.weight, column);
    }
    __device__ void contribution(int64_t row, int64_t column, float out[2]) const
    {
        out[1] = load(call.dtype, call.dy, row * grid.n_cols + column);
        out[0] = out[1] * normed(row, column);
    }
};

__global__ void __launch_bounds__(N_THREADS) norm_grad_kernel(const __grid_constant__ norm_grad_params a)
{
    const struct dsc_nn_norm_grad &call = a.call;

    for (int64_t row = blockIdx.x; row < a.grid.n_rows; row += a.grid.n_blocks) {
        double sums[2] = {0.0, 0.0};

        for (int64_t c = threadIdx.x; c < a.grid.n_cols; c += N_THREADS) {
            const float g = a.gradient(row, c);

            sums[0] += (double)g;
            sums[1] += (double)(g * a.normed(row, c));
        }
        share_sums(sums);

        const float mean_g = call.is_rms ? 0.0f : (float)(sums[0] / (double)a.grid.n_cols);
        const float mean_gh = (float)(sums[1] / (double)a.grid.n_cols);

        for (int64_t c = threadIdx.x; c < a.grid.n_cols; c += N_THREADS) {
            const int64_t i = row * a.grid.n_cols + c;
            const float dx = call.rstd[row] * (a.gradient(row, c) - mean_g - a.normed(row, c) * mean_gh);

            store(call.dtype, call.dx, i, call.dsum == nullptr ? dx : dx + load(call.dtype, call.dsum, i));
        }
    }
}

dsc_status nn_norm_grad(const struct dsc_nn_norm_grad *call, void *stream)
{
    norm_grad_params params = {
        grid_of_rows(call->n_rows, call->n_cols), (int)call->weight_dtype, {call->dweight, call->dbias}, *call};

    if (call->n_rows > 0)
        DSC_TRY(check_pointer(call->sum, "sum"));
    /* The sums first: dx may take the place of dy. */
    DSC_TRY(sum_columns("nn_norm_grad, sums", params, stream));
    if (call->n_rows == 0)
        return DSC_OK;
    return launch("nn_norm_grad", norm_grad_kernel, params.grid.n_blocks, params, stream);
}

}  // namespace dsc_cuda
