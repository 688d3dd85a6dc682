/* Softmax over the keys of each query, with a mask, and its gradient. */
#include "dsc/nn.h"

#include "nn/rows.h"

#include <math.h>
#include <string.h>

struct softmax_job {
    struct dsc_rows rows;
    const struct dsc_nn_softmax *call;
};

/* Rows of up to so many keys are worked on in one place; of longer ones the scores are computed three times. */
#define ROW_ELEMS (4 * DSC_BLOCK_ELEMS)

/* One row: where it lies, where its mask does, and how many of its keys are seen. */
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

/* scale * x + mask of n elements, -inf where the mask leaves out, in scores; raises *max. */
static void load_scores(const struct softmax_job *job, const struct scores_row *row, int64_t begin, int64_t n,
                        dsc_f32 *scores, float *max)
{
    const struct dsc_nn_softmax *call = job->call;
    const struct dsc_rows *rows = &job->rows;
    DSC_ALIGNED dsc_f32 scratch[DSC_BLOCK_ELEMS];
    const dsc_f32 *x = dsc_load(rows, call->dtype, dsc_at(row->x, call->dtype, begin), n, scores);

    if (call->mask_kind == DSC_NN_MASK_KEEP) {
        rows->nn->scores_kept(n, x, call->scale, (const uint8_t *)call->mask + row->mask + begin, scores, max);
    } else {
        const void *added =
            call->mask_kind == DSC_NN_MASK_ADD ? dsc_at(call->mask, call->dtype, row->mask + begin) : NULL;

        rows->nn->scores(n, x, call->scale, dsc_load(rows, call->dtype, added, n, scratch), scores, max);
    }
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
    if (max == -INFINITY) /* nothing is seen, or NaN alone, which must stay */
        max = 0.0f;
    for (int64_t begin = 0; begin < row.n_seen; begin += DSC_BLOCK_ELEMS) {
        int64_t n = dsc_block_of(row.n_seen - begin);
        dsc_f32 *block = scores + (is_short ? begin : 0);

        if (!is_short)
            load_scores(job, &row, begin, n, block, &ignored_max);
        rows->nn->exps(n, block, max, block, &sum);
    }

    float factor = sum == 0.0 ? 0.0f : (float)(1.0 / sum);

    for (int64_t begin = 0; begin < row.n_seen; begin += DSC_BLOCK_ELEMS) {
        int64_t n = dsc_block_of(row.n_seen - begin);
        dsc_f32 *block = scores + (is_short ? begin : 0);

        if (!is_short) {
            load_scores(job, &row, begin, n, block, &ignored_max);
            rows->nn->exps(n, block, max, block, &ignored_sum);
        }
        rows->kernels->scale_f32(n, factor, block);
        dsc_store(rows, call->dtype, block, n, dsc_at_out(row.y, call->dtype, begin));
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

/* One block of each operand. */
struct softmax_block {
    const dsc_f32 *y;
    const dsc_f32 *dy;
};

/* Loads a block; 16-bit elements are widened into kept from element at. */
static struct softmax_block load_pair(const struct softmax_grad_job *job, int64_t row, int64_t begin, int64_t n,
                                      dsc_f32 (*kept)[ROW_ELEMS], int64_t at)
{
    const struct dsc_nn_softmax_grad *call = job->call;
    int64_t i = row * call->n_cols + begin;

    return (struct softmax_block){
        dsc_load(&job->rows, call->dtype, dsc_at(call->y, call->dtype, i), n, kept[0] + at),
        dsc_load(&job->rows, call->dtype, dsc_at(call->dy, call->dtype, i), n, kept[1] + at),
    };
}

static void softmax_grad_row(const void *arg, int64_t row, float *const *sums)
{
    const struct softmax_grad_job *job = arg;
    const struct dsc_nn_softmax_grad *call = job->call;
    const struct dsc_rows *rows = &job->rows;
    bool is_kept = call->n_cols <= ROW_ELEMS;
    DSC_ALIGNED dsc_f32 kept[2][ROW_ELEMS];
    double sum = 0.0;

    (void)sums;
    for (int64_t begin = 0; begin < call->n_cols; begin += DSC_BLOCK_ELEMS) {
        int64_t n = dsc_block_of(call->n_cols - begin);
        struct softmax_block block = load_pair(job, row, begin, n, kept, is_kept ? begin : 0);

        rows->nn->dot(n, block.y, block.dy, &sum);
    }
    for (int64_t begin = 0; begin < call->n_cols; begin += DSC_BLOCK_ELEMS) {
        int64_t n = dsc_block_of(call->n_cols - begin);
        int64_t i = row * call->n_cols + begin;
        bool is_wide = is_kept && call->dtype != DSC_DTYPE_F32;
        struct softmax_block block =
            is_wide ? (struct softmax_block){kept[0] + begin, kept[1] + begin} : load_pair(job, row, begin, n, kept, 0);
        void *out = dsc_at_out(call->dx, call->dtype, i);
        dsc_f32 *dx = dsc_target(call->dtype, out, kept[1] + (is_kept ? begin : 0));

        rows->nn->softmax_grad(n, block.y, block.dy, (float)sum, call->scale, dx);
        dsc_store(rows, call->dtype, dx, n, out);
    }
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
