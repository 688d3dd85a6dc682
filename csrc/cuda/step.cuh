/*
 * The one kernel behind every elementwise optimizer: many tensors a launch, VEC elements a thread at a time, all
 * dtypes. An optimizer is an Op: its scalars, its operands, and the formula for one element.
 */
#ifndef DSC_CUDA_STEP_CUH
#define DSC_CUDA_STEP_CUH

#include "cuda/common.cuh"
#include "cuda/kinds.h"

namespace dsc_cuda {

constexpr int STEP_CHUNK_ELEMS = 16 * N_THREADS;
constexpr int STEP_MAX_PIECES = 64;

/* A tensor's run in this launch; pointers are to its first element. */
struct step_piece {
    int64_t n_elems;
    void *param;
    const void *grad;
    void *state[DSC_OPTIM_MAX_STATES];
    void *copy;
    int64_t tensor; /* index into ratios */
};

struct step_dtypes {
    int32_t param, grad, state, copy;
};

/*
 * Op has: n_states; touches_param (read and written; if false the result goes to the copy alone); reads_grad;
 * reads_state; writes_state; uses_ratio; and float operator()(float p, float g, float s[], float ratio) const, which
 * gives the new weight and leaves the new states in s.
 */
template <class Op>
struct step_params {
    Op op;
    step_dtypes dtypes;
    const double *ratios; /* where Op uses_ratio */
    int32_t n_pieces;
    int32_t first_block[STEP_MAX_PIECES];
    step_piece pieces[STEP_MAX_PIECES];
};

template <class Op>
__device__ inline bool is_step_aligned(const step_dtypes &d, const step_piece &t)
{
    bool is_aligned = t.copy == nullptr || is_vec_aligned(d.copy, t.copy);

    if (Op::touches_param)
        is_aligned = is_aligned && is_vec_aligned(d.param, t.param);
    if (Op::reads_grad)
        is_aligned = is_aligned && is_vec_aligned(d.grad, t.grad);
    for (int slot = 0; slot < Op::n_states; slot++)
        is_aligned = is_aligned && is_vec_aligned(d.state, t.state[slot]);
    return is_aligned;
}

/* Steps N elements from i on: VEC if the piece is aligned, otherwise 1. */
template <int N, class Op>
__device__ inline void step_elements(const Op &op, const step_dtypes &d, const step_piece &t, float ratio, int64_t i)
{
    constexpr int n_slots = Op::n_states > 0 ? Op::n_states : 1;
    float p[N] = {}, g[N] = {}, s[n_slots][N] = {};

    if constexpr (N == VEC) {
        uint4 raw_p = {}, raw_g = {}, raw_s[n_slots] = {};

        if (Op::touches_param)
            raw_p = load_vec(d.param, t.param, i);
        if (Op::reads_grad)
            raw_g = load_vec(d.grad, t.grad, i);
        for (int slot = 0; slot < Op::n_states && Op::reads_state; slot++)
            raw_s[slot] = load_vec(d.state, t.state[slot], i);
        widen_vec(d.param, raw_p, p);
        widen_vec(d.grad, raw_g, g);
        for (int slot = 0; slot < Op::n_states && Op::reads_state; slot++)
            widen_vec(d.state, raw_s[slot], s[slot]);
    } else {
        if (Op::touches_param)
            p[0] = load(d.param, t.param, i);
        if (Op::reads_grad)
            g[0] = load(d.grad, t.grad, i);
        for (int slot = 0; slot < Op::n_states && Op::reads_state; slot++)
            s[slot][0] = load(d.state, t.state[slot], i);
    }

    for (int lane = 0; lane < N; lane++) {
        float states[n_slots];

        for (int slot = 0; slot < n_slots; slot++)
            states[slot] = s[slot][lane];
        p[lane] = op(p[lane], g[lane], states, ratio);
        for (int slot = 0; slot < n_slots; slot++)
            s[slot][lane] = states[slot];
    }

    /* The copy is of the weights as they were stored. */
    float c[N];

    for (int lane = 0; lane < N; lane++)
        c[lane] = Op::touches_param ? rounded_to(d.param, p[lane]) : p[lane];
    if constexpr (N == VEC) {
        for (int slot = 0; slot < Op::n_states && Op::writes_state; slot++)
            store_vec(d.state, t.state[slot], i, s[slot]);
        if (Op::touches_param)
            store_vec(d.param, t.param, i, p);
        if (t.copy != nullptr)
            store_vec(d.copy, t.copy, i, c);
    } else {
        for (int slot = 0; slot < Op::n_states && Op::writes_state; slot++)
            store(d.state, t.state[slot], i, s[slot][0]);
        if (Op::touches_param)
            store(d.param, t.param, i, p[0]);
        if (t.copy != nullptr)
            store(d.copy, t.copy, i, c[0]);
    }
}

/* P, G, S, C are the dtypes of parameters, gradients, states and copies, or ANY_DTYPE. */
template <class Op, int P, int G, int S, int C>
__global__ void __launch_bounds__(N_THREADS) step_kernel(const __grid_constant__ step_params<Op> a)
{
    const int32_t block = (int32_t)blockIdx.x;
    const int32_t piece = dsc_cuda_piece_of(a.first_block, a.n_pieces, block);
    const int64_t begin = (int64_t)(block - a.first_block[piece]) * STEP_CHUNK_ELEMS;
    const step_piece &t = a.pieces[piece];
    const int64_t left = t.n_elems - begin;
    const int64_t end = begin + (left < STEP_CHUNK_ELEMS ? left : STEP_CHUNK_ELEMS);
    const float ratio = Op::uses_ratio ? (float)a.ratios[t.tensor] : 1.0f;
    const step_dtypes d = {
        P == ANY_DTYPE ? a.dtypes.param : P,
        G == ANY_DTYPE ? a.dtypes.grad : G,
        S == ANY_DTYPE ? a.dtypes.state : S,
        C == ANY_DTYPE ? a.dtypes.copy : C,
    };
    /* begin is a multiple of VEC, so that the piece's alignment is the chunk's. */
    const int64_t vec_end = is_step_aligned<Op>(d, t) ? end - (end - begin) % VEC : begin;

    for (int64_t i = begin + (int64_t)threadIdx.x * VEC; i < vec_end; i += N_THREADS * VEC)
        step_elements<VEC>(a.op, d, t, ratio, i);
    for (int64_t i = vec_end + threadIdx.x; i < end; i += N_THREADS)
        step_elements<1>(a.op, d, t, ratio, i);
}

/*
 * The dtypes that training mostly has get a kernel of their own: f32 throughout, and f32 masters with bf16 gradients
 * and copies.
 */
template <class Op>
void (*choose_step_kernel(const struct dsc_optim_args *args, bool has_copies))(step_params<Op>)
{
    const bool is_f32 = (!Op::touches_param || args->param_dtype == DSC_DTYPE_F32) &&
                        (Op::n_states == 0 || args->state_dtype == DSC_DTYPE_F32);
    const auto is = [](bool is_used, dsc_dtype dtype, dsc_dtype wanted) { return !is_used || dtype == wanted; };

    if (is_f32 && is(Op::reads_grad, args->grad_dtype, DSC_DTYPE_F32) &&
        is(has_copies, args->copy_dtype, DSC_DTYPE_F32))
        return step_kernel<Op, DSC_DTYPE_F32, DSC_DTYPE_F32, DSC_DTYPE_F32, DSC_DTYPE_F32>;
    if (is_f32 && is(Op::reads_grad, args->grad_dtype, DSC_DTYPE_BF16) &&
        is(has_copies, args->copy_dtype, DSC_DTYPE_BF16))
        return step_kernel<Op, DSC_DTYPE_F32, DSC_DTYPE_BF16, DSC_DTYPE_F32, DSC_DTYPE_BF16>;
    return step_kernel<Op, ANY_DTYPE, ANY_DTYPE, ANY_DTYPE, ANY_DTYPE>;
}

inline step_piece step_piece_of(const struct dsc_optim_args *args, const struct dsc_optim_tensor *tensors,
                                const dsc_cuda_piece &piece)
{
    const struct dsc_optim_tensor &t = tensors[piece.tensor];
    step_piece out;

    out.n_elems = piece.n_elems;
    out.param = at(t.param, args->param_dtype, piece.begin_elems);
    out.grad = at(t.grad, args->grad_dtype, piece.begin_elems);
    for (int slot = 0; slot < DSC_OPTIM_MAX_STATES; slot++)
        out.state[slot] = at(t.state[slot], args->state_dtype, piece.begin_elems);
    out.copy = at(t.copy, args->copy_dtype, piece.begin_elems);
    out.tensor = piece.tensor;
    return out;
}

/* Enqueues op over checked tensors. */
template <class Op>
dsc_status run_step(const char *what, const Op &op, const struct dsc_optim_args *args,
                    const struct dsc_optim_tensor *tensors, int64_t n_tensors, const double *ratios, void *stream)
{
    const dsc_cuda_limits limits = {STEP_CHUNK_ELEMS, STEP_MAX_PIECES, MAX_BLOCKS};
    dsc_cuda_cursor cursor = {0, 0};
    dsc_cuda_piece pieces[STEP_MAX_PIECES];
    int32_t n_blocks;

    for (;;) {
        step_params<Op> params;
        bool has_copies = false;

        params.n_pieces = dsc_cuda_plan_next(&limits, n_tensors, size_of_tensor, tensors, &cursor, pieces, &n_blocks);
        if (params.n_pieces == 0)
            return DSC_OK;
        params.op = op;
        params.dtypes = {args->param_dtype, args->grad_dtype, args->state_dtype, args->copy_dtype};
        params.ratios = ratios;
        for (int32_t i = 0; i < params.n_pieces; i++) {
            params.first_block[i] = pieces[i].first_block;
            params.pieces[i] = step_piece_of(args, tensors, pieces[i]);
            has_copies = has_copies || params.pieces[i].copy != nullptr;
        }
        DSC_TRY(launch(what, choose_step_kernel<Op>(args, has_copies), n_blocks, params, stream));
    }
}

}  // namespace dsc_cuda

#endif
