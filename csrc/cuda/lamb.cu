/*
 * LAMB (arXiv 1904.00962, algorithm 2): csrc/optim/lamb.c on a device. One pass updates the moments and leaves two sums
 * a block in scratch, a second adds them up by tensor in block order, a third applies.
 */
#include "cuda/step.cuh"

namespace dsc_cuda {

/* scratch: partials, then, for a whole step, the sums and the ratios of a group of tensors. */
constexpr int64_t GROUP_TENSORS = 1024;
static_assert(2 * MAX_PARTIALS + 3 * GROUP_TENSORS <= DSC_ACCEL_SCRATCH_ELEMS, "scratch holds it all");
constexpr int32_t NORMS_MAX_PIECES = 64;
constexpr int NORMS_CHUNK_ELEMS = 16 * N_THREADS;

struct update_scalars {
    float weight_decay, corrected_one, corrected_eps;

    __device__ float operator()(float p, float m, float v) const
    {
        return corrected_one * m / (sqrtf(v) + corrected_eps) + weight_decay * p;
    }
};

struct norms_piece {
    int64_t n_elems;
    const void *param;
    const void *grad;
    void *state[2];
};

struct norms_params {
    float grad_scale, one_minus_beta1, beta2, one_minus_beta2;
    update_scalars update;
    step_dtypes dtypes;
    double *partials;
    int32_t n_pieces;
    int32_t first_block[NORMS_MAX_PIECES];
    norms_piece pieces[NORMS_MAX_PIECES];
};

/* The norms are of the moments as stored, because apply reads these. */
__device__ inline void moments_and_squares(const norms_params &a, float p, float grad, float *m, float *v,
                                           double sums[2])
{
    const float g = grad * a.grad_scale;

    *m = *m + a.one_minus_beta1 * (g - *m);
    *v = *v * a.beta2 + a.one_minus_beta2 * g * g;
    sums[0] = add_square(sums[0], p);
    sums[1] = add_square(sums[1], a.update(p, rounded_to(a.dtypes.state, *m), rounded_to(a.dtypes.state, *v)));
}

__global__ void __launch_bounds__(N_THREADS) norms_kernel(const __grid_constant__ norms_params a)
{
    const int32_t block = (int32_t)blockIdx.x;
    const int32_t piece = dsc_cuda_piece_of(a.first_block, a.n_pieces, block);
    const int64_t begin = (int64_t)(block - a.first_block[piece]) * NORMS_CHUNK_ELEMS;
    const norms_piece &t = a.pieces[piece];
    const step_dtypes &d = a.dtypes;
    const int64_t left = t.n_elems - begin;
    const int64_t end = begin + (left < NORMS_CHUNK_ELEMS ? left : NORMS_CHUNK_ELEMS);
    const bool is_aligned = is_vec_aligned(d.param, t.param) && is_vec_aligned(d.grad, t.grad) &&
                            is_vec_aligned(d.state, t.state[0]) && is_vec_aligned(d.state, t.state[1]);
    const int64_t vec_end = is_aligned ? end - (end - begin) % VEC : begin;
    double sums[2] = {0.0, 0.0};

    for (int64_t i = begin + (int64_t)threadIdx.x * VEC; i < vec_end; i += N_THREADS * VEC) {
        const uint4 raw_p = load_vec(d.param, t.param, i);
        const uint4 raw_g = load_vec(d.grad, t.grad, i);
        const uint4 raw_m = load_vec(d.state, t.state[0], i);
        const uint4 raw_v = load_vec(d.state, t.state[1], i);
        float p[VEC], g[VEC], m[VEC], v[VEC];

        widen_vec(d.param, raw_p, p);
        widen_vec(d.grad, raw_g, g);
        widen_vec(d.state, raw_m, m);
        widen_vec(d.state, raw_v, v);
        for (int lane = 0; lane < VEC; lane++)
            moments_and_squares(a, p[lane], g[lane], &m[lane], &v[lane], sums);
        store_vec(d.state, t.state[0], i, m);
        store_vec(d.state, t.state[1], i, v);
    }
    for (int64_t i = vec_end + threadIdx.x; i < end; i += N_THREADS) {
        float m = load(d.state, t.state[0], i);
        float v = load(d.state, t.state[1], i);

        moments_and_squares(a, load(d.param, t.param, i), load(d.grad, t.grad, i), &m, &v, sums);
        store(d.state, t.state[0], i, m);
        store(d.state, t.state[1], i, v);
    }
    put_partial(a.partials, sums);
}

struct totals_params {
    const double *partials;
    double *out_sumsq;
    int32_t first_block[NORMS_MAX_PIECES + 1];
    int64_t tensor[NORMS_MAX_PIECES];
};

/* One block a piece; a tensor that takes several launches is added to in their order. */
__global__ void __launch_bounds__(N_THREADS) totals_kernel(const __grid_constant__ totals_params a)
{
    const int32_t piece = (int32_t)blockIdx.x;
    double sums[2];

    sum_partials(a.partials, a.first_block[piece], a.first_block[piece + 1], sums);
    if (threadIdx.x == 0) {
        double *out = &a.out_sumsq[2 * a.tensor[piece]];

        /* As on the host: one element that is not finite makes both sums NaN, so that no ratio is made of the rest. */
        if (sums[0] - sums[0] != 0.0 || sums[1] - sums[1] != 0.0)
            sums[0] = sums[1] = __longlong_as_double(0x7ff8000000000000ll);
        out[0] += sums[0];
        out[1] += sums[1];
    }
}

struct ratios_params {
    const double *sumsq;
    double *out_ratios;
    int32_t n_tensors;
    double min_coeff, max_coeff;
};

/* dsc_optim_trust_ratio. */
__global__ void __launch_bounds__(N_THREADS) ratios_kernel(const __grid_constant__ ratios_params a)
{
    for (int32_t i = (int32_t)threadIdx.x; i < a.n_tensors; i += N_THREADS) {
        const double param_sumsq = a.sumsq[2 * i], update_sumsq = a.sumsq[2 * i + 1];
        double ratio = 1.0;

        if (param_sumsq != 0.0 && update_sumsq != 0.0) {
            ratio = sqrt(param_sumsq) / sqrt(update_sumsq);
            ratio = ratio < a.min_coeff ? a.min_coeff : ratio;
            ratio = ratio > a.max_coeff ? a.max_coeff : ratio;
        }
        a.out_ratios[i] = ratio;
    }
}

struct apply_update {
    static constexpr int n_states = 2;
    static constexpr bool touches_param = true, reads_grad = false, reads_state = true, writes_state = false,
                          uses_ratio = true;

