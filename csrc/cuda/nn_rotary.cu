/* Rotary positions: csrc/nn/rotary.c on a device. A thread turns a pair, or copies an element that is not turned. */
#include "cuda/kinds.h"
#include "cuda/nn_rows.cuh"

namespace dsc_cuda {

struct rotary_params {
    row_grid grid; /* heads, and each head's work items: pairs, then the remaining elements */
    struct dsc_nn_rotary call;
};

__device__ inline int64_t offset_of(const int64_t strides[3], int64_t batch, int64_t token, int64_t head)
{
    return batch * strides[0] + token * strides[1] + head * strides[2];
}

__global__ void __launch_bounds__(N_THREADS) rotary_kernel(const __grid_constant__ rotary_params a)
{
    const struct dsc_nn_rotary &call = a.call;
    const int64_t n_pairs = call.rotary_dim / 2;

    each_element(a.grid, [&](int64_t i) {
        const int64_t row = i / a.grid.n_cols;
        const int64_t part = i % a.grid.n_cols;
        const int64_t token = row / call.n_heads % call.n_tokens;
        const int64_t batch = row / call.n_heads / call.n_tokens;
        const int64_t x = offset_of(call.x_strides, batch, token, row % call.n_heads);
        const int64_t y = offset_of(call.y_strides, batch, token, row % call.n_heads);

        if (part >= n_pairs) {
            store(call.dtype, call.y, y + n_pairs + part, load(call.dtype, call.x, x + n_pairs + part));
            return;
        }
        const int64_t table = batch * call.table_strides[0] + token * call.table_strides[1] + part;
        const int64_t first = call.is_interleaved ? 2 * part : part;
        const int64_t second = call.is_interleaved ? first + 1 : part + n_pairs;
        const float s = (call.is_inverse ? -1.0f : 1.0f) * call.sin[table];
        const float x0 = load(call.dtype, call.x, x + first);
        const float x1 = load(call.dtype, call.x, x + second);

        store(call.dtype, call.y, y + first, x0 * call.cos[table] - x1 * s);
        store(call.dtype, call.y, y + second, x1 * call.cos[table] + x0 * s);
    });
}

dsc_status nn_rotary(const struct dsc_nn_rotary *call, void *stream)
{
    const int64_t n_rows = call->n_batch * call->n_tokens * call->n_heads;
    const rotary_params params = {grid_of_elements(n_rows, call->head_dim - call->rotary_dim / 2), *call};

    if (n_rows == 0)
        return DSC_OK;
    DSC_TRY(check_pointer(call->x, "x"));
    return launch("nn_rotary", rotary_kernel, params.grid.n_blocks, params, stream);
}

}  // namespace dsc_cuda
