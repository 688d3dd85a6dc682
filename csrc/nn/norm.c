/* Layer and RMS norm with the residual connection before them, and their gradients. */
#include "dsc/nn.h"

#include "nn/rows.h"

#include <math.h>

struct norm_job {
    struct dsc_rows rows;
    const struct dsc_nn_norm *call;
};

static void norm_row(const void *arg, int64_t row, float *const *sums)
{
    const struct norm_job *job = arg;
    const struct dsc_nn_norm *call = job->call;
    const struct dsc_nn_kernels *nn = job->rows.nn;
    int64_t n = call->n_cols;
    const void *x = dsc_at(call->x, call->dtype, row * n);
    const void *residual = dsc_at(call->residual, call->dtype, row * n);
    void *total = dsc_at_out(call->sum, call->dtype, row * n);
    void *y = dsc_at_out(call->y, call->dtype, row * n);
    double sum = 0.0;
    double sumsq = 0.0;

    (void)sums;
    nn->moments(n, call->dtype, x, residual, total, y, &sum, &sumsq);

    double mean = call->is_rms ? 0.0 : sum / (double)n;
    double variance = sumsq / (double)n - mean * mean;
    /* Rounding may make the variance of a constant row slightly negative. A NaN stays a NaN. */
    double rstd = 1.0 / sqrt((variance < 0.0 ? 0.0 : variance) + (double)call->eps);

    call->rstd[row] = (float)rstd;
    if (!call->is_rms)
        call->mean[row] = (float)mean;
    nn->norm(n, call->dtype, residual != NULL ? total : x, (float)mean, (float)rstd, call->weight_dtype, call->weight,
             call->bias, y);
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

static void norm_grad_row(const void *arg, int64_t row, float *const *sums)
{
    const struct norm_grad_job *job = arg;
    const struct dsc_nn_norm_grad *call = job->call;
    const struct dsc_nn_kernels *nn = job->rows.nn;
    int64_t n = call->n_cols;
    const void *dy = dsc_at(call->dy, call->dtype, row * n);
    const void *x = dsc_at(call->sum, call->dtype, row * n);
    const void *dsum = dsc_at(call->dsum, call->dtype, row * n);
    void *dx = dsc_at_out(call->dx, call->dtype, row * n);
    float mean = call->is_rms ? 0.0f : call->mean[row];
    float rstd = call->rstd[row];
    double sum_g = 0.0;
    double sum_gh = 0.0;

    nn->norm_sums(n, call->dtype, dy, x, mean, rstd, call->weight_dtype, call->weight, sums[0], sums[1], dx, &sum_g,
                  &sum_gh);

    float mean_g = call->is_rms ? 0.0f : (float)(sum_g / (double)n);
    float mean_gh = (float)(sum_gh / (double)n);

    nn->norm_grad(n, call->dtype, dy, x, mean, rstd, call->weight_dtype, call->weight, mean_g, mean_gh, dsum, dx);
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
