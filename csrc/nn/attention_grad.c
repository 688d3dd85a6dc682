/*
 * Attention, backward: each block of keys goes over the blocks of queries that see it, and recomputes their
 * probabilities. Gradients of q are summed in parts, since several blocks of keys are processed at the same time.
 */
#include "nn/attention.h"

#include <math.h>
#include <string.h>

/*
 * The largest number of parts of the keys that are processed at the same time. With few heads there are more parts, to
 * give all threads work.
 */
#define MAX_PARTS 4
#define WANTED_SHARES 16

struct grad_job {
    struct dsc_attention attention;
    const struct dsc_nn_attention_grad *call;
    int64_t n_parts;
    float *delta; /* [n_query_rows]: dout out - dlse */
    float *dq;    /* [n_parts, n_query_rows, qk_cols], before scale */
};

static int64_t parts_of(const struct dsc_nn_attention *forward)
{
    int64_t n_heads = forward->n_batch * forward->n_kv_heads;
    int64_t n_parts = n_heads > 0 ? (WANTED_SHARES + n_heads - 1) / n_heads : 1;

    return n_parts < MAX_PARTS ? n_parts : MAX_PARTS;
}

int64_t dsc_nn_attention_scratch_elems(const struct dsc_nn_attention *forward)
{
    struct dsc_attention attention;

    if (dsc_attention_begin(forward, &attention) != DSC_OK)
        return 0;
    return attention.rows.n_rows * (1 + parts_of(forward) * attention.qk_cols);
}

/* Row `row` of [n_batch, n_heads, n_queries] within heads. */
static const void *row_at(const struct dsc_nn_attention *forward, const struct dsc_nn_heads *heads, int64_t row)
{
    int64_t query = row % forward->n_queries;
    int64_t head = row / forward->n_queries % forward->n_heads;
    int64_t batch = row / forward->n_queries / forward->n_heads;

    return dsc_at(heads->data, forward->dtype,
                  batch * heads->strides[0] + head * heads->strides[1] + query * heads->strides[2]);
}

static void delta_row(const void *arg, int64_t row, float *const *sums)
{
    const struct grad_job *job = arg;
    const struct dsc_nn_attention *forward = job->attention.call;
    const struct dsc_rows *rows = &job->attention.rows;
    dsc_f32 scratch[2][DSC_TILE_DIM];
    const dsc_f32 *out =
        dsc_load(rows, forward->dtype, row_at(forward, &forward->out, row), forward->value_dim, scratch[0]);
    const dsc_f32 *dout =
        dsc_load(rows, forward->dtype, row_at(forward, &job->call->dout, row), forward->value_dim, scratch[1]);
    double sum = job->call->dlse == NULL ? 0.0 : -(double)job->call->dlse[row];

    (void)sums;
    rows->nn->dot(forward->value_dim, out, dout, &sum);
    job->delta[row] = (float)sum;
}

/* A block of keys, and the sums of its gradients. */
struct keys_block {
    struct dsc_block at;
    struct dsc_document_range documents;
    dsc_tile k;         /* [keys, qk_cols] */
    dsc_tile k_columns; /* [qk_cols, DSC_TILE] */
    dsc_tile v_columns; /* [v_cols, DSC_TILE] */
    dsc_tile dk;
    dsc_tile dv;
};

/* Sets to zero the keys of a block that a query does not see. */
static void hide_row(const struct grad_job *job, const struct keys_block *keys, int64_t query, bool hides_documents,
                     dsc_f32 *p, dsc_f32 *ds)
{
    const struct dsc_attention *attention = &job->attention;
    struct dsc_token_range seen = dsc_keys_of(attention, query);

    for (int64_t j = 0; j < DSC_TILE; j++) {
        int64_t key = keys->at.begin + j;

        if (key < seen.begin || key >= seen.end)
            p[j] = ds[j] = 0.0f;
    }
    if (!hides_documents)
        return;

    int32_t id = *dsc_documents_at(attention, keys->at.batch, query + attention->offset);
    const int32_t *ids = dsc_documents_at(attention, keys->at.batch, keys->at.begin);

    attention->rows.nn->hide(keys->at.n, ids, id < 0 ? INT32_MIN : id, 0.0f, p);
    attention->rows.nn->hide(keys->at.n, ids, id < 0 ? INT32_MIN : id, 0.0f, ds);
}

/* Computes probabilities in p and gradients of the raw scores in ds. On entry both hold products. */
static void make_gradients(const struct grad_job *job, const struct dsc_block *queries, const struct keys_block *keys,
                           bool hides_documents, dsc_f32 *p, dsc_f32 *ds)
{
    const struct dsc_attention *attention = &job->attention;
    const struct dsc_nn_attention *forward = attention->call;
    int64_t first_row = (queries->batch * forward->n_heads + queries->head) * forward->n_queries + queries->begin;
    bool sees_all = dsc_sees_all(attention, queries, &keys->at);
    float slope = dsc_slope_of(attention, queries->batch, queries->head);

    for (int64_t i = 0; i < queries->n; i++) {
        float lse = forward->lse[first_row + i];
        int64_t query = queries->begin + i;

        if (lse == -INFINITY) { /* sees nothing */
            memset(p + i * DSC_TILE, 0, DSC_TILE * sizeof *p);
            memset(ds + i * DSC_TILE, 0, DSC_TILE * sizeof *ds);
            continue;
        }
        attention->rows.nn->attention_grad(DSC_TILE, forward->soft_cap, slope,
                                           (float)(query + attention->offset - keys->at.begin), lse,
                                           job->delta[first_row + i], p + i * DSC_TILE, ds + i * DSC_TILE);
        if (!sees_all || hides_documents)
            hide_row(job, keys, query, hides_documents, p + i * DSC_TILE, ds + i * DSC_TILE);
    }
}

