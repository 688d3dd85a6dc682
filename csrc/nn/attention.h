/* Shared by attention and its gradients: the keys that each query sees, and blocks of tokens as tiles of f32. */
#ifndef DSC_NN_ATTENTION_H
#define DSC_NN_ATTENTION_H

#include "dsc/nn.h"
#include "nn/rows.h"

/* Tokens of a block, of queries and of keys: with heads of 128 the tiles of both fit a second-level cache. */
#define DSC_TILE 64
#define DSC_TILE_DIM DSC_NN_MAX_HEAD_DIM

/* A tile's memory: at most DSC_TILE rows of DSC_TILE_DIM elements, or the transpose. */
typedef dsc_f32 dsc_tile[DSC_TILE * DSC_TILE_DIM] __attribute__((aligned(64)));
typedef dsc_f32 dsc_square[DSC_TILE * DSC_TILE] __attribute__((aligned(64)));

struct dsc_attention {
    struct dsc_rows rows;
    const struct dsc_nn_attention *call;
    int64_t offset;  /* query i has the position of key i + offset */
    int64_t window;  /* no more than there are tokens */
    int64_t qk_cols; /* head_dim and value_dim, padded for mul_add */
    int64_t v_cols;
};

struct dsc_token_range {
    int64_t begin;
    int64_t end;
};

/* Some tokens of one head. */
struct dsc_block {
    int64_t batch;
    int64_t head;
    int64_t begin;
    int64_t n;
};

/* Documents of a block of tokens: all lie in [least, most]. */
struct dsc_document_range {
    int32_t least;
    int32_t most;
};

/* Checks the operands that both directions read, and fills *out. */
dsc_status dsc_attention_begin(const struct dsc_nn_attention *call, struct dsc_attention *out);
/* Checks the rules that attention with and without blocks have in common. */
dsc_status dsc_check_rules(int64_t n_heads, int64_t n_kv_heads, int64_t window, float soft_cap, float scale);
/* Checks the heads of a call: memory for n_rows rows of dim elements must be given. */
dsc_status dsc_check_heads(const char *name, const struct dsc_nn_heads *heads, int64_t n_rows);

int64_t dsc_padded(int64_t dim);
int64_t dsc_blocks_of(int64_t n_tokens);
/* Block i of a head's tokens. */
struct dsc_block dsc_block_at(int64_t batch, int64_t head, int64_t i, int64_t n_tokens);

/* The keys that a query sees by position, and the queries that see a key. */
struct dsc_token_range dsc_keys_of(const struct dsc_attention *attention, int64_t query);
struct dsc_token_range dsc_queries_of(const struct dsc_attention *attention, int64_t key);
/* Whether every query of the first block sees every key of the second block by position. */
bool dsc_sees_all(const struct dsc_attention *attention, const struct dsc_block *queries, const struct dsc_block *keys);

/* Documents of a block of tokens that begins at a position among the keys. */
const int32_t *dsc_documents_at(const struct dsc_attention *attention, int64_t batch, int64_t position);
struct dsc_document_range dsc_documents_of(const struct dsc_attention *attention, int64_t batch, int64_t position,
                                           int64_t n);
/* Whether some query and key of two blocks may lie in different documents, and whether all of them do. */
bool dsc_documents_may_differ(struct dsc_document_range a, struct dsc_document_range b);
bool dsc_documents_differ(struct dsc_document_range a, struct dsc_document_range b);

float dsc_slope_of(const struct dsc_attention *attention, int64_t batch, int64_t head);

/* Tokens as rows of n_cols elements in f32, times factor, padded with zeros. */
void dsc_load_tile(const struct dsc_attention *attention, const struct dsc_nn_heads *heads,
                   const struct dsc_block *block, int64_t dim, int64_t n_cols, float factor, dsc_f32 *tile);
void dsc_store_tile(const struct dsc_attention *attention, const dsc_f32 *tile, int64_t n_cols,
                    const struct dsc_nn_heads *heads, const struct dsc_block *block, int64_t dim);
/* [n_rows, n_cols] as [n_cols, DSC_TILE], padded with zeros. */
void dsc_transpose_tile(const dsc_f32 *tile, int64_t n_rows, int64_t n_cols, dsc_f32 *out);

#endif
