/*
 * Attention over blocks of keys and values: one tile of query rows at a time goes over tiles of keys, with an online
 * softmax that begins anew for each part of DSC_KV_PART keys. Tiles and parts lie at fixed keys, and a query row never
 * sees its neighbours, so its bits do not depend on them.
 */
#include "dsc/infer.h"

#include "infer/contents.h"
#include "nn/attention.h"

#include <math.h>
#include <string.h>

#define TILE DSC_TILE /* query rows, and keys */
/* With fewer units of work than this, the parts of a row are units of their own. */
#define MIN_UNITS 64

typedef dsc_f32 tile_of_heads[TILE * DSC_NN_MAX_HEAD_DIM];

struct job {
    struct dsc_rows rows;
    const struct dsc_kv_attention *call;
    int64_t n_group; /* heads of q for each head of k */
    int64_t k_cols;  /* head_dim and value_dim, padded for mul_add */
    int64_t v_cols;
    int64_t n_tiles; /* of query rows: the most that a row of the call has for one head of k */
    int64_t n_parts; /* of keys: the most that a row has */
    bool has_parts;  /* the scratch memory has a state for each part of each unit */
};

/* Some query rows of one row of the call and one head of k. Query row r is token r / n_group, head r % n_group. */
struct queries {
    int64_t row;
    int64_t kv_head;
    int64_t first; /* query row */
    int64_t n;
    int64_t n_keys;
    int64_t positions[TILE];
    int64_t begin[TILE]; /* the keys from begin to end are seen */
    int64_t end[TILE];
    int64_t least; /* the smallest begin and the largest end */
    int64_t most;
    tile_of_heads rows; /* [n, k_cols], times scale */
};

/* The state of the online softmax. */
struct state {
    dsc_f32 max[TILE];
    double sum[TILE];  /* of exp(score - max) */
    tile_of_heads out; /* [n, v_cols], not divided by sum */
};

static int64_t head_of(const struct job *job, const struct queries *queries, int64_t i)
{
    return queries->kv_head * job->n_group + (queries->first + i) % job->n_group;
}

static int64_t ceil_of(int64_t n, int64_t size)
{
    return n / size + (n % size != 0);
}

static void find_seen(const struct job *job, struct queries *queries, int64_t i)
{
    const struct dsc_kv_attention *call = job->call;
    int64_t n_new = call->rows.n_new[queries->row];
    int64_t position = queries->n_keys - n_new + (queries->first + i) / job->n_group;
    int64_t begin = call->first == NULL ? 0 : call->first[queries->row];
    int64_t end = queries->n_keys;

    if (call->window > 0) {
        begin = position - call->window + 1 > begin ? position - call->window + 1 : begin;
        end = position < end - call->window ? position + call->window : end;
    }
    if (call->is_causal && position + 1 < end)
        end = position + 1;
    queries->positions[i] = position;
    queries->begin[i] = begin;
    queries->end[i] = end;
    if (end > begin) {
        queries->least = begin < queries->least ? begin : queries->least;
        queries->most = end > queries->most ? end : queries->most;
    }
}

