/* Layer and RMS norm with the residual connection before them, and their gradients. */
#include "dsc/nn.h"

#include "nn/rows.h"

#include <math.h>

struct norm_job {
    struct dsc_rows rows;
    const struct dsc_nn_norm *call;
};

/* Rows of up to this many elements are widened once; longer rows are read again. */
#define ROW_ELEMS (4 * DSC_BLOCK_ELEMS)

/*
 * Writes the sum with the residual, and returns the moments of the sum as written. A row of 16-bit elements that is
 * short enough is also kept in kept, as f32.
 */
static void enter_row(const struct norm_job *job, int64_t row, dsc_f32 *kept, double *sum, double *sumsq)
{
    const struct dsc_nn_norm *call = job->call;
    const struct dsc_rows *rows = &job->rows;
    bool is_short = rows->n_cols <= ROW_ELEMS;
    DSC_ALIGNED dsc_f32 scratch[DSC_BLOCK_ELEMS];

    for (int64_t begin = 0; begin < rows->n_cols; begin += DSC_BLOCK_ELEMS) {
        int64_t n = dsc_block_of(rows->n_cols - begin);
        int64_t i = row * rows->n_cols + begin;
        dsc_f32 *wide = kept + (is_short ? begin : 0);
        const dsc_f32 *x = dsc_load(rows, call->dtype, dsc_at(call->x, call->dtype, i), n, wide);

        if (call->residual != NULL) {
            const dsc_f32 *residual = dsc_load(rows, call->dtype, dsc_at(call->residual, call->dtype, i), n, scratch);
            void *out = dsc_at_out(call->sum, call->dtype, i);
            dsc_f32 *added = dsc_target(call->dtype, out, wide);

            rows->nn->add(n, x, residual, added);
            dsc_store(rows, call->dtype, added, n, out);
            x = dsc_load(rows, call->dtype, out, n, wide); /* the sum after rounding */
        }
        rows->nn->moments(n, x, sum, sumsq);
    }
}

static void norm_row(const void *arg, int64_t row, float *const *sums)
{
    const struct norm_job *job = arg;
    const struct dsc_nn_norm *call = job->call;
    const struct dsc_rows *rows = &job->rows;
    const void *from = call->residual != NULL ? call->sum : call->x;
    bool is_kept = call->dtype != DSC_DTYPE_F32 && rows->n_cols <= ROW_ELEMS;
    DSC_ALIGNED dsc_f32 kept[ROW_ELEMS];
    DSC_ALIGNED dsc_f32 scratch[3][DSC_BLOCK_ELEMS];
    double sum = 0.0;
    double sumsq = 0.0;

    (void)sums;
    enter_row(job, row, kept, &sum, &sumsq);

    double n_cols = (double)rows->n_cols;
    double mean = call->is_rms ? 0.0 : sum / n_cols;
    double variance = sumsq / n_cols - mean * mean;
    /* Rounding may make the variance of a constant row slightly negative. A NaN stays a NaN. */
    double rstd = 1.0 / sqrt((variance < 0.0 ? 0.0 : variance) + (double)call->eps);

    call->rstd[row] = (float)rstd;
    if (!call->is_rms)
        call->mean[row] = (float)mean;
    for (int64_t begin = 0; begin < rows->n_cols; begin += DSC_BLOCK_ELEMS) {
        int64_t n = dsc_block_of(rows->n_cols - begin);
        int64_t i = row * rows->n_cols + begin;
        const dsc_f32 *x =
            is_kept ? kept + begin : dsc_load(rows, call->dtype, dsc_at(from, call->dtype, i), n, scratch[0]);
        const dsc_f32 *weight =
            dsc_load(rows, call->weight_dtype, dsc_at(call->weight, call->weight_dtype, begin), n, scratch[1]);
        const dsc_f32 *bias =
            dsc_load(rows, call->weight_dtype, dsc_at(call->bias, call->weight_dtype, begin), n, scratch[2]);
        void *out = dsc_at_out(call->y, call->dtype, i);
        dsc_f32 *y = dsc_target(call->dtype, out, scratch[0]);

        rows->nn->norm(n, x, (float)mean, (float)rstd, weight, bias, y);
        dsc_store(rows, call->dtype, y, n, out);
    }
}

static dsc_status check_eps(float eps)
{
    if (!(eps >= 0.0f))
        return dsc_fail(DSC_EINVAL, "eps is %g, must not be negative", (double)eps);
    return DSC_OK;
}

dsc_status dsc_nn_norm_check(const struct dsc_nn_norm *norm)
{
    DSC_TRY(dsc_check_rows(norm->n_rows, norm->n_cols, norm->dtype));
    DSC_TRY(dsc_check_rows(1, norm->n_cols, norm->weight_dtype));
    DSC_TRY(check_eps(norm->eps));
    DSC_TRY(CHECK_PRESENT(norm->n_rows, NAMED(norm, x), NAMED(norm, y), NAMED(norm, rstd)));
    if (!norm->is_rms)
        DSC_TRY(CHECK_PRESENT(norm->n_rows, NAMED(norm, mean)));
    if (norm->residual != NULL)
        DSC_TRY(CHECK_PRESENT(norm->n_rows, NAMED(norm, sum)));
    return DSC_OK;
}

