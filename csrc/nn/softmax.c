/* Softmax over the keys of each query, with a mask, and its gradient. */
#include "dsc/nn.h"

#include "nn/rows.h"

#include <math.h>
#include <string.h>

struct softmax_job {
    struct dsc_rows rows;
    const struct dsc_nn_softmax *call;
};

/*
 * The scores of rows with up to this many keys are kept in one buffer; for longer rows the scores are computed three
 * times.
 */
#define ROW_ELEMS (4 * DSC_BLOCK_ELEMS)

/* One row: its address, the address of its mask, and how many of its keys are seen. */
struct scores_row {
    const void *x;
    void *y;
    int64_t mask;
    int64_t n_seen;
};

static struct scores_row row_of(const struct dsc_nn_softmax *call, int64_t row)
{
    int64_t query = row % call->n_queries;
    int64_t head = row / call->n_queries % call->n_heads;
    int64_t batch = row / call->n_queries / call->n_heads;
    int64_t n_seen = call->n_keys;

    if (call->is_causal && query + call->n_keys - call->n_queries + 1 < n_seen)
        n_seen = query + call->n_keys - call->n_queries + 1;
    return (struct scores_row){
        .x = dsc_at(call->x, call->dtype, row * call->n_keys),
        .y = dsc_at_out(call->y, call->dtype, row * call->n_keys),
        .mask = batch * call->mask_strides[0] + head * call->mask_strides[1] + query * call->mask_strides[2],
        .n_seen = n_seen < 0 ? 0 : n_seen,
    };
}

/* Writes scale * x + mask of n elements to scores, with -inf for masked elements; raises *max. */
static void load_scores(const struct softmax_job *job, const struct scores_row *row, int64_t begin, int64_t n,
                        dsc_f32 *scores, float *max)
{
    const struct dsc_nn_softmax *call = job->call;
    const struct dsc_nn_kernels *nn = job->rows.nn;
    const void *x = dsc_at(row->x, call->dtype, begin);

    if (call->mask_kind == DSC_NN_MASK_KEEP)
        nn->scores_kept(n, call->dtype, x, call->scale, (const uint8_t *)call->mask + row->mask + begin, scores, max);
    else
        nn->scores(n, call->dtype, x, call->scale,
                   call->mask_kind == DSC_NN_MASK_ADD ? dsc_at(call->mask, call->dtype, row->mask + begin) : NULL,
                   scores, max);
}

static void softmax_row(const void *arg, int64_t row_index, float *const *sums)
{
    const struct softmax_job *job = arg;
    const struct dsc_nn_softmax *call = job->call;
    const struct dsc_rows *rows = &job->rows;
    const struct scores_row row = row_of(call, row_index);
    bool is_short = row.n_seen <= ROW_ELEMS;
    DSC_ALIGNED dsc_f32 scores[ROW_ELEMS];
    float max = -INFINITY;
    float ignored_max = -INFINITY;
    double sum = 0.0;
    double ignored_sum = 0.0;

    (void)sums;
    for (int64_t begin = 0; begin < row.n_seen; begin += DSC_BLOCK_ELEMS)
        load_scores(job, &row, begin, dsc_block_of(row.n_seen - begin), scores + (is_short ? begin : 0), &max);
    if (max == -INFINITY) /* no key is seen, or only NaN, which must stay */
        max = 0.0f;
    for (int64_t begin = 0; begin < row.n_seen; begin += DSC_BLOCK_ELEMS) {
        int64_t n = dsc_block_of(row.n_seen - begin);
        dsc_f32 *block = scores + (is_short ? begin : 0);

        if (!is_short)
            load_scores(job, &row, begin, n, block, &ignored_max);
        rows->nn->exps(n, block, max, block, call->dtype, dsc_at_out(row.y, call->dtype, begin), &sum);
    }

    float factor = sum == 0.0 ? 0.0f : (float)(1.0 / sum);

    for (int64_t begin = 0; begin < row.n_seen; begin += DSC_BLOCK_ELEMS) {
        int64_t n = dsc_block_of(row.n_seen - begin);
        dsc_f32 *block = scores + (is_short ? begin : 0);

        if (!is_short) {
            load_scores(job, &row, begin, n, block, &ignored_max);
            rows->nn->exps(n, block, max, block, call->dtype, dsc_at_out(row.y, call->dtype, begin), &ignored_sum);
        }
        rows->nn->scaled(n, block, factor, call->dtype, dsc_at_out(row.y, call->dtype, begin));
    }
    memset(dsc_at_out(row.y, call->dtype, row.n_seen), 0,
           (size_t)(call->n_keys - row.n_seen) * dsc_dtype_bytes(call->dtype));
}

