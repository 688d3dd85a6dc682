/*
 * Rows of tokens on the way to experts and back, and their gradients: csrc/moe/rows.c on a device. One block a row.
 *
 * Wrong contents of order and inverse show as NaN, as dsc/accel.h says. Nothing here adds atomically, so results have
 * the same bits in every run.
 */
#include "cuda/kinds.h"
#include "cuda/nn_rows.cuh"

namespace dsc_cuda {

/* Values of scratch in the gradient of combine beside slots. */
constexpr int64_t NO_SLOT = -1;
constexpr int64_t SHARED_ROW = -2;

__device__ inline float nan_value()
{
    return __uint_as_float(0x7fc00000u);
}

/* Whether all rows of all operands begin where VEC elements can be loaded at once. */
__device__ inline bool has_vec_rows(int dtype, int64_t n_cols, const void *a, const void *b, const void *c)
{
    return n_cols % VEC == 0 && is_vec_aligned(dtype, a) && is_vec_aligned(dtype, b) && is_vec_aligned(dtype, c);
}

/* Fills a row that lies at element `begin`, by all threads of a block. */
__device__ inline void fill_row(int dtype, void *data, int64_t begin, int64_t n_cols, float value)
{
    for (int64_t c = threadIdx.x; c < n_cols; c += N_THREADS)
        store(dtype, data, begin + c, value);
}

/* Copies by all threads of a block, in words of 16 bytes where both ends are aligned to them. */
__device__ inline void copy_row(const char *from, char *to, int64_t n_bytes)
{
    if (((uintptr_t)from | (uintptr_t)to | (uintptr_t)n_bytes) % sizeof(uint4) == 0) {
        for (int64_t i = threadIdx.x; i < n_bytes / (int64_t)sizeof(uint4); i += N_THREADS)
            ((uint4 *)to)[i] = ((const uint4 *)from)[i];
        return;
    }
    for (int64_t i = threadIdx.x; i < n_bytes / (int64_t)sizeof(uint16_t); i += N_THREADS)
        ((uint16_t *)to)[i] = ((const uint16_t *)from)[i];
}

struct gather_params {
    row_grid grid;
    struct dsc_moe_gather call;
};

__global__ void __launch_bounds__(N_THREADS) gather_kernel(const __grid_constant__ gather_params a)
{
    const struct dsc_moe_gather &call = a.call;
    const int64_t n_cols = a.grid.n_cols;

    for (int64_t row = blockIdx.x; row < a.grid.n_rows; row += a.grid.n_blocks) {
        const int64_t slot = call.order[row];
        const bool exists = slot >= 0 && slot < call.n_tokens * call.k;

        if (exists && (call.inverse == nullptr || call.inverse[slot] == row))
            copy_row(at(call.x, call.dtype, slot / call.k * n_cols), at(call.rows, call.dtype, row * n_cols),
                     n_cols * bytes_of(call.dtype));
        else
            fill_row(call.dtype, call.rows, row * n_cols, n_cols, nan_value());
    }
}

dsc_status moe_gather(const struct dsc_moe_gather *call, void *stream)
{
    const gather_params params = {grid_of_rows(call->n_slots, call->n_cols), *call};

    if (call->n_slots == 0)
        return DSC_OK;
    DSC_TRY(check_pointer(call->rows, "rows"));
    return launch("moe_gather", gather_kernel, params.grid.n_blocks, params, stream);
}

struct combine_params {
    row_grid grid;
    struct dsc_moe_combine call;