dsc_status dsc_nn_norm(const struct dsc_nn_norm *norm, const struct dsc_par *par)
{
    DSC_TRY(dsc_nn_norm_check(norm));

    struct norm_job job = {dsc_rows_of(norm->n_rows, norm->n_cols), norm};

    dsc_rows_run(&job.rows, NULL, norm_row, &job, par);
    return DSC_OK;
}

struct norm_grad_job {
    struct dsc_rows rows;
    const struct dsc_nn_norm_grad *call;
};

/* The inputs of one block, for both passes over a row. */
struct norm_block {
    const dsc_f32 *dy;
    const dsc_f32 *x;
    const dsc_f32 *weight;
};

static struct norm_block load_block(const struct norm_grad_job *job, int64_t row, int64_t begin, int64_t n,
                                    dsc_f32 (*kept)[ROW_ELEMS], int64_t at, dsc_f32 *weight_scratch)
{
    const struct dsc_nn_norm_grad *call = job->call;
    int64_t i = row * call->n_cols + begin;

    return (struct norm_block){
        dsc_load(&job->rows, call->dtype, dsc_at(call->dy, call->dtype, i), n, kept[0] + at),
        dsc_load(&job->rows, call->dtype, dsc_at(call->sum, call->dtype, i), n, kept[1] + at),
        dsc_load(&job->rows, call->weight_dtype, dsc_at(call->weight, call->weight_dtype, begin), n, weight_scratch),
    };
}

static dsc_f32 *from_column(float *sum, int64_t begin)
{
    return sum == NULL ? NULL : (dsc_f32 *)sum + begin;
}

static void norm_grad_row(const void *arg, int64_t row, float *const *sums)
{
    const struct norm_grad_job *job = arg;
    const struct dsc_nn_norm_grad *call = job->call;
    const struct dsc_rows *rows = &job->rows;
    float mean = call->is_rms ? 0.0f : call->mean[row];
    float rstd = call->rstd[row];
    bool is_kept = call->dtype != DSC_DTYPE_F32 && rows->n_cols <= ROW_ELEMS;
    DSC_ALIGNED dsc_f32 kept[2][ROW_ELEMS];
    DSC_ALIGNED dsc_f32 scratch[3][DSC_BLOCK_ELEMS];
    double sum_g = 0.0;
    double sum_gh = 0.0;

    for (int64_t begin = 0; begin < rows->n_cols; begin += DSC_BLOCK_ELEMS) {
        int64_t n = dsc_block_of(rows->n_cols - begin);
        struct norm_block block = load_block(job, row, begin, n, kept, is_kept ? begin : 0, scratch[0]);

        rows->nn->norm_sums(n, block.dy, block.x, mean, rstd, block.weight, from_column(sums[0], begin),
                            from_column(sums[1], begin), &sum_g, &sum_gh);
    }

    float mean_g = call->is_rms ? 0.0f : (float)(sum_g / (double)rows->n_cols);
    float mean_gh = (float)(sum_gh / (double)rows->n_cols);

    for (int64_t begin = 0; begin < rows->n_cols; begin += DSC_BLOCK_ELEMS) {
        int64_t n = dsc_block_of(rows->n_cols - begin);
        int64_t i = row * rows->n_cols + begin;
        struct norm_block block =
            is_kept ? (struct norm_block){kept[0] + begin, kept[1] + begin,
                                          dsc_load(rows, call->weight_dtype,
                                                   dsc_at(call->weight, call->weight_dtype, begin), n, scratch[0])}
                    : load_block(job, row, begin, n, kept, 0, scratch[0]);
        void *out = dsc_at_out(call->dx, call->dtype, i);
        dsc_f32 *dx = call->dsum == NULL ? dsc_target(call->dtype, out, scratch[1]) : scratch[1]; /* it may be dsum */

        rows->nn->norm_grad(n, block.dy, block.x, mean, rstd, block.weight, mean_g, mean_gh, dx);
        if (call->dsum != NULL)
            rows->nn->add(n, dx, dsc_load(rows, call->dtype, dsc_at(call->dsum, call->dtype, i), n, scratch[2]), dx);
        dsc_store(rows, call->dtype, dx, n, out);
    }
}

dsc_status dsc_nn_norm_grad_check(const struct dsc_nn_norm_grad *grad)
{
    DSC_TRY(dsc_check_rows(grad->n_rows, grad->n_cols, grad->dtype));
    DSC_TRY(dsc_check_rows(1, grad->n_cols, grad->weight_dtype));
    DSC_TRY(CHECK_PRESENT(grad->n_rows, NAMED(grad, sum), NAMED(grad, dy), NAMED(grad, rstd), NAMED(grad, dx)));
    if (!grad->is_rms)
        DSC_TRY(CHECK_PRESENT(grad->n_rows, NAMED(grad, mean)));
    if (grad->dweight != NULL || grad->dbias != NULL)
        DSC_TRY(CHECK_PRESENT(grad->n_rows, NAMED(grad, scratch)));
    return DSC_OK;
}

dsc_status dsc_nn_norm_grad(const struct dsc_nn_norm_grad *grad, const struct dsc_par *par)
{
    DSC_TRY(dsc_nn_norm_grad_check(grad));

    struct norm_grad_job job = {dsc_rows_of(grad->n_rows, grad->n_cols), grad};
    struct dsc_row_sums sums = {grad->weight_dtype, {grad->dweight, grad->dbias}, grad->scratch};

    dsc_rows_run(&job.rows, &sums, norm_grad_row, &job, par);
    return DSC_OK;
}
