/*
 * Quantization by groups: csrc/quant on a device. The threads of a block are dealt out in teams, one to a group, or one
 * to a piece of a group where groups are few and large. A thread takes VEC columns at a time, from a multiple of VEC of
 * its piece on, so that no two threads write to a byte of codes.
 */
#include "cuda/kinds.h"
#include "cuda/nn_rows.cuh"
#include "cuda/philox.cuh"
#include "cuda/quant_math.cuh"

namespace dsc_cuda {

/* A group is cut where its pieces are not smaller than this. */
constexpr int64_t PIECE_ELEMS = 64 * N_THREADS;

static const struct dsc_quant_numbers quant_formats[] = {
#define DSC_QUANT(name, code_bits, lowest, largest, span, exponent, mantissa_bits, least_exponent) \
    {lowest, largest, span, code_bits, exponent, mantissa_bits, least_exponent},
#include "dsc/quant_formats.inc"
#undef DSC_QUANT
};

enum quant_step {
    QUANT_RANGES, /* of pieces, to scratch */
    QUANT_SCALES, /* of groups, and nothing else */
    QUANT_FAKE,
    QUANT_CODE,
    QUANT_DECODE,
};

struct quant_params {
    int32_t n_blocks;
    int32_t team; /* threads of a piece: a power of two */
    int64_t n_pieces;
    int64_t of_row;   /* groups of a row */
    int64_t of_group; /* pieces of a group */
    int64_t piece_elems;
    bool is_row; /* pieces are of whole rows, whose groups' scales are given */
    struct dsc_quant_numbers numbers;
    struct dsc_quant_range *ranges; /* of pieces; NULL where a group is one piece */
    struct dsc_quant call;
};

/* Columns [begin, end) of a row. */
struct quant_piece {
    int64_t group; /* counted over all rows */
    int64_t row;
    int64_t begin;
    int64_t end;
};

__device__ inline quant_piece quant_piece_at(const quant_params &a, int64_t i)
{
    const int64_t group = i / a.of_group;
    const int64_t groups_of_row = a.is_row ? 1 : a.of_row;
    const int64_t group_elems = a.is_row ? a.call.n_cols : a.call.group;
    const int64_t first = group % groups_of_row * group_elems;
    const int64_t last = first + group_elems < a.call.n_cols ? first + group_elems : a.call.n_cols;
    const int64_t begin = first + i % a.of_group * a.piece_elems;
    const int64_t end = begin + a.piece_elems < last ? begin + a.piece_elems : last;

    return {group, group / groups_of_row, begin, end};
}

/* n <= VEC elements from i on. */
__device__ inline void load_few(int dtype, const void *data, int64_t i, int n, bool is_wide, float out[VEC])
{
    if (is_wide && n == VEC) {
        widen_vec(dtype, load_vec(dtype, data, i), out);
        return;
    }
    for (int k = 0; k < n; k++)
        out[k] = load(dtype, data, i + k);
}

__device__ inline void store_few(int dtype, void *data, int64_t i, int n, bool is_wide, const float in[VEC])
{
    if (is_wide && n == VEC) {
        store_vec(dtype, data, i, in);
        return;
    }
    for (int k = 0; k < n; k++)
        store(dtype, data, i + k, in[k]);
}

__device__ inline void extend_range(struct dsc_quant_range *range, float low, float high, int32_t bits)
{
    range->low = low < range->low ? low : range->low;
    range->high = high > range->high ? high : range->high;
    range->largest_bits = bits > range->largest_bits ? bits : range->largest_bits;
}

__device__ inline struct dsc_quant_range range_of_piece(const quant_params &a, const quant_piece &piece, int lane)
{
    const int dtype = a.call.dtype;
    const void *x = at(a.call.x, dtype, piece.row * a.call.n_cols + piece.begin);
    const bool is_wide = is_vec_aligned(dtype, x);
    const int64_t n_elems = piece.end - piece.begin;
    struct dsc_quant_range range = {0.0f, 0.0f, 0};

    for (int64_t i = (int64_t)lane * VEC; i < n_elems; i += (int64_t)a.team * VEC) {
        const int n = n_elems - i < VEC ? (int)(n_elems - i) : VEC;
        float values[VEC];

        load_few(dtype, x, i, n, is_wide, values);
        for (int k = 0; k < n; k++)
            extend_range(&range, values[k], values[k], (int32_t)(__float_as_uint(values[k]) & MAGNITUDE));
    }
    return range;
}

/* The range of a team's ranges, which all its threads get. All threads of the block call it. */
__device__ inline void share_range(int team, struct dsc_quant_range *range)
{
    __shared__ struct dsc_quant_range ranges[N_THREADS];
    const int thread = (int)threadIdx.x;
    const int lane = thread % team;

    __syncthreads(); /* the last call's ranges have been read */
    ranges[thread] = *range;
    for (int half = team / 2; half > 0; half /= 2) {
        __syncthreads();
        if (lane < half) {
            const struct dsc_quant_range other = ranges[thread + half];

            extend_range(&ranges[thread], other.low, other.high, other.largest_bits);
        }
    }
    __syncthreads();
    *range = ranges[thread - lane];
}

/* Fractions of 1 for n <= VEC positions from `first` on. */
__device__ inline void random_few(uint64_t seed, uint64_t first, int n, float out[VEC])
{
    uint32_t words[PHILOX_WORDS];

    for (int k = 0; k < n; k++) {
        const uint64_t position = first + (uint64_t)k;

        if (k == 0 || position % PHILOX_WORDS == 0)
            philox(seed, position / PHILOX_WORDS, words);
        out[k] = (float)(int32_t)(words[position % PHILOX_WORDS] >> 8) * 5.9604644775390625e-8f;
    }
}

/* The low n bytes of a word. */
__device__ inline void store_bytes(uint8_t *to, int n, uint32_t word)
{
    if (n == 4 && (uintptr_t)to % 4 == 0) {
        *(uint32_t *)to = word;
        return;
    }
    for (int k = 0; k < n; k++)
        to[k] = (uint8_t)(word >> 8 * k);
}

/* The operands of a thread for the elements of a piece. */
struct quant_row {
    const quant_params &a;
    const quant_piece &piece;
    struct dsc_quant_affine affine;
    uint8_t *codes; /* of the row */
    const char *x;  /* from the piece's first element on, like y */
    char *y;
    bool is_wide;

