/* Attention, forward: one block of queries at a time goes over the blocks of keys that it sees, with an online softmax.
 */
#include "nn/attention.h"

#include <math.h>
#include <string.h>

int64_t dsc_padded(int64_t dim)
{
    return (dim + DSC_NN_LANES - 1) / DSC_NN_LANES * DSC_NN_LANES;
}

int64_t dsc_blocks_of(int64_t n_tokens)
{
    return n_tokens / DSC_TILE + (n_tokens % DSC_TILE != 0);
}

struct dsc_block dsc_block_at(int64_t batch, int64_t head, int64_t i, int64_t n_tokens)
{
    int64_t begin = i * DSC_TILE;

    return (struct dsc_block){batch, head, begin, n_tokens - begin < DSC_TILE ? n_tokens - begin : DSC_TILE};
}

static dsc_status check_dim(const char *name, int64_t dim)
{
    if (dim < 1 || dim > DSC_NN_MAX_HEAD_DIM)
        return dsc_fail(DSC_EINVAL, "%s is %lld, must be 1 to %d", name, (long long)dim, DSC_NN_MAX_HEAD_DIM);
    return DSC_OK;
}

dsc_status dsc_check_heads(const char *name, const struct dsc_nn_heads *heads, int64_t n_rows)
{
    if (heads->data == NULL && n_rows > 0)
        return dsc_fail(DSC_EINVAL, "%s is NULL for %lld rows", name, (long long)n_rows);
    return DSC_OK;
}

dsc_status dsc_check_rules(int64_t n_heads, int64_t n_kv_heads, int64_t window, float soft_cap, float scale)
{
    if (n_heads < 0 || (n_heads > 0 && (n_kv_heads < 1 || n_heads % n_kv_heads != 0)))
        return dsc_fail(DSC_EINVAL, "%lld heads of q cannot share %lld heads of k and v evenly", (long long)n_heads,
                        (long long)n_kv_heads);
    if (window < 0)
        return dsc_fail(DSC_EINVAL, "window is %lld, must not be negative", (long long)window);
    if (!(soft_cap >= 0.0f) || isinf(soft_cap))
        return dsc_fail(DSC_EINVAL, "soft_cap is %g, must be finite and not negative", (double)soft_cap);
    if (!isfinite(scale))
        return dsc_fail(DSC_EINVAL, "scale is %g, must be finite", (double)scale);
    return DSC_OK;
}

dsc_status dsc_attention_begin(const struct dsc_nn_attention *call, struct dsc_attention *out)
{
    int64_t n_query_rows;
    int64_t n_key_rows;

    DSC_TRY(dsc_check_dims("batch, heads and queries", call->n_batch, call->n_heads, call->n_queries, &n_query_rows));
    DSC_TRY(dsc_check_dims("batch, kv_heads and keys", call->n_batch, call->n_kv_heads, call->n_keys, &n_key_rows));
    DSC_TRY(check_dim("head_dim", call->head_dim));
    DSC_TRY(check_dim("value_dim", call->value_dim));
    DSC_TRY(dsc_check_rows(n_query_rows, DSC_NN_MAX_HEAD_DIM, call->dtype));
    DSC_TRY(dsc_check_rows(n_key_rows, DSC_NN_MAX_HEAD_DIM, call->dtype));
    DSC_TRY(dsc_check_rules(call->n_heads, call->n_kv_heads, call->window, call->soft_cap, call->scale));
    if (call->documents != NULL && call->n_queries > call->n_keys)
        return dsc_fail(DSC_EINVAL, "documents of %lld keys leave none to the first of %lld queries",
                        (long long)call->n_keys, (long long)call->n_queries);
    DSC_TRY(dsc_check_heads("q", &call->q, n_query_rows));
    DSC_TRY(dsc_check_heads("k", &call->k, n_key_rows));
    DSC_TRY(dsc_check_heads("v", &call->v, n_key_rows));
    DSC_TRY(dsc_check_heads("out", &call->out, n_query_rows));
    DSC_TRY(CHECK_PRESENT(n_query_rows, NAMED(call, lse)));

    int64_t n_tokens = call->n_queries + call->n_keys;

    *out = (struct dsc_attention){
        .rows = dsc_rows_of(n_query_rows, dsc_padded(call->head_dim)),
        .call = call,
        .offset = call->n_keys - call->n_queries,
        .window = call->window < n_tokens ? call->window : n_tokens,
        .qk_cols = dsc_padded(call->head_dim),
        .v_cols = dsc_padded(call->value_dim),
    };
    return DSC_OK;
}