/* false where the row of the call has fewer tiles. */
static bool begin_queries(const struct job *job, int64_t unit, struct queries *queries)
{
    const struct dsc_kv_attention *call = job->call;
    const struct dsc_kv_shape *shape = &call->shape;
    int64_t row = unit / job->n_tiles / shape->n_kv_heads;
    int64_t n_rows = call->rows.n_new[row] * job->n_group;
    int64_t token = dsc_kv_first_token(&call->rows, row);

    queries->row = row;
    queries->kv_head = unit / job->n_tiles % shape->n_kv_heads;
    queries->first = unit % job->n_tiles * TILE;
    if (queries->first >= n_rows)
        return false;
    queries->n = n_rows - queries->first < TILE ? n_rows - queries->first : TILE;
    queries->n_keys = call->rows.n_keys[row];
    queries->least = INT64_MAX;
    queries->most = 0;
    for (int64_t i = 0; i < queries->n; i++) {
        dsc_f32 *to = queries->rows + i * job->k_cols;
        int64_t at = (token + (queries->first + i) / job->n_group) * call->q.strides[0] +
                     head_of(job, queries, i) * call->q.strides[1];
        const dsc_f32 *from =
            dsc_load(&job->rows, shape->dtype, dsc_at(call->q.data, shape->dtype, at), shape->head_dim, to);

        if (from != to)
            memcpy(to, from, (size_t)shape->head_dim * sizeof *to);
        memset(to + shape->head_dim, 0, (size_t)(job->k_cols - shape->head_dim) * sizeof *to);
        job->rows.kernels->scale_f32(job->k_cols, call->scale, to);
        find_seen(job, queries, i);
    }
    return true;
}

static void begin_state(const struct job *job, const struct queries *queries, const float *sinks, struct state *state)
{
    for (int64_t i = 0; i < TILE; i++) {
        bool has_sink = sinks != NULL && i < queries->n;

        state->max[i] = has_sink ? sinks[head_of(job, queries, i)] : -INFINITY;
        state->sum[i] = has_sink ? 1.0 : 0.0;
    }
    memset(state->out, 0, (size_t)(queries->n * job->v_cols) * sizeof *state->out);
}

/* Scores [n, TILE] of the keys from `key` on; raises max. */
static void make_scores(const struct job *job, const struct queries *queries, int64_t key, const dsc_f32 *keys,
                        dsc_f32 *scores, dsc_f32 *max)
{
    const struct dsc_kv_attention *call = job->call;

    memset(scores, 0, (size_t)(queries->n * TILE) * sizeof *scores);
    job->rows.nn->mul_add(queries->n, TILE, call->shape.head_dim, queries->rows, job->k_cols, 1, keys, TILE, scores,
                          TILE);
    for (int64_t i = 0; i < queries->n; i++) {
        dsc_f32 *of_row = scores + i * TILE;
        float slope = call->slopes == NULL ? 0.0f : call->slopes[head_of(job, queries, i)];
        int64_t begin = queries->begin[i] - key;
        int64_t end = queries->end[i] - key;

        if (call->soft_cap > 0.0f || slope != 0.0f)
            job->rows.nn->bend(TILE, call->soft_cap, slope, (float)(key - queries->positions[i]), of_row);
        for (int64_t j = 0; j < (begin < TILE ? begin : TILE); j++)
            of_row[j] = -INFINITY;
        for (int64_t j = end > 0 ? end : 0; j < TILE; j++)
            of_row[j] = -INFINITY;
        job->rows.nn->scores(TILE, DSC_DTYPE_F32, of_row, 1.0f, NULL, of_row, &max[i]);
    }
}

/* Adds the scores of a tile of keys to the state. */
static void take_in(const struct job *job, const struct queries *queries, dsc_f32 *scores, const dsc_f32 *max,
                    const dsc_f32 *values, struct state *state)
{
    dsc_f32 shift[TILE];
    dsc_f32 factors[TILE];
    dsc_f32 ignored[TILE] = {0};

    for (int64_t i = 0; i < TILE; i++) {
        shift[i] = max[i] == -INFINITY ? 0.0f : max[i]; /* no key seen yet, or only NaN, which must stay */
        factors[i] = state->max[i];
    }
    job->rows.nn->exp_below(TILE, shift, factors, ignored);
    for (int64_t i = 0; i < queries->n; i++) {
        dsc_f32 *of_row = scores + i * TILE;
        double sum = 0;

        job->rows.nn->exps(TILE, of_row, shift[i], of_row, DSC_DTYPE_F32, of_row, &sum);
        if (max[i] != state->max[i]) {
            job->rows.kernels->scale_f32(job->v_cols, factors[i], state->out + i * job->v_cols);
            state->sum[i] *= (double)factors[i];
        }
        state->sum[i] += sum;
        state->max[i] = max[i];
    }
    job->rows.nn->mul_add(queries->n, job->v_cols, TILE, scores, TILE, 1, values, job->v_cols, state->out, job->v_cols);
}