    __device__ struct dsc_quant_affine affine_of(int64_t column) const
    {
        return a.is_row ? dsc_quant_given(&a.call, piece.row * a.of_row + column / a.call.group) : affine;
    }

    /* Numbers of the format for n elements from the piece's element i on. */
    __device__ void numbers_of(int64_t i, int n, float out[VEC]) const
    {
        float values[VEC];
        float random[VEC] = {0.0f, 0.0f, 0.0f, 0.0f};

        load_few(a.call.dtype, x, i, n, is_wide, values);
        if (a.call.is_stochastic)
            random_few(a.call.seed, (uint64_t)(a.call.offset + piece.row * a.call.n_cols + piece.begin + i), n, random);
        for (int k = 0; k < n; k++)
            out[k] = number_of(a.numbers, a.call.is_stochastic, affine_of(piece.begin + i + k), values[k], random[k]);
    }

    __device__ void put_values(int64_t i, int n, float numbers[VEC]) const
    {
        for (int k = 0; k < n; k++)
            numbers[k] = (numbers[k] - affine.zero_point) * affine.scale;
        store_few(a.call.dtype, y, i, n, is_wide, numbers);
    }

    __device__ void put_codes(int64_t i, int n, const float numbers[VEC]) const
    {
        const int bits = a.numbers.code_bits;
        uint32_t word = 0;

        for (int k = 0; k < n; k++)
            word |= code_of(a.numbers, numbers[k]) << bits * k;
        store_bytes(codes + (piece.begin + i) * bits / 8, (n * bits + 7) / 8, word);
    }

