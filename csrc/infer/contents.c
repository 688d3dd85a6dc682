/* The contents of blocks: new tokens are written, and attention reads tiles. */
#include "infer/contents.h"

#include <string.h>

int64_t dsc_kv_first_token(const struct dsc_kv_rows *rows, int64_t row)
{
    int64_t n_tokens = 0;

    for (int64_t i = 0; i < row; i++)
        n_tokens += rows->n_new[i];
    return n_tokens;
}

static dsc_status check_shape(const struct dsc_kv_shape *shape)
{
    int64_t n_elems;

    if (shape->head_dim < 1 || shape->head_dim > DSC_NN_MAX_HEAD_DIM || shape->value_dim < 1 ||
        shape->value_dim > DSC_NN_MAX_HEAD_DIM)
        return dsc_fail(DSC_EINVAL, "heads of %lld and values of %lld elements, must be 1 to %d",
                        (long long)shape->head_dim, (long long)shape->value_dim, DSC_NN_MAX_HEAD_DIM);
    DSC_TRY(dsc_check_dims("blocks, kv_heads and elements", shape->n_blocks, shape->n_kv_heads,
                           (int64_t)DSC_KV_TOKENS * DSC_NN_MAX_HEAD_DIM, &n_elems));
    return dsc_check_rows(n_elems, 1, shape->dtype);
}

dsc_status dsc_kv_check(const struct dsc_kv_shape *shape, const struct dsc_kv_rows *rows)
{
    DSC_TRY(check_shape(shape));
    if (rows->n_rows < 0 || rows->n_columns < 0)
        return dsc_fail(DSC_EINVAL, "%lld rows with tables of %lld entries, must not be negative",
                        (long long)rows->n_rows, (long long)rows->n_columns);
    for (int64_t row = 0; row < rows->n_rows; row++) {
        int64_t n_new = rows->n_new[row];
        int64_t n_keys = rows->n_keys[row];

        if (n_new < 0 || n_keys < 0 || n_keys > rows->n_columns * DSC_KV_TOKENS)
            return dsc_fail(DSC_EINVAL, "row %lld has %lld new tokens and %lld keys, and its table room for %lld",
                            (long long)row, (long long)n_new, (long long)n_keys,
                            (long long)rows->n_columns * DSC_KV_TOKENS);
        for (int64_t i = 0; i < rows->n_columns; i++) {
            int32_t block = rows->tables[row * rows->n_columns + i];

            if (block != DSC_KV_GONE && (block < 0 || block >= shape->n_blocks))
                return dsc_fail(DSC_EINVAL, "entry %lld of row %lld's table is block %d of %lld", (long long)i,
                                (long long)row, (int)block, (long long)shape->n_blocks);
        }
    }
    return DSC_OK;
}

static int32_t block_at(const struct dsc_kv_rows *rows, int64_t row, int64_t token)
{
    int64_t column = token / DSC_KV_TOKENS;

    return column < rows->n_columns ? rows->tables[row * rows->n_columns + column] : DSC_KV_GONE;
}

/* Where the head's keys and values of a block begin. */
static int64_t keys_of(const struct dsc_kv_shape *shape, int64_t block, int64_t kv_head)
{
    return (block * shape->n_kv_heads + kv_head) * DSC_KV_TOKENS * shape->head_dim;
}

static int64_t values_of(const struct dsc_kv_shape *shape, int64_t block, int64_t kv_head)
{
    return (block * shape->n_kv_heads + kv_head) * DSC_KV_TOKENS * shape->value_dim;
}

void dsc_kv_load(const struct dsc_rows *rows, const struct dsc_kv_attention *call, int64_t row, int64_t kv_head,
                 int64_t key, int64_t n, dsc_f32 *keys, dsc_f32 *values, int64_t v_cols)
{
    const struct dsc_kv_shape *shape = &call->shape;
    int64_t n_keys = call->rows.n_keys[row];

    for (int64_t i = 0; i < n; i += DSC_KV_TOKENS) {
        int32_t block = block_at(&call->rows, row, key + i);
        int64_t n_here = n_keys - key - i < DSC_KV_TOKENS ? n_keys - key - i : DSC_KV_TOKENS;

        if (block == DSC_KV_GONE || n_here <= 0) {
            for (int64_t d = 0; d < shape->head_dim; d++)
                memset(keys + d * n + i, 0, DSC_KV_TOKENS * sizeof *keys);
            memset(values + i * v_cols, 0, (size_t)(DSC_KV_TOKENS * v_cols) * sizeof *values);
            continue;
        }
        rows->nn->widen_rows(shape->head_dim, DSC_KV_TOKENS, shape->dtype,
                             dsc_at(call->keys, shape->dtype, keys_of(shape, block, kv_head)), DSC_KV_TOKENS, keys + i,
                             n);
        rows->nn->widen_rows(n_here, shape->value_dim, shape->dtype,
                             dsc_at(call->values, shape->dtype, values_of(shape, block, kv_head)), shape->value_dim,
                             values + i * v_cols, v_cols);
        for (int64_t token = 0; token < n_here; token++)
            memset(values + (i + token) * v_cols + shape->value_dim, 0,
                   (size_t)(v_cols - shape->value_dim) * sizeof *values);
        memset(values + (i + n_here) * v_cols, 0, (size_t)((DSC_KV_TOKENS - n_here) * v_cols) * sizeof *values);
    }
}