static struct dsc_token_range within(int64_t begin, int64_t end, int64_t n)
{
    begin = begin < 0 ? 0 : begin;
    end = end > n ? n : end;
    return (struct dsc_token_range){begin, end < begin ? begin : end};
}

struct dsc_token_range dsc_keys_of(const struct dsc_attention *attention, int64_t query)
{
    const struct dsc_nn_attention *call = attention->call;
    int64_t position = query + attention->offset;
    int64_t begin = attention->window > 0 ? position - attention->window + 1 : 0;
    int64_t end = attention->window > 0 ? position + attention->window : call->n_keys;

    return within(begin, call->is_causal ? position + 1 : end, call->n_keys);
}

struct dsc_token_range dsc_queries_of(const struct dsc_attention *attention, int64_t key)
{
    const struct dsc_nn_attention *call = attention->call;
    int64_t own = key - attention->offset; /* the query at the key's position */
    int64_t begin = attention->window > 0 ? own - attention->window + 1 : 0;
    int64_t end = attention->window > 0 ? own + attention->window : call->n_queries;

    return within(call->is_causal ? own : begin, end, call->n_queries);
}

bool dsc_sees_all(const struct dsc_attention *attention, const struct dsc_block *queries, const struct dsc_block *keys)
{
    return dsc_keys_of(attention, queries->begin + queries->n - 1).begin <= keys->begin &&
           dsc_keys_of(attention, queries->begin).end >= keys->begin + keys->n;
}

const int32_t *dsc_documents_at(const struct dsc_attention *attention, int64_t batch, int64_t position)
{
    return attention->call->documents + batch * attention->call->n_keys + position;
}

struct dsc_document_range dsc_documents_of(const struct dsc_attention *attention, int64_t batch, int64_t position,
                                           int64_t n)
{
    struct dsc_document_range range = {0, 0};

    if (attention->call->documents == NULL)
        return range;

    const int32_t *documents = dsc_documents_at(attention, batch, position);

    range = (struct dsc_document_range){documents[0], documents[0]};
    for (int64_t i = 1; i < n; i++) {
        range.least = documents[i] < range.least ? documents[i] : range.least;
        range.most = documents[i] > range.most ? documents[i] : range.most;
    }
    return range;
}

bool dsc_documents_may_differ(struct dsc_document_range a, struct dsc_document_range b)
{
    return a.least != a.most || b.least != b.most || a.least != b.least || a.least < 0;
}

bool dsc_documents_differ(struct dsc_document_range a, struct dsc_document_range b)
{
    return a.most < b.least || b.most < a.least || a.most < 0 || b.most < 0;
}

float dsc_slope_of(const struct dsc_attention *attention, int64_t batch, int64_t head)
{
    const struct dsc_nn_attention *call = attention->call;

    return call->slopes == NULL ? 0.0f : call->slopes[batch * call->slopes_stride + head];
}

static int64_t element_of(const struct dsc_nn_heads *heads, const struct dsc_block *block, int64_t row)
{
    return block->batch * heads->strides[0] + block->head * heads->strides[1] +
           (block->begin + row) * heads->strides[2];
}

void dsc_load_tile(const struct dsc_attention *attention, const struct dsc_nn_heads *heads,
                   const struct dsc_block *block, int64_t dim, int64_t n_cols, float factor, dsc_f32 *tile)
{
    dsc_dtype dtype = attention->call->dtype;

    for (int64_t row = 0; row < block->n; row++) {
        dsc_f32 *to = tile + row * n_cols;
        const dsc_f32 *from =
            dsc_load(&attention->rows, dtype, dsc_at(heads->data, dtype, element_of(heads, block, row)), dim, to);

        if (from != to)
            memcpy(to, from, (size_t)dim * sizeof *to);
        memset(to + dim, 0, (size_t)(n_cols - dim) * sizeof *to);
        if (factor != 1.0f)
            attention->rows.kernels->scale_f32(dim, factor, to);
    }
}

void dsc_store_tile(const struct dsc_attention *attention, const dsc_f32 *tile, int64_t n_cols,
                    const struct dsc_nn_heads *heads, const struct dsc_block *block, int64_t dim)
{
    dsc_dtype dtype = attention->call->dtype;

    for (int64_t row = 0; row < block->n; row++)
        dsc_store(&attention->rows, dtype, tile + row * n_cols, dim,
                  dsc_at_out(heads->data, dtype, element_of(heads, block, row)));
}