    /* Adds choice j of the token to `totals`, the sums of n elements from column on; n is a constant. */
    template <int n>
    __device__ void add(int64_t token, int64_t j, int64_t column, bool *is_first, float totals[VEC]) const
    {
        const int64_t place = call.inverse[token * call.k + j];
        const float weight = call.weights == nullptr ? 1.0f : call.weights[token * call.k + j];
        float x[VEC];

        if (place == -1)
            return;
        if (place < 0 || place >= call.n_slots) {
            for (int i = 0; i < n; i++)
                x[i] = nan_value();
        } else if (n == VEC) {
            widen_vec(call.dtype, load_vec(call.dtype, call.rows, place * grid.n_cols + column), x);
        } else {
            x[0] = load(call.dtype, call.rows, place * grid.n_cols + column);
        }
        for (int i = 0; i < n; i++)
            totals[i] = *is_first ? weight * x[i] : totals[i] + weight * x[i]; /* 0 + -0 would be 0 */
        *is_first = false;
    }
};

__global__ void __launch_bounds__(N_THREADS) combine_kernel(const __grid_constant__ combine_params a)
{
    const struct dsc_moe_combine &call = a.call;
    const int64_t n_cols = a.grid.n_cols;
    const bool is_wide = has_vec_rows(call.dtype, n_cols, call.rows, call.out, nullptr);
    const int step = is_wide ? VEC : 1;

    for (int64_t token = blockIdx.x; token < a.grid.n_rows; token += a.grid.n_blocks)
        for (int64_t c = step * (int64_t)threadIdx.x; c < n_cols; c += step * N_THREADS) {
            float totals[VEC] = {0.0f, 0.0f, 0.0f, 0.0f};
            bool is_first = true;

            for (int64_t j = 0; j < call.k; j++) {
                if (is_wide)
                    a.add<VEC>(token, j, c, &is_first, totals);
                else
                    a.add<1>(token, j, c, &is_first, totals);
            }
            if (is_wide)
                store_vec(call.dtype, call.out, token * n_cols + c, totals);
            else
                store(call.dtype, call.out, token * n_cols + c, totals[0]);
        }
}

dsc_status moe_combine(const struct dsc_moe_combine *call, void *stream)
{
    const combine_params params = {grid_of_rows(call->n_tokens, call->n_cols), *call};

    if (call->n_tokens == 0)
        return DSC_OK;
    DSC_TRY(check_pointer(call->out, "out"));
    return launch("moe_combine", combine_kernel, params.grid.n_blocks, params, stream);
}

struct combine_grad_params {
    row_grid grid;
    struct dsc_moe_combine_grad call;

