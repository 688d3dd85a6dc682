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
 * Prefixes: the full blocks of tokens that were computed stay when their sequences end, and a sequence that begins with
 * the same tokens takes them instead of computing. A block is found by a hash of all tokens up to its end and of a
 * *salt*, and is confirmed by the tokens and the salt themselves. Sequences of different salts share nothing.
 *
 * An index serves one pool, or several that hold the same sequences for layers of different windows. A kept block
 * without a table is *idle*, and counts as free: a pool without other blocks takes it, the longest idle one first.
 *
 * A *chain* is the index's view of a sequence. The caller tells it the tokens whose keys and values were written. Calls
 * on an index and on its pools must not overlap in time. The pools must outlive the index.
 */
struct dsc_kv_prefixes;

struct dsc_kv_prefix_counts {
    int64_t n_nodes; /* blocks of tokens that the index knows, and salts */
    int32_t n_chains;
};

/* windows: tokens that a query of each pool's layers sees; 0: all. seed: of the hash, so that no stranger can prepare
 * tokens that collide. DSC_ESTATE where a pool has an index already. */
DSC_API dsc_status dsc_kv_prefixes_open(int32_t n_pools, struct dsc_kv_pool *const *pools, const int64_t *windows,
                                        uint64_t seed, struct dsc_kv_prefixes **out);

/* Frees the index. Idle blocks become free. NULL is allowed. */
DSC_API void dsc_kv_prefixes_close(struct dsc_kv_prefixes *prefixes);

DSC_API void dsc_kv_prefixes_count(const struct dsc_kv_prefixes *prefixes, struct dsc_kv_prefix_counts *out);

/* Begins the chain of an empty sequence, which has the number sequences[i] in pool i. */
DSC_API dsc_status dsc_kv_prefixes_begin(struct dsc_kv_prefixes *prefixes, const int32_t *sequences, const void *salt,
                                         size_t n_salt, int32_t *out_chain);

/* Ends a chain, before its sequences are dropped or after. */
DSC_API dsc_status dsc_kv_prefixes_end(struct dsc_kv_prefixes *prefixes, int32_t chain);

/* The tokens at the front of n_tokens that a new sequence would find. */
DSC_API dsc_status dsc_kv_prefixes_find(const struct dsc_kv_prefixes *prefixes, const void *salt, size_t n_salt,
                                        int64_t n_tokens, const int64_t *tokens, int64_t *out_found);

/*
 * Puts blocks of the first *out_found of n_tokens that come next behind the chain's sequences. They are
 * found where the sequences end with a full block, or have none; the last token is never among them. dsc_kv_cut takes
 * them back.
 */
DSC_API dsc_status dsc_kv_prefixes_take(struct dsc_kv_prefixes *prefixes, int32_t chain, int64_t n_tokens,
                                        const int64_t *tokens, int64_t *out_found);

/* Tells the chain its next tokens, found ones too. Their keys and values are in the blocks of the tables. */
DSC_API dsc_status dsc_kv_prefixes_note(struct dsc_kv_prefixes *prefixes, int32_t chain, int64_t n_tokens,
                                        const int64_t *tokens);

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

/*
 * A batch: new tokens of some sequences, row after row. Row i has n_new[i] >= 0 new tokens. Its sequence has
 * n_seen[i] >= 0 tokens already.
 */
struct dsc_kv_batch {
    int32_t n_rows;
    const int64_t *n_seen;
    const int64_t *n_new;
};

/* Sizes of a batch. */
struct dsc_kv_batch_counts {
    int64_t n_tokens;  /* new tokens of all rows */
    int64_t n_blocks;  /* further blocks of one pool for the new tokens */
    int64_t n_columns; /* of dsc_kv_tables, with room for each row */
    int32_t long_row;  /* the first row with more than max_tokens tokens; -1: none */
};

/*
 * Counts the rows before long_row, or all of them. 0 <= max_tokens <= INT32_MAX. DSC_EINVAL names the row with a
 * negative number.
 */
DSC_API dsc_status dsc_kv_batch_count(const struct dsc_kv_batch *batch, int64_t max_tokens,
                                      struct dsc_kv_batch_counts *out);

/* Where the tokens of a batch are: arrays of the caller. */
struct dsc_kv_batch_places {
    int64_t *positions; /* [n_tokens]: of each token in its sequence: n_seen[i] and on */
    int64_t *last;      /* [n_rows]: of a row's last token in the batch; without tokens: of the last one before it */
    int64_t *n_keys;    /* [n_rows]: n_seen[i] + n_new[i], for dsc_kv_rows */
};

/* The first token outside of a vocabulary of n_words words, which are 0 to n_words - 1. */
struct dsc_kv_wrong_token {
    int64_t index; /* in the batch; -1: all tokens are words */
    int32_t row;
};

/* Writes the places of a batch without a long_row, and compares its tokens [n_tokens] with the vocabulary. */
DSC_API void dsc_kv_batch_place(const struct dsc_kv_batch *batch, const int64_t *tokens, int64_t n_words,
                                const struct dsc_kv_batch_places *out, struct dsc_kv_wrong_token *out_wrong);

#ifdef __cplusplus
}
#endif
#endif