void dsc_transpose_tile(const dsc_f32 *tile, int64_t n_rows, int64_t n_cols, dsc_f32 *out)
{
    for (int64_t column = 0; column < n_cols; column++) {
        dsc_f32 *to = out + column * DSC_TILE;

        for (int64_t row = 0; row < n_rows; row++)
            to[row] = tile[row * n_cols + column];
        for (int64_t row = n_rows; row < DSC_TILE; row++)
            to[row] = 0.0f;
    }
}

/* The state of the online softmax of a block of queries. */
struct seen {
    dsc_f32 max[DSC_TILE];
    double sum[DSC_TILE];  /* of exp(score - max) */
    dsc_tile out;          /* [queries, v_cols], not divided by sum yet */
    dsc_tile queries;      /* [qk_cols, DSC_TILE], times scale */
    int32_t ids[DSC_TILE]; /* documents of the queries */
    struct dsc_document_range documents;
};

static void begin_block(const struct dsc_attention *attention, const struct dsc_block *queries, struct seen *seen)
{
    const struct dsc_nn_attention *call = attention->call;
    bool has_sink = call->sinks != NULL;
    dsc_tile tile;

    dsc_load_tile(attention, &call->q, queries, call->head_dim, attention->qk_cols, call->scale, tile);
    dsc_transpose_tile(tile, queries->n, attention->qk_cols, seen->queries);
    for (int64_t i = 0; i < DSC_TILE; i++) {
        seen->max[i] = has_sink ? call->sinks[queries->head] : -INFINITY;
        seen->sum[i] = has_sink ? 1.0 : 0.0;
        seen->ids[i] = -1;
    }
    memset(seen->out, 0, (size_t)(queries->n * attention->v_cols) * sizeof *seen->out);
    seen->documents = dsc_documents_of(attention, queries->batch, queries->begin + attention->offset, queries->n);
    if (call->documents != NULL)
        memcpy(seen->ids, dsc_documents_at(attention, queries->batch, queries->begin + attention->offset),
               (size_t)queries->n * sizeof *seen->ids);
}

/* -inf for the queries that do not see the key. */
static void hide_key(const struct dsc_attention *attention, const struct dsc_block *queries, int64_t key,
                     dsc_f32 *scores)
{
    struct dsc_token_range sees = dsc_queries_of(attention, key);

    for (int64_t i = 0; i < queries->n; i++)
        if (queries->begin + i < sees.begin || queries->begin + i >= sees.end)
            scores[i] = -INFINITY;
}

/* Computes scores [keys, queries], and the largest score of each query. */
static void make_scores(const struct dsc_attention *attention, const struct dsc_block *queries,
                        const struct dsc_block *keys, const struct seen *seen, dsc_f32 *scores, dsc_f32 *max)
{
    const struct dsc_nn_attention *call = attention->call;
    const struct dsc_nn_kernels *nn = attention->rows.nn;
    struct dsc_document_range documents = dsc_documents_of(attention, keys->batch, keys->begin, keys->n);
    bool hides_documents = call->documents != NULL && dsc_documents_may_differ(seen->documents, documents);
    bool sees_all = dsc_sees_all(attention, queries, keys);
    float slope = dsc_slope_of(attention, queries->batch, queries->head);
    dsc_tile tile;

    dsc_load_tile(attention, &call->k, keys, call->head_dim, attention->qk_cols, 1.0f, tile);
    memset(scores, 0, (size_t)(keys->n * DSC_TILE) * sizeof *scores);
    nn->mul_add(keys->n, DSC_TILE, attention->qk_cols, tile, attention->qk_cols, 1, seen->queries, DSC_TILE, scores,
                DSC_TILE);
    for (int64_t j = 0; j < keys->n; j++) {
        dsc_f32 *of_key = scores + j * DSC_TILE;
        int64_t key = keys->begin + j;

        if (call->soft_cap > 0.0f || slope != 0.0f)
            nn->bend(DSC_TILE, call->soft_cap, slope, (float)(queries->begin + attention->offset - key), of_key);
        if (!sees_all)
            hide_key(attention, queries, key, of_key);
        if (hides_documents) {
            int32_t id = *dsc_documents_at(attention, keys->batch, key);

            nn->hide(DSC_TILE, seen->ids, id < 0 ? INT32_MIN : id, -INFINITY, of_key);
        }
        nn->raise(DSC_TILE, of_key, max);
    }
}

