/*
 * Sequence parallelism: plans, in plain integers, the tokens, heads and blocks of attention of each rank, and merges
 * partial results of attention.
 *
 * Tokens are numbered by their place in the whole sequence. A rank's tokens come as *runs*: a run is n_tokens tokens
 * that are contiguous both in the whole sequence and in the rank's part, in increasing order. The orders, over 4 ranks:
 *
 *   DSC_SEQ_CONTIGUOUS   | 0 . . | 1 . . | 2 . . | 3 . . |
 *   DSC_SEQ_ZIGZAG       | 0 | 1 | 2 | 3 | 3 | 2 | 1 | 0 |   the same causal work for all ranks
 *   DSC_SEQ_DOCUMENTS    | 2 | 0 . . . | 1 . | 3 | 1 |       no document is cut, so no rank needs another's keys
 *
 * A sequence may be *packed*: documents one after another, and none sees another. document_ends[i] is the first token
 * after document i; ends increase and the last is the length. n_documents 0 is one document.
 *
 * Nothing here allocates. Tokens, heads and work are int64_t, ranks int32_t. Any thread may call anything.
 */
#ifndef DSC_SEQ_H
#define DSC_SEQ_H

#include "dsc/status.h"
#include "dsc/types.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The number of pairs of tokens fits int64_t. */
#define DSC_SEQ_MAX_TOKENS (INT64_C(1) << 31)
#define DSC_SEQ_MAX_RANKS (1 << 20)

enum dsc_seq_order {
    DSC_SEQ_CONTIGUOUS = 0,
    DSC_SEQ_ZIGZAG = 1,
    DSC_SEQ_DOCUMENTS = 2, /* given by the caller's document_parts */
};

/*
 * The ranks of a hybrid form rows of n_inner ranks. Each row has one *part* of the sequence, number rank / n_inner; the
 * order says how the sequence is cut into parts. Within the row each rank has an even, contiguous share of the part.
 * With n_inner 1 each rank has a part of its own.
 */
struct dsc_seq_cut {
    int64_t n_tokens; /* 0 to DSC_SEQ_MAX_TOKENS */
    int32_t n_ranks;  /* 1 to DSC_SEQ_MAX_RANKS */
    int32_t n_inner;  /* divides n_ranks */
    int32_t order;    /* enum dsc_seq_order */
    const int64_t *document_ends;
    const int32_t *document_parts; /* the part of each document; only read for DSC_SEQ_DOCUMENTS */
    int64_t n_documents;
};

struct dsc_seq_run {
    int64_t local_begin;
    int64_t begin;
    int64_t n_tokens; /* > 0 */
};

/*
 * Deals documents to parts, the longest document first, each to the part with the fewest tokens (the first of equal
 * parts). Fills out_document_parts [n_documents]. order [n_documents] and part_tokens [n_parts] are scratch memory from
 * the caller.
 */
DSC_API dsc_status dsc_seq_deal(const int64_t *document_ends, int64_t n_documents, int32_t n_parts, int64_t *order,
                                int64_t *part_tokens, int32_t *out_document_parts);

/*
 * Computes the runs of rank; adjacent runs are merged. *out_n_tokens is the sum of their tokens. In contiguous and
 * zigzag order the token counts of ranks differ by one at most, and a rank may have no tokens. Call with out_runs NULL
 * for the count; then with an array of capacity entries. DSC_EINVAL names the number that does not fit. On failure
 * nothing is written.
 */
DSC_API dsc_status dsc_seq_runs_of(const struct dsc_seq_cut *cut, int32_t rank, int64_t capacity,
                                   struct dsc_seq_run *out_runs, int64_t *out_n_runs, int64_t *out_n_tokens);

/* Half-open ranges of the heads that a rank computes when ranks exchange tokens for heads. */
struct dsc_seq_heads {
    int64_t query_begin;
    int64_t query_end;
    int64_t key_begin; /* the key/value heads that those query heads attend to; no others are sent */
    int64_t key_end;
    int64_t group; /* this many consecutive query heads share a key head on this rank, see dsc_seq_keys_of */
};

/*
 * Computes the heads of rank: query heads are spread as evenly as possible, and their key heads come with them. A key
 * head whose query heads lie on several ranks is held by each of these ranks. DSC_EINVAL where n_heads < n_ranks (each
 * rank needs a query head), or n_key_heads does not divide n_heads.
 */
DSC_API dsc_status dsc_seq_heads_of(int64_t n_heads, int64_t n_key_heads, int32_t n_ranks, int32_t rank,
                                    struct dsc_seq_heads *out_heads);

