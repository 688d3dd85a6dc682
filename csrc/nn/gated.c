/* Gated linear units: y = act(gate) * up, and its gradients. */
#include "nn/act.h"
#include "nn/rows.h"

static dsc_status check_stride(int64_t n_rows, int64_t n_cols, int64_t in_stride, dsc_dtype dtype)
{
    DSC_TRY(dsc_check_rows(n_rows, n_cols, dtype));
    if (in_stride < n_cols)
        return dsc_fail(DSC_EINVAL, "in_stride is %lld, less than n_cols %lld", (long long)in_stride,
                        (long long)n_cols);
    return dsc_check_rows(n_rows, in_stride, dtype);
}

struct gated_job {
    struct dsc_rows rows;
    struct dsc_act_loops loops;
    const struct dsc_nn_gated *call;
};

static void gated_row(const void *arg, int64_t row, float *const *sums)
{
    const struct gated_job *job = arg;
    const struct dsc_nn_gated *call = job->call;
    int64_t i = row * call->in_stride;

    (void)sums;
    job->loops.gated(call->n_cols, call->dtype, dsc_at(call->gate, call->dtype, i), dsc_at(call->up, call->dtype, i),
                     dsc_at_out(call->y, call->dtype, row * call->n_cols));
}

dsc_status dsc_nn_gated_check(const struct dsc_nn_gated *call)
{
    struct dsc_act_loops ignored;

    DSC_TRY(check_stride(call->n_rows, call->n_cols, call->in_stride, call->dtype));
    DSC_TRY(dsc_act_loops_of(call->act, &ignored));
    DSC_TRY(CHECK_PRESENT(call->n_rows, NAMED(call, gate), NAMED(call, up), NAMED(call, y)));
    return DSC_OK;
}

dsc_status dsc_nn_gated(const struct dsc_nn_gated *call, const struct dsc_par *par)
{
    struct gated_job job = {.call = call};

    DSC_TRY(dsc_nn_gated_check(call));
    DSC_TRY(dsc_act_loops_of(call->act, &job.loops));
    job.rows = dsc_rows_of(call->n_rows, call->n_cols);
    dsc_rows_run(&job.rows, NULL, gated_row, &job, par);
    return DSC_OK;
}

struct gated_grad_job {
    struct dsc_rows rows;
    struct dsc_act_loops loops;
    const struct dsc_nn_gated_grad *call;
};

static void gated_grad_row(const void *arg, int64_t row, float *const *sums)
{
    const struct gated_grad_job *job = arg;
    const struct dsc_nn_gated_grad *call = job->call;
    int64_t i = row * call->in_stride;

    (void)sums;
    job->loops.gated_grad(call->n_cols, call->dtype, dsc_at(call->gate, call->dtype, i),
                          dsc_at(call->up, call->dtype, i), dsc_at(call->dy, call->dtype, row * call->n_cols),
                          dsc_at_out(call->dgate, call->dtype, i), dsc_at_out(call->dup, call->dtype, i));
}

dsc_status dsc_nn_gated_grad_check(const struct dsc_nn_gated_grad *call)
{
    struct dsc_act_loops ignored;

    DSC_TRY(check_stride(call->n_rows, call->n_cols, call->in_stride, call->dtype));
    DSC_TRY(dsc_act_loops_of(call->act, &ignored));
    DSC_TRY(CHECK_PRESENT(call->n_rows, NAMED(call, gate), NAMED(call, up), NAMED(call, dy), NAMED(call, dgate),
                          NAMED(call, dup)));
    return DSC_OK;
}

dsc_status dsc_nn_gated_grad(const struct dsc_nn_gated_grad *call, const struct dsc_par *par)
{
    struct gated_grad_job job = {.call = call};

    DSC_TRY(dsc_nn_gated_grad_check(call));
    DSC_TRY(dsc_act_loops_of(call->act, &job.loops));
    job.rows = dsc_rows_of(call->n_rows, call->n_cols);
    dsc_rows_run(&job.rows, NULL, gated_grad_row, &job, par);
    return DSC_OK;
}