    __device__ int64_t n_slots() const { return call.n_tokens * call.k; } /* of tokens, with and without a row */
    __device__ bool has_row(int64_t place) const { return place >= 0 && place < call.n_slots; }
};

/*
 * scratch[row] becomes the row's slot, in three launches: none, then any of its slots, then SHARED_ROW if another slot
 * has the row too. In the last, all who write a number write the same.
 */
__global__ void __launch_bounds__(N_THREADS) clear_slots_kernel(const __grid_constant__ combine_grad_params a)
{
    each_element(a.grid, [&](int64_t row) { a.call.scratch[row] = NO_SLOT; });
}

__global__ void __launch_bounds__(N_THREADS) mark_slots_kernel(const __grid_constant__ combine_grad_params a)
{
    each_element(a.grid, [&](int64_t slot) {
        const int64_t place = a.call.inverse[slot];

        if (a.has_row(place))
            a.call.scratch[place] = slot;
    });
}

/* Writes all dweights: 0, or NaN. combine_grad_kernel overwrites dweights of slots that are alone with their row. */
__global__ void __launch_bounds__(N_THREADS) compare_slots_kernel(const __grid_constant__ combine_grad_params a)
{
    each_element(a.grid, [&](int64_t slot) {
        const int64_t place = a.call.inverse[slot];

        if (a.has_row(place) && a.call.scratch[place] != slot)
            a.call.scratch[place] = SHARED_ROW;
        if (a.call.dweights != nullptr)
            a.call.dweights[slot] = place == -1 ? 0.0f : nan_value();
    });
}

__global__ void __launch_bounds__(N_THREADS) combine_grad_kernel(const __grid_constant__ combine_grad_params a)
{
    const struct dsc_moe_combine_grad &call = a.call;
    const int64_t n_cols = a.grid.n_cols;
    const bool is_wide = has_vec_rows(call.dtype, n_cols, call.dout, call.rows, call.drows);
    const int step = is_wide ? VEC : 1;

    for (int64_t row = blockIdx.x; row < a.grid.n_rows; row += a.grid.n_blocks) {
        const int64_t slot = call.scratch[row];

        if (slot < 0) {
            fill_row(call.dtype, call.drows, row * n_cols, n_cols, slot == NO_SLOT ? 0.0f : nan_value());
            continue; /* for all threads of the block */
        }
        const int64_t dout_begin = slot / call.k * n_cols;
        const float weight = call.weights == nullptr ? 1.0f : call.weights[slot];
        double sums[2] = {0.0, 0.0};

        for (int64_t c = step * (int64_t)threadIdx.x; c < n_cols; c += step * N_THREADS) {
            float dout[VEC], x[VEC] = {0.0f, 0.0f, 0.0f, 0.0f}, drow[VEC];

            if (is_wide) {
                widen_vec(call.dtype, load_vec(call.dtype, call.dout, dout_begin + c), dout);
                if (call.dweights != nullptr)
                    widen_vec(call.dtype, load_vec(call.dtype, call.rows, row * n_cols + c), x);
            } else {
                dout[0] = load(call.dtype, call.dout, dout_begin + c);
                if (call.dweights != nullptr)
                    x[0] = load(call.dtype, call.rows, row * n_cols + c);
            }
            for (int i = 0; i < step; i++) {
                sums[0] += (double)dout[i] * (double)x[i];
                drow[i] = weight * dout[i];
            }
            if (is_wide)
                store_vec(call.dtype, call.drows, row * n_cols + c, drow);
            else
                store(call.dtype, call.drows, row * n_cols + c, drow[0]);
        }
        if (call.dweights == nullptr)
            continue;
        share_sums(sums);
        if (threadIdx.x == 0)
            call.dweights[slot] = (float)sums[0];
    }
}

dsc_status moe_combine_grad(const struct dsc_moe_combine_grad *call, void *stream)
{
    const int64_t n_slots = call->n_tokens * call->k;
    combine_grad_params of_rows = {grid_of_elements(call->n_slots, 1), *call};
    combine_grad_params of_slots = {grid_of_elements(n_slots, 1), *call};
    combine_grad_params params = {grid_of_rows(call->n_slots, call->n_cols), *call};

    if (call->n_slots > 0) {
        DSC_TRY(check_pointer(call->drows, "drows"));
        DSC_TRY(launch("moe_combine_grad", clear_slots_kernel, of_rows.grid.n_blocks, of_rows, stream));
    }
    if (n_slots > 0) {
        DSC_TRY(check_pointer(call->inverse, "inverse"));
        DSC_TRY(launch("moe_combine_grad", mark_slots_kernel, of_slots.grid.n_blocks, of_slots, stream));
        DSC_TRY(launch("moe_combine_grad", compare_slots_kernel, of_slots.grid.n_blocks, of_slots, stream));
    }
    if (call->n_slots == 0)
        return DSC_OK;
    return launch("moe_combine_grad", combine_grad_kernel, params.grid.n_blocks, params, stream);
}

struct invert_params {
    row_grid grid;
    const int64_t *order;
    int64_t *inverse;
};

__global__ void __launch_bounds__(N_THREADS) clear_inverse_kernel(const __grid_constant__ invert_params a)
{
    each_element(a.grid, [&](int64_t i) { a.inverse[i] = -1; });
}

__global__ void __launch_bounds__(N_THREADS) invert_kernel(const __grid_constant__ invert_params a)
{
    each_element(a.grid, [&](int64_t i) {
        if (a.order[i] >= 0 && a.order[i] < a.grid.n_rows)
            a.inverse[a.order[i]] = i;
    });
}

dsc_status moe_invert(const int64_t *order, int64_t n, int64_t *out_inverse, void *stream)
{
    const invert_params params = {grid_of_elements(n, 1), order, out_inverse};

    if (n == 0)
        return DSC_OK;
    DSC_TRY(check_pointer(order, "order"));
    DSC_TRY(launch("moe_invert", clear_inverse_kernel, params.grid.n_blocks, params, stream));
    return launch("moe_invert", invert_kernel, params.grid.n_blocks, params, stream);
}

}  // namespace dsc_cuda
