/*
 * Keys and values of attention in blocks (arXiv 2309.06180): the tables that say where each token lies, the layout of a
 * block, and attention over blocks.
 *
 * A *block* has room for the keys and values of DSC_KV_TOKENS tokens. A *sequence* is a table of blocks, in the order
 * of its tokens. Sequences share blocks. A block without a table is free, and a shared block is copied before one of
 * its sequences writes to it. So many samples of a prompt hold the prompt once, and growing copies at most one block.
 *
 * A pool works on numbers only: the keys and values themselves lie in the caller's tensors, at the number of the block.
 * A call that fails changes nothing. A call that names a sequence twice fails. Calls on one pool must not
 * overlap in time.
 */
#ifndef DSC_INFER_H
#define DSC_INFER_H

#include "dsc/status.h"
#include "dsc/types.h"

#ifdef __cplusplus
extern "C" {
#endif

#define DSC_KV_TOKENS 16
/* In a table: the block was given back, because no window reaches its tokens. */
#define DSC_KV_GONE (-1)

struct dsc_kv_pool;

/* Numbers of a pool. */
struct dsc_kv_counts {
    int32_t n_blocks;
    int32_t n_free;
    int32_t n_sequences;
};

/* A block whose contents the caller must copy to another one. */
struct dsc_kv_copy {
    int32_t from;
    int32_t to;
};

/* Makes a pool of n_blocks (>= 0) free blocks, numbered from 0, without sequences. */
DSC_API dsc_status dsc_kv_open(int32_t n_blocks, struct dsc_kv_pool **out);

/* Frees the pool. NULL is allowed. */
DSC_API void dsc_kv_close(struct dsc_kv_pool *pool);

DSC_API void dsc_kv_count(const struct dsc_kv_pool *pool, struct dsc_kv_counts *out);

/* Makes n empty sequences, and writes their numbers. Numbers of dropped sequences are used again. */
DSC_API dsc_status dsc_kv_add(struct dsc_kv_pool *pool, int32_t n, int32_t *out_sequences);

/* Ends sequences: the blocks that no other sequence has become free. */
DSC_API dsc_status dsc_kv_drop(struct dsc_kv_pool *pool, int32_t n, const int32_t *sequences);

/*
 * Makes room for n_tokens[i] >= 0 more tokens behind those of sequences[i].
 *
 * Where the first of these tokens lies in a block that another sequence shares, the sequence gets a block of its own
 * for it. The caller copies these blocks, in order, before it writes a token: copies has room for n entries, and
 * *out_n_copies tells how many there are. Of sequences that share a block and all grow, the last one keeps it.
 *
 * DSC_ENOSPC: there are not enough free blocks; the sentence has both numbers.
 */
DSC_API dsc_status dsc_kv_grow(struct dsc_kv_pool *pool, int32_t n, const int32_t *sequences, const int64_t *n_tokens,
                               struct dsc_kv_copy *copies, int32_t *out_n_copies);

/*
 * Ends each sequence at n_tokens[i] tokens, which must not be more than it has, and gives back the blocks behind them.
 * DSC_ESTATE for a length within blocks that are gone.
 */
DSC_API dsc_status dsc_kv_cut(struct dsc_kv_pool *pool, int32_t n, const int32_t *sequences, const int64_t *n_tokens);

/*
 * Gives back the blocks of sequences[i] that end before token first[i]. A first token behind the
 * sequence's last one gives back all full blocks.
 */
DSC_API dsc_status dsc_kv_slide(struct dsc_kv_pool *pool, int32_t n, const int32_t *sequences, const int64_t *first);

/*
 * sequences[i] becomes a copy of sources[i], with shared blocks; its own former blocks are given back.
 * sources may name a sequence more than once.
 */
DSC_API dsc_status dsc_kv_assign(struct dsc_kv_pool *pool, int32_t n, const int32_t *sequences, const int32_t *sources);

/*
 * Writes the table of each sequence: n rows of n_columns entries. Entries behind a sequence's last block are
 * DSC_KV_GONE. DSC_EINVAL where a sequence has more than n_columns blocks.
 */
DSC_API dsc_status dsc_kv_tables(const struct dsc_kv_pool *pool, int32_t n, const int32_t *sequences, int64_t n_columns,
                                 int32_t *out);

/*
 * The contents of blocks. Keys of a block lie by element, so that one element of all its tokens is a vector; values lie
 * by token:
 *   keys [n_blocks, n_kv_heads, head_dim, DSC_KV_TOKENS], values [n_blocks, n_kv_heads, DSC_KV_TOKENS, value_dim]
 */
struct dsc_kv_shape {
    int64_t n_blocks;
    int64_t n_kv_heads;
    int64_t head_dim;  /* of keys, 1 to DSC_NN_MAX_HEAD_DIM */
    int64_t value_dim; /* likewise */
    dsc_dtype dtype;   /* of keys, values and everything that is computed with them */
};

/*
 * The new tokens of a call, row after row. Row i has n_new[i] tokens, the last
 * ones of its n_keys[i]. tables comes from dsc_kv_tables, with n_columns entries a row.
 */
struct dsc_kv_rows {
    int64_t n_rows;
    const int64_t *n_new;  /* 0 <= n_new[i] */
    const int64_t *n_keys; /* at most DSC_KV_TOKENS * n_columns */
    const int32_t *tables;
    int64_t n_columns;
};

/* Tokens of a call [tokens, heads, dim], dense in dim. */
struct dsc_kv_tokens {
    void *data;         /* only read where they are an input */
    int64_t strides[2]; /* of token and head, in elements */
};

/*
 * Writes the keys and values of the new tokens to their blocks, which no other row may share. DSC_EINVAL names a row
 * whose tokens have no block; nothing is written then.
 */
DSC_API dsc_status dsc_kv_write(const struct dsc_kv_shape *shape, const struct dsc_kv_rows *rows,
                                const struct dsc_kv_tokens *k, const struct dsc_kv_tokens *v, void *keys, void *values,
                                const struct dsc_par *par);

/* Keys of a part of attention: parts are computed by themselves, and merged in their order. */
#define DSC_KV_PART 512

/*
 * Attention of the new tokens, with the rules of dsc_nn_attention:
 *   s[i, j] = bend(scale * q[i] k[j]) - slope * |p(i) - j|,   p(i) = n_keys - n_new + i
 *   out[i]  = sum_j exp(s[i, j] - lse[i]) v[j],   lse[i] = log(sum_j exp(s[i, j]) + exp(sink))
 * over the keys j that token i sees: first <= j;  is_causal: j <= p(i);  window > 0: |p(i) - j| < window.
 *
 * A token's result has the same bits in any company: for any other rows, any n_new that it arrives with, any thread
 * count and any instruction set. A key whose block is gone must not be seen: it counts as zeros.
 */
struct dsc_kv_attention {
    struct dsc_kv_shape shape;
    struct dsc_kv_rows rows;
    int64_t n_heads; /* n_kv_heads divides it */
    bool is_causal;
    int64_t window; /* 0: none */
    float scale;
    float soft_cap;       /* 0: none */
    const int64_t *first; /* [n_rows]: the first key that a row sees; may be NULL: 0 */
    const float *slopes;  /* [n_heads]; may be NULL (ALiBi, arXiv 2108.12409) */
    const float *sinks;   /* [n_heads]; may be NULL */
    const void *keys;
    const void *values;
    struct dsc_kv_tokens q;
    struct dsc_kv_tokens out;
    void *scratch; /* dsc_kv_attention_scratch_bytes() bytes; may be NULL: parts of a row run one after the other */
};

/* 0 where the call has so many rows and heads that its parts need not run side by side. */
DSC_API size_t dsc_kv_attention_scratch_bytes(const struct dsc_kv_attention *call);

DSC_API dsc_status dsc_kv_attention(const struct dsc_kv_attention *call, const struct dsc_par *par);

#ifdef __cplusplus
}
#endif
#endif
