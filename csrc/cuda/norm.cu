/*
 * Sum of squares and finite check over many buffers: csrc/cpu/norm.c on a device. Two kernels a launch: partial sums,
 * then their total in block order.
 */
#include "cuda/common.cuh"
#include "cuda/kinds.h"
#include "cuda/total.cuh"

namespace dsc_cuda {

constexpr int SUMSQ_CHUNK_ELEMS = 64 * N_THREADS;
constexpr int32_t SUMSQ_MAX_PIECES = 160;

struct sumsq_params {
    double *partials;
    int32_t n_pieces;
    int32_t first_block[SUMSQ_MAX_PIECES];
    uint8_t dtype[SUMSQ_MAX_PIECES];
    int64_t n_elems[SUMSQ_MAX_PIECES];
    const void *data[SUMSQ_MAX_PIECES];
};

/* Sixteen bytes a thread at a time. */
template <int DTYPE>
__device__ inline void sum_run(const void *data, int64_t begin, int64_t end, double sums[2])
{
    constexpr int n_lanes = 16 / bytes_of(DTYPE);
    const bool is_aligned = (uintptr_t)data % 16 == 0; /* begin is a multiple of n_lanes */
    const int64_t vec_end = is_aligned ? end - (end - begin) % n_lanes : begin;

    for (int64_t i = begin + (int64_t)threadIdx.x * n_lanes; i < vec_end; i += N_THREADS * n_lanes) {
        const uint4 raw = ((const uint4 *)data)[i / n_lanes];
        const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};

        for (int word = 0; word < 4; word++) {
            if (DTYPE == DSC_DTYPE_F32) {
                add_finite_square(sums, __uint_as_float(words[word]));
            } else {
                add_finite_square(sums, widen(DTYPE, words[word] & 0xffffu));
                add_finite_square(sums, widen(DTYPE, words[word] >> 16));
            }
        }
    }
    for (int64_t i = vec_end + threadIdx.x; i < end; i += N_THREADS)
        add_finite_square(sums, load(DTYPE, data, i));
}

__global__ void __launch_bounds__(N_THREADS) sumsq_kernel(const __grid_constant__ sumsq_params a)
{
    const int32_t block = (int32_t)blockIdx.x;
    const int32_t piece = dsc_cuda_piece_of(a.first_block, a.n_pieces, block);
    const int64_t begin = (int64_t)(block - a.first_block[piece]) * SUMSQ_CHUNK_ELEMS;
    const int64_t left = a.n_elems[piece] - begin;
    const int64_t end = begin + (left < SUMSQ_CHUNK_ELEMS ? left : SUMSQ_CHUNK_ELEMS);
    double sums[2] = {0.0, 0.0};

    if (a.dtype[piece] == DSC_DTYPE_F32)
        sum_run<DSC_DTYPE_F32>(a.data[piece], begin, end, sums);
    else if (a.dtype[piece] == DSC_DTYPE_BF16)
        sum_run<DSC_DTYPE_BF16>(a.data[piece], begin, end, sums);
    else
        sum_run<DSC_DTYPE_F16>(a.data[piece], begin, end, sums);
    put_partial(a.partials, sums);
}

dsc_status flat_sumsq(const struct dsc_span *spans, int64_t n_spans, double *out, double *scratch, void *stream)
{
    const dsc_cuda_limits limits = {SUMSQ_CHUNK_ELEMS, SUMSQ_MAX_PIECES, MAX_PARTIALS};
    dsc_cuda_cursor cursor = {0, 0};
    dsc_cuda_piece pieces[SUMSQ_MAX_PIECES];
    sumsq_params params;
    int32_t n_blocks;

    params.partials = scratch;
    for (;;) {
        params.n_pieces = dsc_cuda_plan_next(&limits, n_spans, size_of_span, spans, &cursor, pieces, &n_blocks);
        if (params.n_pieces == 0)
            return DSC_OK;
        for (int32_t i = 0; i < params.n_pieces; i++) {
            const struct dsc_span &span = spans[pieces[i].tensor];

            params.first_block[i] = pieces[i].first_block;
            params.dtype[i] = (uint8_t)span.dtype;
            params.n_elems[i] = pieces[i].n_elems;
            params.data[i] = at(span.data, span.dtype, pieces[i].begin_elems);
        }
        DSC_TRY(launch("flat_sumsq", sumsq_kernel, n_blocks, params, stream));
        DSC_TRY(add_total(scratch, n_blocks, out, stream));
    }
}

}  // namespace dsc_cuda