/* Adds the gradients between a block of queries and the block of keys. */
static void meet(const struct grad_job *job, const struct dsc_block *queries, float *dq, struct keys_block *keys)
{
    const struct dsc_attention *attention = &job->attention;
    const struct dsc_nn_attention *forward = attention->call;
    const struct dsc_nn_kernels *nn = attention->rows.nn;
    int64_t qk_cols = attention->qk_cols;
    int64_t v_cols = attention->v_cols;
    struct dsc_document_range documents =
        dsc_documents_of(attention, queries->batch, queries->begin + attention->offset, queries->n);
    dsc_tile q;
    dsc_tile dout;
    dsc_square p = {0};
    dsc_square ds = {0};

    if (forward->documents != NULL && dsc_documents_differ(documents, keys->documents))
        return;
    dsc_load_tile(attention, &forward->q, queries, forward->head_dim, qk_cols, forward->scale, q);
    dsc_load_tile(attention, &job->call->dout, queries, forward->value_dim, v_cols, 1.0f, dout);
    nn->mul_add(queries->n, DSC_TILE, qk_cols, q, qk_cols, 1, keys->k_columns, DSC_TILE, p, DSC_TILE);
    nn->mul_add(queries->n, DSC_TILE, v_cols, dout, v_cols, 1, keys->v_columns, DSC_TILE, ds, DSC_TILE);
    make_gradients(job, queries, keys,
                   forward->documents != NULL && dsc_documents_may_differ(documents, keys->documents), p, ds);
    nn->mul_add(keys->at.n, v_cols, queries->n, p, 1, DSC_TILE, dout, v_cols, keys->dv, v_cols);
    nn->mul_add(keys->at.n, qk_cols, queries->n, ds, 1, DSC_TILE, q, qk_cols, keys->dk, qk_cols);
    nn->mul_add(queries->n, qk_cols, keys->at.n, ds, DSC_TILE, 1, keys->k, qk_cols, (dsc_f32 *)dq, qk_cols);
}

static void begin_keys(const struct grad_job *job, const struct dsc_block *at, struct keys_block *keys)
{
    const struct dsc_attention *attention = &job->attention;
    const struct dsc_nn_attention *forward = attention->call;

    keys->at = *at;
    keys->documents = dsc_documents_of(attention, at->batch, at->begin, at->n);
    dsc_load_tile(attention, &forward->v, at, forward->value_dim, attention->v_cols, 1.0f, keys->k);
    dsc_transpose_tile(keys->k, at->n, attention->v_cols, keys->v_columns);
    dsc_load_tile(attention, &forward->k, at, forward->head_dim, attention->qk_cols, 1.0f, keys->k);
    dsc_transpose_tile(keys->k, at->n, attention->qk_cols, keys->k_columns);
    memset(keys->dk, 0, (size_t)(at->n * attention->qk_cols) * sizeof *keys->dk);
    memset(keys->dv, 0, (size_t)(at->n * attention->v_cols) * sizeof *keys->dv);
}

/* Processes all queries that see one block of keys, in all heads that share the block. */
static void run_keys(const struct grad_job *job, const struct dsc_block *at, float *dq)
{
    const struct dsc_attention *attention = &job->attention;
    const struct dsc_nn_attention *forward = attention->call;
    int64_t n_sharing = forward->n_heads / forward->n_kv_heads;
    int64_t begin = dsc_queries_of(attention, at->begin).begin;
    int64_t end = dsc_queries_of(attention, at->begin + at->n - 1).end;
    struct keys_block keys;

    begin_keys(job, at, &keys);
    for (int64_t head = at->head * n_sharing; head < (at->head + 1) * n_sharing; head++) {
        int64_t first_row = (at->batch * forward->n_heads + head) * forward->n_queries;

        for (int64_t i = begin / DSC_TILE; i * DSC_TILE < end; i++) {
            struct dsc_block queries = dsc_block_at(at->batch, head, i, forward->n_queries);

            meet(job, &queries, dq + (first_row + queries.begin) * attention->qk_cols, &keys);
        }
    }
    dsc_store_tile(attention, keys.dk, attention->qk_cols, &job->call->dk, at, forward->head_dim);
    dsc_store_tile(attention, keys.dv, attention->v_cols, &job->call->dv, at, forward->value_dim);
}

/*
 * A chunk is one part of the keys of one head. A part is every n_parts-th block, so that all parts of a causal call
 * take equally long.
 */
