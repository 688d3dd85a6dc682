/* Masked softmax and its gradient: csrc/nn/softmax.c on a device. One block a row. */
#include "cuda/kinds.h"
#include "cuda/nn_rows.cuh"

namespace dsc_cuda {

struct softmax_params {
    row_grid grid;
    struct dsc_nn_softmax call;

    /* scale * x + mask; -inf where the mask leaves out. */
    __device__ float score(int64_t row, int64_t mask_begin, int64_t column) const
    {
        const float x = call.scale * load(call.dtype, call.x, row * grid.n_cols + column);

        if (call.mask_kind == DSC_NN_MASK_KEEP)
            return ((const uint8_t *)call.mask)[mask_begin + column] != 0 ? x : -INFINITY;
        return call.mask_kind == DSC_NN_MASK_ADD ? x + load(call.dtype, call.mask, mask_begin + column) : x;
    }
};

__global__ void __launch_bounds__(N_THREADS) softmax_kernel(const __grid_constant__ softmax_params a)
{
    const struct dsc_nn_softmax &call = a.call;

    for (int64_t row = blockIdx.x; row < a.grid.n_rows; row += a.grid.n_blocks) {
        const int64_t query = row % call.n_queries;
        const int64_t mask = row / call.n_queries / call.n_heads * call.mask_strides[0] +
                             row / call.n_queries % call.n_heads * call.mask_strides[1] + query * call.mask_strides[2];
        const int64_t last = query + call.n_keys - call.n_queries + 1;
        const int64_t n_seen = !call.is_causal || last > call.n_keys ? call.n_keys : last < 0 ? 0 : last;
        float max = -INFINITY;
        double sums[2] = {0.0, 0.0};

        for (int64_t c = threadIdx.x; c < n_seen; c += N_THREADS) {
            const float score = a.score(row, mask, c);

            max = score > max ? score : max;
        }
        max = share_max(max);
        if (max == -INFINITY) /* nothing is seen, or NaN alone, which must stay */
            max = 0.0f;
        for (int64_t c = threadIdx.x; c < n_seen; c += N_THREADS)
            sums[0] += (double)exp_nonpositive(a.score(row, mask, c) - max);
        share_sums(sums);

        const float factor = sums[0] == 0.0 ? 0.0f : (float)(1.0 / sums[0]);

        for (int64_t c = threadIdx.x; c < a.grid.n_cols; c += N_THREADS)
            store(call.dtype, call.y, row * a.grid.n_cols + c,
                  c < n_seen ? exp_nonpositive(a.score(row, mask, c) - max) * factor : 0.0f);
    }
}

dsc_status nn_softmax(const struct dsc_nn_softmax *call, void *stream)
{
    const int64_t n_rows = call->n_batch * call->n_heads * call->n_queries;
    const softmax_params params = {grid_of_rows(n_rows, call->n_keys), *call};

    if (n_rows == 0)
        return DSC_OK;
    DSC_TRY(check_pointer(call->x, "x"));
    return launch("nn_softmax", softmax_kernel, params.grid.n_blocks, params, stream);
}

struct softmax_grad_params {
    row_grid grid;
    struct dsc_nn_softmax_grad call;
};

__global__ void __launch_bounds__(N_THREADS) softmax_grad_kernel(const __grid_constant__ softmax_grad_params a)
{
    const struct dsc_nn_softmax_grad &call = a.call;

    for (int64_t row = blockIdx.x; row < a.grid.n_rows; row += a.grid.n_blocks) {
        const int64_t begin = row * a.grid.n_cols;
        double sums[2] = {0.0, 0.0};

        for (int64_t c = threadIdx.x; c < a.grid.n_cols; c += N_THREADS)
            sums[0] += (double)load(call.dtype, call.y, begin + c) * (double)load(call.dtype, call.dy, begin + c);
        share_sums(sums);
        for (int64_t c = threadIdx.x; c < a.grid.n_cols; c += N_THREADS) {
            const float y = load(call.dtype, call.y, begin + c);
            const float dy = load(call.dtype, call.dy, begin + c);

            store(call.dtype, call.dx, begin + c, call.scale * (y * (dy - (float)sums[0])));
        }
    }
}

dsc_status nn_softmax_grad(const struct dsc_nn_softmax_grad *call, void *stream)
{
    const softmax_grad_params params = {grid_of_rows(call->n_rows, call->n_cols), *call};

    if (call->n_rows == 0)
        return DSC_OK;
    DSC_TRY(check_pointer(call->y, "y"));
    return launch("nn_softmax_grad", softmax_grad_kernel, params.grid.n_blocks, params, stream);
}

}  // namespace dsc_cuda