/* The state of the keys of one part. */
static void attend_part(const struct job *job, const struct queries *queries, int64_t part, struct state *state)
{
    int64_t begin = part * DSC_KV_PART;
    int64_t end = begin + DSC_KV_PART < queries->most ? begin + DSC_KV_PART : queries->most;

    begin_state(job, queries, NULL, state);
    begin = queries->least > begin ? queries->least / TILE * TILE : begin;
    for (int64_t key = begin; key < end; key += TILE) {
        DSC_ALIGNED tile_of_heads keys;
        DSC_ALIGNED tile_of_heads values;
        DSC_ALIGNED dsc_f32 scores[TILE * TILE];
        dsc_f32 max[TILE];

        dsc_kv_load(&job->rows, job->call, queries->row, queries->kv_head, key, TILE, keys, values, job->v_cols);
        memcpy(max, state->max, sizeof max);
        make_scores(job, queries, key, keys, scores, max);
        take_in(job, queries, scores, max, values, state);
    }
}

/* Adds the state of a part to the state of all earlier parts. */
static void merge(const struct job *job, const struct queries *queries, const struct state *part, struct state *state)
{
    dsc_f32 shift[TILE];
    dsc_f32 old_factors[TILE];
    dsc_f32 new_factors[TILE];
    dsc_f32 ignored[TILE] = {0};

    for (int64_t i = 0; i < TILE; i++) {
        dsc_f32 max = part->max[i] > state->max[i] ? part->max[i] : state->max[i];

        shift[i] = max == -INFINITY ? 0.0f : max;
        old_factors[i] = state->max[i];
        new_factors[i] = part->max[i];
        state->max[i] = max;
    }
    job->rows.nn->exp_below(TILE, shift, old_factors, ignored);
    job->rows.nn->exp_below(TILE, shift, new_factors, ignored);
    for (int64_t i = 0; i < queries->n; i++) {
        dsc_f32 *out = state->out + i * job->v_cols;

        job->rows.kernels->scale_f32(job->v_cols, old_factors[i], out);
        job->rows.nn->mul_add(1, job->v_cols, 1, &new_factors[i], 1, 1, part->out + i * job->v_cols, job->v_cols, out,
                              job->v_cols);
        state->sum[i] = state->sum[i] * (double)old_factors[i] + part->sum[i] * (double)new_factors[i];
    }
}

static void end_queries(const struct job *job, const struct queries *queries, struct state *state)
{
    const struct dsc_kv_attention *call = job->call;
    int64_t token = dsc_kv_first_token(&call->rows, queries->row);

    for (int64_t i = 0; i < queries->n; i++) {
        float factor = state->sum[i] == 0.0 ? 0.0f : (float)(1.0 / state->sum[i]);
        int64_t at = (token + (queries->first + i) / job->n_group) * call->out.strides[0] +
                     head_of(job, queries, i) * call->out.strides[1];

        job->rows.kernels->scale_f32(job->v_cols, factor, state->out + i * job->v_cols);
        dsc_store(&job->rows, call->shape.dtype, state->out + i * job->v_cols, call->shape.value_dim,
                  dsc_at_out(call->out.data, call->shape.dtype, at));
    }
}

static bool sees_part(const struct queries *queries, int64_t part)
{
    return part * DSC_KV_PART < queries->most && queries->least < (part + 1) * DSC_KV_PART;
}

/* Parts of units, each into its own state in the scratch memory. */
static void attend_parts(void *arg, int64_t begin, int64_t end)
{
    const struct job *job = arg;
    struct state *states = job->call->scratch;
    struct queries queries;

    for (int64_t i = begin; i < end; i++) {
        if (!begin_queries(job, i / job->n_parts, &queries) || !sees_part(&queries, i % job->n_parts))
            continue;
        attend_part(job, &queries, i % job->n_parts, &states[i]);
    }
}