static void grad_chunks(void *arg, int64_t first, int64_t last)
{
    const struct grad_job *job = arg;
    const struct dsc_attention *attention = &job->attention;
    const struct dsc_nn_attention *forward = attention->call;
    int64_t n_sharing = forward->n_heads / forward->n_kv_heads;
    int64_t part_elems = attention->rows.n_rows * attention->qk_cols;

    for (int64_t chunk = first; chunk < last; chunk++) {
        int64_t part = chunk % job->n_parts;
        int64_t head = chunk / job->n_parts % forward->n_kv_heads;
        int64_t batch = chunk / job->n_parts / forward->n_kv_heads;
        float *dq = job->dq + part * part_elems;
        int64_t first_row = (batch * forward->n_heads + head * n_sharing) * forward->n_queries;

        if (forward->n_queries > 0)
            memset(dq + first_row * attention->qk_cols, 0,
                   (size_t)(n_sharing * forward->n_queries * attention->qk_cols) * sizeof *dq);
        for (int64_t i = part; i < dsc_blocks_of(forward->n_keys); i += job->n_parts) {
            struct dsc_block at = dsc_block_at(batch, head, i, forward->n_keys);

            run_keys(job, &at, dq);
        }
    }
}

/* Sums the parts of one row of dq, in order. */
static void fold_row(const void *arg, int64_t row, float *const *sums)
{
    const struct grad_job *job = arg;
    const struct dsc_attention *attention = &job->attention;
    const struct dsc_nn_attention *forward = attention->call;
    int64_t qk_cols = attention->qk_cols;
    const dsc_f32 *dq = (const dsc_f32 *)job->dq + row * qk_cols;
    dsc_f32 sum[DSC_TILE_DIM];

    (void)sums;
    memcpy(sum, dq, (size_t)qk_cols * sizeof *sum);
    for (int64_t part = 1; part < job->n_parts; part++)
        attention->rows.kernels->add_f32(qk_cols, dq + part * attention->rows.n_rows * qk_cols, sum);
    attention->rows.kernels->scale_f32(qk_cols, forward->scale, sum);
    dsc_store(&attention->rows, forward->dtype, sum, forward->head_dim, (void *)row_at(forward, &job->call->dq, row));
}

/* A sink is a score without a value: its gradient is its probability times -delta, over all queries. */
static void sink_chunks(void *arg, int64_t first, int64_t last)
{
    const struct grad_job *job = arg;
    const struct dsc_nn_attention *forward = job->attention.call;

    for (int64_t head = first; head < last; head++) {
        double sum = 0.0;

        for (int64_t batch = 0; batch < forward->n_batch; batch++) {
            int64_t first_row = (batch * forward->n_heads + head) * forward->n_queries;

            for (int64_t begin = 0; begin < forward->n_queries; begin += DSC_TILE) {
                int64_t n = forward->n_queries - begin < DSC_TILE ? forward->n_queries - begin : DSC_TILE;
                dsc_f32 p[DSC_TILE];
                dsc_f32 ignored[DSC_TILE] = {0};

                for (int64_t i = 0; i < n; i++)
                    p[i] = forward->sinks[head];
                job->attention.rows.nn->exp_below(n, (const dsc_f32 *)forward->lse + first_row + begin, p, ignored);
                for (int64_t i = 0; i < n; i++)
                    sum -= (double)p[i] * (double)job->delta[first_row + begin + i];
            }
        }
        job->call->dsinks[head] = (float)sum;
    }
}

dsc_status dsc_nn_attention_grad(const struct dsc_nn_attention_grad *call, const struct dsc_par *par)
{
    const struct dsc_nn_attention *forward = &call->forward;
    struct grad_job job = {.call = call, .n_parts = parts_of(forward)};

    DSC_TRY(dsc_attention_begin(forward, &job.attention));

    int64_t n_rows = job.attention.rows.n_rows;
    int64_t n_key_rows = forward->n_batch * forward->n_kv_heads * forward->n_keys;

    DSC_TRY(dsc_check_heads("dout", &call->dout, n_rows));
    DSC_TRY(dsc_check_heads("dq", &call->dq, n_rows));
    DSC_TRY(dsc_check_heads("dk", &call->dk, n_key_rows));
    DSC_TRY(dsc_check_heads("dv", &call->dv, n_key_rows));
    DSC_TRY(CHECK_PRESENT(n_rows, NAMED(call, scratch)));
    if (call->dsinks != NULL && forward->sinks == NULL)
        return dsc_fail(DSC_EINVAL, "dsinks are wanted of a call without sinks");
    job.delta = call->scratch;
    job.dq = n_rows > 0 ? call->scratch + n_rows : NULL;
    dsc_rows_run(&job.attention.rows, NULL, delta_row, &job, par);
    dsc_par_run(par, forward->n_batch * forward->n_kv_heads * job.n_parts, grad_chunks, &job);
    dsc_rows_run(&job.attention.rows, NULL, fold_row, &job, par);
    if (call->dsinks != NULL)
        dsc_par_run(par, forward->n_heads, sink_chunks, &job);
    return DSC_OK;
}
