/* Adds up the pieces of ranks: dsc_flat_reduce on a device, with the sum of squares of the result on the way. */
#include "cuda/common.cuh"
#include "cuda/kinds.h"
#include "cuda/total.cuh"

namespace dsc_cuda {

constexpr int REDUCE_CHUNK_ELEMS = 16 * N_THREADS;
/* The most sources of one call that fit a kernel's parameters. They are summed before rounding once, so a call is one
 * kernel.
 */
constexpr int64_t REDUCE_MAX_SRCS = 480;

struct reduce_params {
    void *acc;
    int64_t n_elems;
    double *partials; /* NULL: no statistics */
    float scale;
    int32_t is_accumulating;
    int32_t src_dtype, acc_dtype;
    int32_t n_srcs;
    const void *srcs[REDUCE_MAX_SRCS];
};

__device__ inline float finish(const reduce_params &a, float sum, float before)
{
    const float scaled = a.scale == 1.0f ? sum : sum * a.scale;

    return a.is_accumulating ? scaled + before : scaled;
}

__device__ inline bool is_reduce_aligned(const reduce_params &a)
{
    bool is_aligned = is_vec_aligned(a.acc_dtype, a.acc);

    for (int32_t i = 0; i < a.n_srcs; i++)
        is_aligned = is_aligned && is_vec_aligned(a.src_dtype, a.srcs[i]);
    return is_aligned;
}

/* A thread has read all sources at its elements before it writes there: acc may be a source. */
template <int SRC_DTYPE>
__device__ inline void reduce_run(const reduce_params &a, int64_t begin, int64_t end, double sums[2])
{
    const int64_t vec_end = is_reduce_aligned(a) ? end - (end - begin) % VEC : begin;

    for (int64_t i = begin + (int64_t)threadIdx.x * VEC; i < vec_end; i += N_THREADS * VEC) {
        float sum[VEC], term[VEC], before[VEC] = {};

        widen_vec(SRC_DTYPE, load_vec(SRC_DTYPE, a.srcs[0], i), sum);
        for (int32_t src = 1; src < a.n_srcs; src++) {
            widen_vec(SRC_DTYPE, load_vec(SRC_DTYPE, a.srcs[src], i), term);
            for (int lane = 0; lane < VEC; lane++)
                sum[lane] += term[lane];
        }
        if (a.is_accumulating)
            widen_vec(a.acc_dtype, load_vec(a.acc_dtype, a.acc, i), before);
        for (int lane = 0; lane < VEC; lane++) {
            sum[lane] = finish(a, sum[lane], before[lane]);
            add_finite_square(sums, rounded_to(a.acc_dtype, sum[lane]));
        }
        store_vec(a.acc_dtype, a.acc, i, sum);
    }
    for (int64_t i = vec_end + threadIdx.x; i < end; i += N_THREADS) {
        float sum = load(SRC_DTYPE, a.srcs[0], i);

        for (int32_t src = 1; src < a.n_srcs; src++)
            sum += load(SRC_DTYPE, a.srcs[src], i);
        sum = finish(a, sum, a.is_accumulating ? load(a.acc_dtype, a.acc, i) : 0.0f);
        add_finite_square(sums, rounded_to(a.acc_dtype, sum));
        store(a.acc_dtype, a.acc, i, sum);
    }
}

__global__ void __launch_bounds__(N_THREADS) reduce_kernel(const __grid_constant__ reduce_params a)
{
    const int64_t begin = (int64_t)blockIdx.x * REDUCE_CHUNK_ELEMS;
    const int64_t left = a.n_elems - begin;
    const int64_t end = begin + (left < REDUCE_CHUNK_ELEMS ? left : REDUCE_CHUNK_ELEMS);
    double sums[2] = {0.0, 0.0};

    if (a.src_dtype == DSC_DTYPE_F32)
        reduce_run<DSC_DTYPE_F32>(a, begin, end, sums);
    else if (a.src_dtype == DSC_DTYPE_BF16)
        reduce_run<DSC_DTYPE_BF16>(a, begin, end, sums);
    else
        reduce_run<DSC_DTYPE_F16>(a, begin, end, sums);
    if (a.partials != nullptr)
        put_partial(a.partials, sums);
}

static dsc_status check_reduce(const struct dsc_span *srcs, int64_t n_srcs, const struct dsc_span *acc)
{
    for (int64_t i = 0; i < n_srcs; i++) {
        if (srcs[i].n_elems != acc->n_elems)
            return fail(DSC_EINVAL, "srcs[%lld] has %lld elements, acc has %lld", (long long)i,
                        (long long)srcs[i].n_elems, (long long)acc->n_elems);
        if (srcs[i].dtype != srcs[0].dtype)
            return fail(DSC_EINVAL, "srcs[%lld].dtype is %d, srcs[0].dtype is %d; sources share one dtype",
                        (long long)i, (int)srcs[i].dtype, (int)srcs[0].dtype);
    }
    if (n_srcs > REDUCE_MAX_SRCS)
        return fail(DSC_ENOTSUP, "flat_reduce: %lld sources, at most %lld on a CUDA device", (long long)n_srcs,
                    (long long)REDUCE_MAX_SRCS);
    return DSC_OK;
}

dsc_status flat_reduce(const struct dsc_span *srcs, int64_t n_srcs, float scale, bool accumulate,
                       const struct dsc_span *acc, double *out, double *scratch, void *stream)
{
    const dsc_cuda_limits limits = {REDUCE_CHUNK_ELEMS, 1, out == nullptr ? MAX_BLOCKS : MAX_PARTIALS};
    dsc_cuda_cursor cursor = {0, 0};
    dsc_cuda_piece piece;
    reduce_params params;
    int32_t n_blocks;

    DSC_TRY(check_reduce(srcs, n_srcs, acc));
    params.partials = out == nullptr ? nullptr : scratch;
    params.scale = scale;
    params.is_accumulating = accumulate;
    params.src_dtype = srcs[0].dtype;
    params.acc_dtype = acc->dtype;
    params.n_srcs = (int32_t)n_srcs;
    while (dsc_cuda_plan_next(&limits, 1, size_of_span, acc, &cursor, &piece, &n_blocks) > 0) {
        params.n_elems = piece.n_elems;
        params.acc = at(acc->data, acc->dtype, piece.begin_elems);
        for (int64_t i = 0; i < n_srcs; i++)
            params.srcs[i] = at(srcs[i].data, srcs[i].dtype, piece.begin_elems);
        DSC_TRY(launch("flat_reduce", reduce_kernel, n_blocks, params, stream));
        if (out != nullptr)
            DSC_TRY(add_total(scratch, n_blocks, out, stream));
    }
    return DSC_OK;
}

}  // namespace dsc_cuda