/* Units: each goes over its parts, which are computed here or lie in the scratch memory. */
static void attend_units(void *arg, int64_t begin, int64_t end)
{
    const struct job *job = arg;
    const struct state *states = job->has_parts ? job->call->scratch : NULL;
    struct queries queries;
    struct state state;
    struct state part;

    for (int64_t unit = begin; unit < end; unit++) {
        if (!begin_queries(job, unit, &queries))
            continue;
        begin_state(job, &queries, job->call->sinks, &state);
        for (int64_t i = 0; i < job->n_parts; i++) {
            if (!sees_part(&queries, i))
                continue;
            if (states == NULL)
                attend_part(job, &queries, i, &part);
            merge(job, &queries, states == NULL ? &part : &states[unit * job->n_parts + i], &state);
        }
        end_queries(job, &queries, &state);
    }
}

static struct job job_of(const struct dsc_kv_attention *call)
{
    struct job job = {
        .rows = dsc_rows_of(call->rows.n_rows, DSC_NN_MAX_HEAD_DIM),
        .call = call,
        .n_group = call->shape.n_kv_heads == 0 ? 0 : call->n_heads / call->shape.n_kv_heads,
        .k_cols = dsc_padded(call->shape.head_dim),
        .v_cols = dsc_padded(call->shape.value_dim),
    };

    for (int64_t row = 0; row < call->rows.n_rows; row++) {
        int64_t n_tiles = ceil_of(call->rows.n_new[row] * job.n_group, TILE);
        int64_t n_parts = ceil_of(call->rows.n_keys[row], DSC_KV_PART);

        job.n_tiles = n_tiles > job.n_tiles ? n_tiles : job.n_tiles;
        job.n_parts = n_parts > job.n_parts ? n_parts : job.n_parts;
    }
    return job;
}

static int64_t units_of(const struct job *job)
{
    return job->call->rows.n_rows * job->call->shape.n_kv_heads * job->n_tiles;
}

size_t dsc_kv_attention_scratch_bytes(const struct dsc_kv_attention *call)
{
    struct job job = job_of(call);

    if (job.n_parts < 2 || units_of(&job) >= MIN_UNITS)
        return 0;
    return (size_t)(units_of(&job) * job.n_parts) * sizeof(struct state);
}

static dsc_status check_call(const struct dsc_kv_attention *call)
{
    const struct dsc_kv_shape *shape = &call->shape;

    DSC_TRY(dsc_kv_check(shape, &call->rows));
    DSC_TRY(dsc_check_rules(call->n_heads, shape->n_kv_heads, call->window, call->soft_cap, call->scale));
    for (int64_t row = 0; call->first != NULL && row < call->rows.n_rows; row++)
        if (call->first[row] < 0)
            return dsc_fail(DSC_EINVAL, "first[%lld] is %lld, must not be negative", (long long)row,
                            (long long)call->first[row]);
    return CHECK_PRESENT(dsc_kv_first_token(&call->rows, call->rows.n_rows) * call->n_heads, NAMED(call, q.data),
                         NAMED(call, out.data), NAMED(call, keys), NAMED(call, values));
}

dsc_status dsc_kv_attention(const struct dsc_kv_attention *call, const struct dsc_par *par)
{
    DSC_TRY(check_call(call));

    struct job job = job_of(call);

    job.has_parts = call->scratch != NULL && dsc_kv_attention_scratch_bytes(call) > 0;
    if (job.has_parts)
        dsc_par_run(par, units_of(&job) * job.n_parts, attend_parts, &job);
    if (units_of(&job) > 0)
        dsc_par_run(par, units_of(&job), attend_units, &job);
    return DSC_OK;
}