/* Adds the scores of a block of keys to the state. */
static void take_in(const struct dsc_attention *attention, const struct dsc_block *queries,
                    const struct dsc_block *keys, dsc_f32 *scores, const dsc_f32 *max, struct seen *seen)
{
    const struct dsc_nn_attention *call = attention->call;
    const struct dsc_nn_kernels *nn = attention->rows.nn;
    dsc_f32 shift[DSC_TILE];
    dsc_f32 factors[DSC_TILE];
    dsc_f32 sums[DSC_TILE] = {0};
    dsc_f32 ignored[DSC_TILE] = {0};
    dsc_tile tile;

    for (int64_t i = 0; i < DSC_TILE; i++) {
        shift[i] = max[i] == -INFINITY ? 0.0f : max[i]; /* no key seen yet, or only NaN, which must stay */
        factors[i] = seen->max[i];
    }
    nn->exp_below(DSC_TILE, shift, factors, ignored);
    for (int64_t j = 0; j < keys->n; j++)
        nn->exp_below(DSC_TILE, shift, scores + j * DSC_TILE, sums);
    for (int64_t i = 0; i < queries->n; i++) {
        if (max[i] != seen->max[i])
            attention->rows.kernels->scale_f32(attention->v_cols, factors[i], seen->out + i * attention->v_cols);
        seen->sum[i] = seen->sum[i] * (max[i] != seen->max[i] ? (double)factors[i] : 1.0) + (double)sums[i];
        seen->max[i] = max[i];
    }
    dsc_load_tile(attention, &call->v, keys, call->value_dim, attention->v_cols, 1.0f, tile);
    nn->mul_add(queries->n, attention->v_cols, keys->n, scores, 1, DSC_TILE, tile, attention->v_cols, seen->out,
                attention->v_cols);
}

static void end_block(const struct dsc_attention *attention, const struct dsc_block *queries, struct seen *seen)
{
    const struct dsc_nn_attention *call = attention->call;
    float *lse = call->lse + (queries->batch * call->n_heads + queries->head) * call->n_queries + queries->begin;

    for (int64_t i = 0; i < queries->n; i++) {
        double shift = seen->max[i] == -INFINITY ? 0.0 : (double)seen->max[i];
        float factor = seen->sum[i] == 0.0 ? 0.0f : (float)(1.0 / seen->sum[i]);

        attention->rows.kernels->scale_f32(attention->v_cols, factor, seen->out + i * attention->v_cols);
        lse[i] = (float)(shift + log(seen->sum[i]));
    }
    dsc_store_tile(attention, seen->out, attention->v_cols, &call->out, queries, call->value_dim);
}

static void attend(const struct dsc_attention *attention, const struct dsc_block *queries)
{
    const struct dsc_nn_attention *call = attention->call;
    int64_t begin = dsc_keys_of(attention, queries->begin).begin;
    int64_t end = dsc_keys_of(attention, queries->begin + queries->n - 1).end;
    int64_t kv_head = queries->head / (call->n_heads / call->n_kv_heads);
    struct seen seen;

    begin_block(attention, queries, &seen);
    for (int64_t i = begin / DSC_TILE; i * DSC_TILE < end; i++) {
        struct dsc_block keys = dsc_block_at(queries->batch, kv_head, i, call->n_keys);
        dsc_square scores;
        dsc_f32 max[DSC_TILE];

        if (call->documents != NULL &&
            dsc_documents_differ(seen.documents, dsc_documents_of(attention, keys.batch, keys.begin, keys.n)))
            continue;
        memcpy(max, seen.max, sizeof max);
        make_scores(attention, queries, &keys, &seen, scores, max);
        take_in(attention, queries, &keys, scores, max, &seen);
    }
    end_block(attention, queries, &seen);
}

static void attend_chunks(void *arg, int64_t first, int64_t last)
{
    const struct dsc_attention *attention = arg;
    const struct dsc_nn_attention *call = attention->call;
    int64_t n_blocks = dsc_blocks_of(call->n_queries);

    for (int64_t chunk = first; chunk < last; chunk++) {
        int64_t head = chunk / n_blocks % call->n_heads;
        int64_t batch = chunk / n_blocks / call->n_heads;
        int64_t i = chunk % n_blocks;
        /*
         * Blocks are taken alternately from the front and the back, because late blocks of a causal call have more
         * work.
         */
        struct dsc_block queries =
            dsc_block_at(batch, head, i % 2 == 0 ? i / 2 : n_blocks - 1 - i / 2, call->n_queries);

        attend(attention, &queries);
    }
}

dsc_status dsc_nn_attention(const struct dsc_nn_attention *call, const struct dsc_par *par)
{
    struct dsc_attention attention;

    DSC_TRY(dsc_attention_begin(call, &attention));
    dsc_par_run(par, call->n_batch * call->n_heads * dsc_blocks_of(call->n_queries), attend_chunks, &attention);
    return DSC_OK;
}
