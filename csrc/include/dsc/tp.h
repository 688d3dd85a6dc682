/*
 * The elements of a parameter that a tensor-parallel rank holds, as plain integers.
 *
 * A parameter is cut along one dimension. That dimension consists of n_blocks equal *blocks*, and each block of the
 * same *parts*: [q | k | v] of a fused projection is one block of three parts; if q, k and v are interleaved, there is
 * one block for each key head. A part is cut in *grains*, which stay whole: a head, or a number of columns that suits a
 * kernel.
 *
 *   n_blocks 1   | q: heads x head_dim | k: key heads x head_dim | v: key heads x head_dim |
 *   n_blocks K   | q of key head 0 | k 0 | v 0 | q of key head 1 | k 1 | v 1 | ...
 *
 * A rank's elements come as *runs*: a run is n_elems elements that are contiguous both in the whole dimension and in
 * the rank's part. Query heads stay with the key head that they attend to. If there are at least as many key heads as
 * ranks, each rank gets some of them (2/1/1 for 4 heads over 3 ranks). If there are fewer, several ranks share a key
 * head and divide its query heads (arXiv 1909.08053, 2305.13245).
 *
 * Nothing here allocates. Counts are int64_t, ranks int32_t. Any thread may call anything.
 */
#ifndef DSC_TP_H
#define DSC_TP_H

#include "dsc/status.h"
#include "dsc/types.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Runs are computed block by block, so the number of blocks is limited. */
#define DSC_TP_MAX_BLOCKS (1 << 20)

enum dsc_tp_kind {
    DSC_TP_WHOLE = 0,   /* every rank holds all of it */
    DSC_TP_COLUMNS = 1, /* cut as evenly as grains allow; the last grain of a block may be shorter */
    DSC_TP_QUERIES = 2, /* a grain is a query head */
    DSC_TP_KEYS = 3,    /* a grain is a key head, or a value head */
};

struct dsc_tp_part {
    int32_t kind;        /* enum dsc_tp_kind */
    int64_t n_elems;     /* within one block, >= 0 */
    int64_t grain_elems; /* > 0; heads divide n_elems */
};

struct dsc_tp_dim {
    const struct dsc_tp_part *parts; /* borrowed */
    int64_t n_parts;
    int64_t n_blocks;    /* 0 to DSC_TP_MAX_BLOCKS */
    int64_t n_heads;     /* query heads, summed over all blocks of a part of queries; 0 if there are none */
    int64_t n_key_heads; /* divides n_heads */
};

/* Half-open ranges of heads. */
struct dsc_tp_heads {
    int64_t query_begin;
    int64_t query_end;
    int64_t key_begin;
    int64_t key_end;
    int32_t first_copy; /* the ranks [first_copy, first_copy + n_copies) hold the same key heads */
    int32_t n_copies;
};

struct dsc_tp_run {
    int64_t local_begin_elems;
    int64_t logical_begin_elems;
    int64_t n_elems; /* > 0 */
};

/*
 * Computes the heads of rank. Every rank needs at least one query head. So DSC_EINVAL if n_heads < n_ranks, or if a key
 * head has fewer query heads than ranks that share it.
 */
DSC_API dsc_status dsc_tp_heads_of(int64_t n_heads, int64_t n_key_heads, int32_t n_ranks, int32_t rank,
                                   struct dsc_tp_heads *out_heads);

/*
 * Computes the runs of rank, in increasing order; adjacent runs are merged. Call with out_runs NULL for the count; then
 * with an array of capacity entries.
 *
 * The ranks [*out_first_copy, *out_first_copy + *out_n_copies) hold the same elements. *out_n_copies is 0 if some
 * elements of the rank have more copies than others, as in a fused projection with shared key heads. For a rank that
 * holds nothing it is 1. DSC_EINVAL names the part or the number that does not fit; DSC_EOVERFLOW if the dimension does
 * not fit int64_t. On failure nothing is written.
 */
DSC_API dsc_status dsc_tp_runs_of(const struct dsc_tp_dim *dim, int32_t n_ranks, int32_t rank, int64_t capacity,
                                  struct dsc_tp_run *out_runs, int64_t *out_n_runs, int32_t *out_first_copy,
                                  int32_t *out_n_copies);

/* What one rank contributes to a row of logits; the contributions of all ranks together give the row's loss. */
struct dsc_tp_row {
    float max;     /* maximum of this rank's logits; -inf if it has none */
    float sum_exp; /* of e^(logit - max), 0 where max is -inf */
    float target;  /* the target's logit; 0 if another rank has it */
    float sum;     /* of this rank's logits */
};

/*
 * Cross-entropy over a vocabulary cut over ranks, first half: a pass over this rank's logits [n_rows, vocab_size],
 * contiguous, of dtype. targets[row] is a token id minus the first token id of this rank. A number outside of [0,
 * vocab_size) belongs to another rank or to none.
 */
DSC_API dsc_status dsc_tp_cross_entropy_rows(const void *logits, dsc_dtype dtype, const int64_t *targets,
                                             int64_t n_rows, int64_t vocab_size, const struct dsc_par *par,
                                             struct dsc_tp_row *out_rows);

/*
 * Second half: the gradient takes the place of the logits,
 *
 *   scale[row] * (e^(logit - log_sum[row]) - smoothing / full_vocab_size - (1 - smoothing) * (column is the target))
 *
 * computed in f32 and rounded once. log_sum is the logarithm of the sum of exponentials over all ranks, so no logit is
 * above it. full_vocab_size counts the columns of all ranks. A row with scale 0 becomes zeros, even if it holds NaN.
 */
DSC_API dsc_status dsc_tp_cross_entropy_grad(void *logits, dsc_dtype dtype, const int64_t *targets, int64_t n_rows,
                                             int64_t vocab_size, const float *log_sum, const float *scale,
                                             double smoothing, int64_t full_vocab_size, const struct dsc_par *par);

/* The argument checks of the two halves, for callers that run the computation elsewhere (dsc/accel.h). */
DSC_API dsc_status dsc_tp_cross_entropy_rows_check(const void *logits, dsc_dtype dtype, const int64_t *targets,
                                                   int64_t n_rows, int64_t vocab_size,
                                                   const struct dsc_tp_row *out_rows);
DSC_API dsc_status dsc_tp_cross_entropy_grad_check(const void *logits, dsc_dtype dtype, const int64_t *targets,
                                                   int64_t n_rows, int64_t vocab_size, const float *log_sum,
                                                   const float *scale, double smoothing, int64_t full_vocab_size);

#ifdef __cplusplus
}
#endif

#endif