/* New tokens on their way to their blocks. */
struct transfer {
    const struct dsc_kv_shape *shape;
    const struct dsc_kv_rows *rows;
    const struct dsc_kv_tokens *k;
    const struct dsc_kv_tokens *v;
    char *keys;
    char *values;
};

/* Writes n elements of n_bytes each, DSC_KV_TOKENS elements apart. */
static void scatter(char *to, const char *from, int64_t n, size_t n_bytes)
{
    if (n_bytes == 2)
        for (int64_t i = 0; i < n; i++)
            memcpy(to + i * DSC_KV_TOKENS * 2, from + i * 2, 2);
    else
        for (int64_t i = 0; i < n; i++)
            memcpy(to + i * DSC_KV_TOKENS * 4, from + i * 4, 4);
}

/* One token of one head; `at` is its place among the tokens of the call. */
static void write_token(const struct transfer *job, int64_t row, int64_t kv_head, int64_t token, int64_t at)
{
    const struct dsc_kv_shape *shape = job->shape;
    size_t n_bytes = dsc_dtype_bytes(shape->dtype);
    int32_t block = block_at(job->rows, row, token);
    int64_t place = token % DSC_KV_TOKENS;
    const char *k =
        (const char *)job->k->data + (size_t)(at * job->k->strides[0] + kv_head * job->k->strides[1]) * n_bytes;
    const char *v =
        (const char *)job->v->data + (size_t)(at * job->v->strides[0] + kv_head * job->v->strides[1]) * n_bytes;

    scatter(job->keys + (size_t)(keys_of(shape, block, kv_head) + place) * n_bytes, k, shape->head_dim, n_bytes);
    memcpy(job->values + (size_t)(values_of(shape, block, kv_head) + place * shape->value_dim) * n_bytes, v,
           (size_t)shape->value_dim * n_bytes);
}

static void write_heads(void *arg, int64_t begin, int64_t end)
{
    const struct transfer *job = arg;
    const struct dsc_kv_rows *rows = job->rows;

    for (int64_t i = begin; i < end; i++) {
        int64_t row = i / job->shape->n_kv_heads;
        int64_t first = rows->n_keys[row] - rows->n_new[row];
        int64_t at = dsc_kv_first_token(rows, row);

        for (int64_t token = 0; token < rows->n_new[row]; token++)
            write_token(job, row, i % job->shape->n_kv_heads, first + token, at + token);
    }
}

dsc_status dsc_kv_write(const struct dsc_kv_shape *shape, const struct dsc_kv_rows *rows, const struct dsc_kv_tokens *k,
                        const struct dsc_kv_tokens *v, void *keys, void *values, const struct dsc_par *par)
{
    struct transfer job = {shape, rows, k, v, keys, values};

    DSC_TRY(dsc_kv_check(shape, rows));
    for (int64_t row = 0; row < rows->n_rows; row++) {
        if (rows->n_new[row] > rows->n_keys[row])
            return dsc_fail(DSC_EINVAL, "row %lld has %lld new tokens among %lld keys", (long long)row,
                            (long long)rows->n_new[row], (long long)rows->n_keys[row]);
        for (int64_t token = rows->n_keys[row] - rows->n_new[row]; token < rows->n_keys[row]; token++)
            if (block_at(rows, row, token) == DSC_KV_GONE)
                return dsc_fail(DSC_EINVAL, "token %lld of row %lld has no block", (long long)token, (long long)row);
    }
    dsc_par_run(par, rows->n_rows * shape->n_kv_heads, write_heads, &job);
    return DSC_OK;
}