/*
 * Attention requires groups of one size. out_keys [(query_end - query_begin) / group] has, for each group of a rank,
 * the index of its key head, counted from key_begin: 0, 1, 2, ... if each key head has one group. An index comes
 * several times if the rank has more query heads of one key head than of another.
 */
DSC_API dsc_status dsc_seq_keys_of(int64_t n_heads, int64_t n_key_heads, int32_t n_ranks, int32_t rank,
                                   int64_t capacity, int64_t *out_keys);

/* Elements of one head of one token. */
struct dsc_seq_widths {
    int64_t query; /* of queries and keys */
    int64_t value; /* of values and outputs */
};

/*
 * Counts the elements that rank exchanges with each rank, itself included, for one sequence. On the way out it sends
 * query, key and value of its tokens (out_sent [n_ranks]) and receives query, key and value of its heads
 * (out_received). On the way back it sends outputs (out_returned) and receives outputs (out_got). tokens [n_ranks] is
 * each rank's number of tokens. DSC_EOVERFLOW if a number does not fit int64_t. An array may be NULL. On failure
 * nothing is written.
 */
DSC_API dsc_status dsc_seq_exchange_of(int64_t n_heads, int64_t n_key_heads, const struct dsc_seq_widths *widths,
                                       const int64_t *tokens, int32_t n_ranks, int32_t rank, int64_t *out_sent,
                                       int64_t *out_received, int64_t *out_returned, int64_t *out_got);

/* The keys that a query sees, within its document. */
struct dsc_seq_mask {
    bool is_causal; /* hides keys after the query */
    int64_t window; /* hides keys that are window tokens away or more; 0: any distance */
    int64_t tile;   /* the largest number of queries of a block that needs its own mask; 0: any number */
};

enum dsc_seq_kind {
    DSC_SEQ_WHOLE = 0,  /* each query sees each key */
    DSC_SEQ_CAUSAL = 1, /* as many queries as keys: query i sees keys 0 to i */
    DSC_SEQ_BAND = 2,   /* query i sees key j by its distance, i + shift - j */
};

/*
 * A block of queries and keys that are multiplied with one another, as half-open ranges of the tokens of their two
 * ranks. Each query of a block sees at least one key of the block.
 */
struct dsc_seq_block {
    int32_t kind; /* enum dsc_seq_kind */
    int64_t query_begin;
    int64_t query_end;
    int64_t key_begin;
    int64_t key_end;
    int64_t shift;   /* position of the first query minus position of the first key, in the whole sequence */
    int64_t n_pairs; /* pairs (query, key that it sees): the work */
};

/*
 * Lists the blocks of the product of one rank's queries and another rank's keys, without the pairs that the mask or the
 * documents hide. No pair is in two blocks. Adjacent blocks are joined if one call of attention can compute them. The
 * runs come from dsc_seq_runs_of, for the same cut. Call with out_blocks NULL for the count; then with an array of
 * capacity entries. On failure nothing is written.
 */
DSC_API dsc_status dsc_seq_blocks_of(const struct dsc_seq_mask *mask, const int64_t *document_ends, int64_t n_documents,
                                     int64_t n_tokens, const struct dsc_seq_run *queries, int64_t n_query_runs,
                                     const struct dsc_seq_run *keys, int64_t n_key_runs, int64_t capacity,
                                     struct dsc_seq_block *out_blocks, int64_t *out_n_blocks, int64_t *out_n_pairs);

/*
 * Merges a part of attention into the result so far: the softmax over some keys with the softmax over others (arXiv
 * 2310.01889). out is f32 [n_groups, n_rows, width] and log_sum f32 [n_groups, n_rows], the logarithm of the sum of
 * exponentials that out was divided by; before the first part log_sum is -inf and out 0. part [n_groups, n_part_rows,
 * width] of dtype and part_log_sum [n_groups, n_part_rows] belong to the rows from first_row on. Afterwards
 *
 *   log_sum = log(e^log_sum + e^part_log_sum)     out = out e^(old log_sum - log_sum) + part e^(part_log_sum - log_sum)
 *
 * where no exponent is above 0. A row with part_log_sum -inf changes nothing, even if its part holds NaN.
 */
DSC_API dsc_status dsc_seq_merge(float *out, float *log_sum, int64_t n_groups, int64_t n_rows, int64_t width,
                                 const void *part, dsc_dtype dtype, const float *part_log_sum, int64_t first_row,
                                 int64_t n_part_rows, const struct dsc_par *par);

#ifdef __cplusplus
}
#endif

#endif