dsc_status dsc_nn_softmax_check(const struct dsc_nn_softmax *call)
{
    int64_t n_rows;

    DSC_TRY(dsc_check_dims("batch, heads and queries", call->n_batch, call->n_heads, call->n_queries, &n_rows));
    DSC_TRY(dsc_check_rows(n_rows, call->n_keys, call->dtype));
    if (call->mask_kind != DSC_NN_MASK_NONE && call->mask_kind != DSC_NN_MASK_ADD &&
        call->mask_kind != DSC_NN_MASK_KEEP)
        return dsc_fail(DSC_EINVAL, "mask_kind is %d, which is no dsc_nn_mask", (int)call->mask_kind);
    DSC_TRY(CHECK_PRESENT(n_rows, NAMED(call, x), NAMED(call, y)));
    if (call->mask_kind != DSC_NN_MASK_NONE)
        DSC_TRY(CHECK_PRESENT(n_rows, NAMED(call, mask)));
    return DSC_OK;
}

dsc_status dsc_nn_softmax(const struct dsc_nn_softmax *call, const struct dsc_par *par)
{
    DSC_TRY(dsc_nn_softmax_check(call));

    struct softmax_job job = {dsc_rows_of(call->n_batch * call->n_heads * call->n_queries, call->n_keys), call};

    dsc_rows_run(&job.rows, NULL, softmax_row, &job, par);
    return DSC_OK;
}

struct softmax_grad_job {
    struct dsc_rows rows;
    const struct dsc_nn_softmax_grad *call;
};

static void softmax_grad_row(const void *arg, int64_t row, float *const *sums)
{
    const struct softmax_grad_job *job = arg;
    const struct dsc_nn_softmax_grad *call = job->call;
    const struct dsc_nn_kernels *nn = job->rows.nn;
    const void *y = dsc_at(call->y, call->dtype, row * call->n_cols);
    const void *dy = dsc_at(call->dy, call->dtype, row * call->n_cols);
    void *dx = dsc_at_out(call->dx, call->dtype, row * call->n_cols);
    double sum = 0.0;

    (void)sums;
    for (int64_t begin = 0; begin < call->n_cols; begin += DSC_BLOCK_ELEMS)
        nn->softmax_dot(dsc_block_of(call->n_cols - begin), call->dtype, dsc_at(y, call->dtype, begin),
                        dsc_at(dy, call->dtype, begin), &sum);
    nn->softmax_grad(call->n_cols, call->dtype, y, dy, (float)sum, call->scale, dx);
}

dsc_status dsc_nn_softmax_grad_check(const struct dsc_nn_softmax_grad *call)
{
    DSC_TRY(dsc_check_rows(call->n_rows, call->n_cols, call->dtype));
    DSC_TRY(CHECK_PRESENT(call->n_rows, NAMED(call, y), NAMED(call, dy), NAMED(call, dx)));
    return DSC_OK;
}

dsc_status dsc_nn_softmax_grad(const struct dsc_nn_softmax_grad *call, const struct dsc_par *par)
{
    DSC_TRY(dsc_nn_softmax_grad_check(call));

    struct softmax_grad_job job = {dsc_rows_of(call->n_rows, call->n_cols), call};

    dsc_rows_run(&job.rows, NULL, softmax_grad_row, &job, par);
    return DSC_OK;
}