    float lr;
    update_scalars update;

    __device__ float operator()(float p, float, float *s, float ratio) const
    {
        const float step_size = lr * ratio;

        return p - step_size * update(p, s[0], s[1]);
    }
};

dsc_status lamb_norms(const struct dsc_optim_args *args, const struct dsc_optim_tensor *tensors, int64_t n_tensors,
                      double *out_sumsq, double *scratch, void *stream)
{
    const dsc_cuda_limits limits = {NORMS_CHUNK_ELEMS, NORMS_MAX_PIECES, MAX_PARTIALS};
    const scalars s = scalars_of(args);
    dsc_cuda_cursor cursor = {0, 0};
    dsc_cuda_piece pieces[NORMS_MAX_PIECES];
    norms_params norms;
    totals_params totals;
    int32_t n_blocks;

    if (n_tensors == 0)
        return DSC_OK;
    DSC_TRY(check_cuda(cudaMemsetAsync(out_sumsq, 0, (size_t)n_tensors * 2 * sizeof *out_sumsq, (cudaStream_t)stream),
                       "lamb norms"));
    norms.grad_scale = s.grad_scale;
    norms.one_minus_beta1 = s.one_minus_beta1;
    norms.beta2 = s.beta2;
    norms.one_minus_beta2 = s.one_minus_beta2;
    norms.update = {s.weight_decay, s.corrected_one, s.corrected_eps};
    norms.dtypes = {args->param_dtype, args->grad_dtype, args->state_dtype, args->copy_dtype};
    norms.partials = scratch;
    totals.partials = scratch;
    totals.out_sumsq = out_sumsq;
    for (;;) {
        norms.n_pieces = dsc_cuda_plan_next(&limits, n_tensors, size_of_tensor, tensors, &cursor, pieces, &n_blocks);
        if (norms.n_pieces == 0)
            return DSC_OK;
        for (int32_t i = 0; i < norms.n_pieces; i++) {
            const step_piece piece = step_piece_of(args, tensors, pieces[i]);

            norms.first_block[i] = totals.first_block[i] = pieces[i].first_block;
            norms.pieces[i] = {piece.n_elems, piece.param, piece.grad, {piece.state[0], piece.state[1]}};
            totals.tensor[i] = piece.tensor;
        }
        totals.first_block[norms.n_pieces] = n_blocks;
        DSC_TRY(launch("lamb norms", norms_kernel, n_blocks, norms, stream));
        DSC_TRY(launch("lamb totals", totals_kernel, norms.n_pieces, totals, stream));
    }
}

dsc_status lamb_apply(const struct dsc_optim_args *args, const struct dsc_optim_tensor *tensors, int64_t n_tensors,
                      const double *ratios, void *stream)
{
    const scalars s = scalars_of(args);
    const apply_update op = {s.lr, {s.weight_decay, s.corrected_one, s.corrected_eps}};

    return run_step("lamb", op, args, tensors, n_tensors, ratios, stream);
}

dsc_status lamb_step(const struct dsc_optim_args *args, const struct dsc_optim_tensor *tensors, int64_t n_tensors,
                     double *scratch, void *stream)
{
    double *sumsq = scratch + 2 * MAX_PARTIALS;
    double *ratios = sumsq + 2 * GROUP_TENSORS;

    for (int64_t first = 0; first < n_tensors; first += GROUP_TENSORS) {
        const int64_t n = n_tensors - first < GROUP_TENSORS ? n_tensors - first : GROUP_TENSORS;
        const ratios_params params = {sumsq, ratios, (int32_t)n, args->min_coeff, args->max_coeff};

        DSC_TRY(lamb_norms(args, &tensors[first], n, sumsq, scratch, stream));
        DSC_TRY(launch("lamb ratios", ratios_kernel, 1, params, stream));
        DSC_TRY(lamb_apply(args, &tensors[first], n, ratios, stream));
    }
    return DSC_OK;
}

}  // namespace dsc_cuda
