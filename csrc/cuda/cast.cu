/* Scaling in place, and conversion between dtypes: dsc_flat_scale and dsc_flat_cast on a device. */
#include "cuda/common.cuh"
#include "cuda/kinds.h"

namespace dsc_cuda {

constexpr int CAST_CHUNK_ELEMS = 16 * N_THREADS;
constexpr int32_t CAST_MAX_PIECES = 112;

struct cast_params {
    float scale; /* 1 for a cast */
    int32_t n_pieces;
    int32_t first_block[CAST_MAX_PIECES];
    uint8_t src_dtype[CAST_MAX_PIECES];
    uint8_t dst_dtype[CAST_MAX_PIECES];
    int64_t n_elems[CAST_MAX_PIECES];
    const void *src[CAST_MAX_PIECES];
    void *dst[CAST_MAX_PIECES]; /* may be src */
};

/* dst = src * scale, rounded once. */
template <int SRC, int DST, bool IS_SCALED>
__device__ inline void cast_run(const cast_params &a, int32_t piece, int64_t begin, int64_t end)
{
    const void *src = a.src[piece];
    void *dst = a.dst[piece];
    const bool is_aligned = is_vec_aligned(SRC, src) && is_vec_aligned(DST, dst);
    const int64_t vec_end = is_aligned ? end - (end - begin) % VEC : begin;

    for (int64_t i = begin + (int64_t)threadIdx.x * VEC; i < vec_end; i += N_THREADS * VEC) {
        float x[VEC];

        widen_vec(SRC, load_vec(SRC, src, i), x);
        for (int lane = 0; lane < VEC && IS_SCALED; lane++)
            x[lane] *= a.scale;
        store_vec(DST, dst, i, x);
    }
    for (int64_t i = vec_end + threadIdx.x; i < end; i += N_THREADS) {
        const float x = load(SRC, src, i);

        store(DST, dst, i, IS_SCALED ? x * a.scale : x);
    }
}

template <bool IS_SCALED>
__global__ void __launch_bounds__(N_THREADS) cast_kernel(const __grid_constant__ cast_params a)
{
    const int32_t block = (int32_t)blockIdx.x;
    const int32_t piece = dsc_cuda_piece_of(a.first_block, a.n_pieces, block);
    const int64_t begin = (int64_t)(block - a.first_block[piece]) * CAST_CHUNK_ELEMS;
    const int64_t left = a.n_elems[piece] - begin;
    const int64_t end = begin + (left < CAST_CHUNK_ELEMS ? left : CAST_CHUNK_ELEMS);
    const int src = a.src_dtype[piece], dst = a.dst_dtype[piece];

#define RUN_IF(from, to)                                  \
    if (src == DSC_DTYPE_##from && dst == DSC_DTYPE_##to) \
    cast_run<DSC_DTYPE_##from, DSC_DTYPE_##to, IS_SCALED>(a, piece, begin, end)
    if constexpr (IS_SCALED) { /* in place */
        RUN_IF(F32, F32);
        RUN_IF(BF16, BF16);
        RUN_IF(F16, F16);
    } else { /* equal dtypes are copied as bytes */
        RUN_IF(F32, BF16);
        RUN_IF(F32, F16);
        RUN_IF(BF16, F32);
        RUN_IF(BF16, F16);
        RUN_IF(F16, F32);
        RUN_IF(F16, BF16);
    }
#undef RUN_IF
}

/* dsts may be srcs. Only the lengths of srcs are read. */
template <bool IS_SCALED>
static dsc_status run_cast(const char *what, const struct dsc_span *srcs, const struct dsc_span *dsts, int64_t n_spans,
                           float scale, void *stream)
{
    const dsc_cuda_limits limits = {CAST_CHUNK_ELEMS, CAST_MAX_PIECES, MAX_BLOCKS};
    dsc_cuda_cursor cursor = {0, 0};
    dsc_cuda_piece pieces[CAST_MAX_PIECES];
    cast_params params;
    int32_t n_blocks;

    params.scale = scale;
    for (;;) {
        params.n_pieces = dsc_cuda_plan_next(&limits, n_spans, size_of_span, srcs, &cursor, pieces, &n_blocks);
        if (params.n_pieces == 0)
            return DSC_OK;
        for (int32_t i = 0; i < params.n_pieces; i++) {
            const struct dsc_span &src = srcs[pieces[i].tensor], &dst = dsts[pieces[i].tensor];

            params.first_block[i] = pieces[i].first_block;
            params.src_dtype[i] = (uint8_t)src.dtype;
            params.dst_dtype[i] = (uint8_t)dst.dtype;
            params.n_elems[i] = pieces[i].n_elems;
            params.src[i] = at(src.data, src.dtype, pieces[i].begin_elems);
            params.dst[i] = at(dst.data, dst.dtype, pieces[i].begin_elems);
        }
        DSC_TRY(launch(what, cast_kernel<IS_SCALED>, n_blocks, params, stream));
    }
}

dsc_status flat_scale(const struct dsc_span *spans, int64_t n_spans, float scale, void *stream)
{
    return run_cast<true>("flat_scale", spans, spans, n_spans, scale, stream);
}

dsc_status flat_cast(const struct dsc_span *src, const struct dsc_span *dst, void *stream)
{
    if (src->dtype == dst->dtype && src->n_elems > 0)
        return check_cuda(cudaMemcpyAsync(dst->data, src->data, (size_t)src->n_elems * (size_t)bytes_of(src->dtype),
                                          cudaMemcpyDeviceToDevice, (cudaStream_t)stream),
                          "flat_cast");
    return run_cast<false>("flat_cast", src, dst, 1, 1.0f, stream);
}

}  // namespace dsc_cuda