    __device__ void read_codes(int64_t i, int n, float out[VEC]) const
    {
        for (int k = 0; k < n; k++) {
            const int64_t column = piece.begin + i + k;

            out[k] = number_of_code(a.numbers, a.numbers.code_bits == 4 ? codes[column / 2] >> column % 2 * 4 & 15
                                                                        : codes[column]);
        }
    }
};

template <int STEP>
__device__ inline void run_piece(const quant_params &a, const quant_piece &piece, struct dsc_quant_affine affine,
                                 int lane)
{
    const struct dsc_quant &call = a.call;
    const int64_t first = piece.row * call.n_cols + piece.begin;
    const int64_t row_bytes = a.numbers.code_bits == 4 ? 4 * ((call.n_cols + 7) / 8) : call.n_cols;
    const int64_t n_elems = piece.end - piece.begin;
    quant_row row = {a,
                     piece,
                     affine,
                     (uint8_t *)call.codes + piece.row * row_bytes,
                     at(call.x, call.dtype, first),
                     at(call.y, call.dtype, first),
                     true};

    row.is_wide = (STEP == QUANT_DECODE || is_vec_aligned(call.dtype, row.x)) &&
                  (STEP == QUANT_CODE || is_vec_aligned(call.dtype, row.y));
    for (int64_t i = (int64_t)lane * VEC; i < n_elems; i += (int64_t)a.team * VEC) {
        const int n = n_elems - i < VEC ? (int)(n_elems - i) : VEC;
        float numbers[VEC];

        if (STEP == QUANT_DECODE)
            row.read_codes(i, n, numbers);
        else
            row.numbers_of(i, n, numbers);
        if (STEP == QUANT_CODE)
            row.put_codes(i, n, numbers);
        else
            row.put_values(i, n, numbers);
    }
    if (STEP == QUANT_CODE && a.numbers.code_bits == 4 && piece.end == call.n_cols && lane == 0)
        for (int64_t byte = (call.n_cols + 1) / 2; byte < row_bytes; byte++)
            row.codes[byte] = 0;
}

/* This thread's part of a group's range: of its elements, or of the ranges of its pieces. */
__device__ inline struct dsc_quant_range thread_range(const quant_params &a, const quant_piece &piece, int lane)
{
    struct dsc_quant_range range = {0.0f, 0.0f, 0};

    if (a.ranges == nullptr)
        return range_of_piece(a, piece, lane);
    for (int64_t i = lane; i < a.of_group; i += a.team) {
        const struct dsc_quant_range other = a.ranges[piece.group * a.of_group + i];

        extend_range(&range, other.low, other.high, other.largest_bits);
    }
    return range;
}

/* The threads of a block take the same number of steps, since all of them meet at share_range's barriers. */
template <int STEP>
__global__ void __launch_bounds__(N_THREADS) quant_kernel(const __grid_constant__ quant_params a)
{
    const int64_t n_teams = N_THREADS / a.team;
    const int lane = (int)threadIdx.x % a.team;

    for (int64_t first = blockIdx.x * n_teams; first < a.n_pieces; first += a.n_blocks * n_teams) {
        const int64_t i = first + (int64_t)threadIdx.x / a.team;
        const bool exists = i < a.n_pieces;
        const quant_piece piece = quant_piece_at(a, exists ? i : 0);
        struct dsc_quant_affine affine = {1.0f, 0.0f};

        if (!a.call.has_scales) {
            struct dsc_quant_range range = {0.0f, 0.0f, 0};

            if (exists)
                range = STEP == QUANT_RANGES ? range_of_piece(a, piece, lane) : thread_range(a, piece, lane);
            share_range(a.team, &range);
            if (STEP == QUANT_RANGES) {
                if (exists && lane == 0)
                    a.ranges[i] = range;
                continue;
            }
            affine = dsc_quant_affine_of(&a.call, &a.numbers, range);
            if (exists && lane == 0 && i % a.of_group == 0)
                dsc_quant_note(&a.call, piece.group, affine);
        } else if (!a.is_row) {
            affine = dsc_quant_given(&a.call, piece.group);
        }
        if (STEP != QUANT_RANGES && STEP != QUANT_SCALES && exists)
            run_piece<STEP>(a, piece, affine, lane);
    }
}

/* scratch: two f64 for each of MAX_PARTIALS pieces. */
static quant_params quant_params_of(const struct dsc_quant &call, bool is_row, double *scratch)
{
    static_assert(sizeof(struct dsc_quant_range) <= 2 * sizeof(double), "the pieces fill scratch");
    const int64_t group = call.group < call.n_cols && !is_row ? call.group : call.n_cols;
    const int64_t of_row = call.n_cols / call.group + (call.n_cols % call.group != 0);
    const int64_t n_groups = call.n_rows * (is_row ? 1 : of_row);
    const int64_t wanted = group / PIECE_ELEMS;
    const int64_t most = MAX_PARTIALS / n_groups;
    const int64_t cuts = wanted < most ? wanted : most;
    int32_t team = 1;
    quant_params params = {};

    params.of_row = of_row;
    params.piece_elems = cuts > 1 ? ((group - 1) / cuts / VEC + 1) * VEC : group;
    params.of_group = (group - 1) / params.piece_elems + 1;
    params.n_pieces = n_groups * params.of_group;
    while (team < N_THREADS && (int64_t)team * VEC < params.piece_elems)
        team *= 2;
    params.team = team;
    params.n_blocks = blocks_of(params.n_pieces, N_THREADS / team);
    params.is_row = is_row;
    params.numbers = quant_formats[call.format];
    params.ranges = params.of_group > 1 ? (struct dsc_quant_range *)scratch : nullptr;
    params.call = call;
    return params;
}

template <int STEP>
static dsc_status run_quant(const char *what, const struct dsc_quant &call, bool is_row, double *scratch, void *stream)
{
    const quant_params params = quant_params_of(call, is_row, scratch);

    if (params.ranges != nullptr && !call.has_scales)
        DSC_TRY(launch(what, quant_kernel<QUANT_RANGES>, params.n_blocks, params, stream));
    return launch(what, quant_kernel<STEP>, params.n_blocks, params, stream);
}

dsc_status quant_fake(const struct dsc_quant *call, double *scratch, void *stream)
{
    struct dsc_quant only_read = *call;

    if (call->n_rows == 0 || call->n_cols == 0)
        return DSC_OK;
    if (!call->has_scales)
        only_read.scales = nullptr;
    DSC_TRY(check_pointer(call->x, "x"));
    return run_quant<QUANT_FAKE>("quant_fake", only_read, false, scratch, stream);
}

dsc_status quant_quantize(const struct dsc_quant *call, double *scratch, void *stream)
{
    struct dsc_quant given = *call;

    if (call->n_rows == 0 || call->n_cols == 0)
        return DSC_OK;
    DSC_TRY(check_pointer(call->x, "x"));
    /* Two groups of odd length share a byte of halves: then whole rows are coded, after all scales are known. */
    if (quant_formats[call->format].code_bits == 8 || call->group % 2 == 0 || call->group >= call->n_cols)
        return run_quant<QUANT_CODE>("quant_quantize", given, false, scratch, stream);
    if (!call->has_scales)
        DSC_TRY(run_quant<QUANT_SCALES>("quant_quantize, scales", given, false, scratch, stream));
    given.has_scales = true;
    return run_quant<QUANT_CODE>("quant_quantize", given, true, scratch, stream);
}

dsc_status quant_dequantize(const struct dsc_quant *call, double *scratch, void *stream)
{
    struct dsc_quant given = *call;

    if (call->n_rows == 0 || call->n_cols == 0)
        return DSC_OK;
    given.has_scales = true;
    given.is_stochastic = false;
    DSC_TRY(check_pointer(call->codes, "codes"));
    return run_quant<QUANT_DECODE>("quant_dequantize", given, false, scratch, stream);
}

}  // namespace dsc_cuda
