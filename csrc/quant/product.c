/* Checks a product with packed codes, and spreads the rows of the weight over threads. */
#include "base/check.h"
#include "base/fail.h"
#include "base/par.h"
#include "quant/table.h"

static dsc_status check_sizes(const struct dsc_quant_product *call)
{
    DSC_TRY(dsc_check_product(call->n_rows, call->n_cols, call->n_outputs, "rows of codes"));
    if (call->group < 1)
        return dsc_fail(DSC_EINVAL, "group is %lld, must be positive", (long long)call->group);
    if (call->bits != 8 && call->bits != 4)
        return dsc_fail(DSC_EINVAL, "bits is %d, must be 8 or 4", (int)call->bits);
    return DSC_OK;
}

static dsc_status check_dtype(const char *name, dsc_dtype dtype)
{
    if (dsc_dtype_bytes(dtype) == 0)
        return dsc_fail(DSC_EINVAL, "%s is %d, which is no dsc_dtype", name, (int)dtype);
    return DSC_OK;
}

static dsc_status check(const struct dsc_quant_product *call)
{
    const char *missing = call->y == NULL        ? "y"
                          : call->n_cols == 0    ? NULL
                          : call->x == NULL      ? "x"
                          : call->codes == NULL  ? "codes"
                          : call->scales == NULL ? "scales"
                                                 : NULL;

    DSC_TRY(check_sizes(call));
    DSC_TRY(check_dtype("dtype", call->dtype));
    DSC_TRY(check_dtype("scale_dtype", call->scale_dtype));
    DSC_TRY(check_dtype("bias_dtype", call->bias_dtype));
    if (missing != NULL && call->n_rows > 0 && call->n_outputs > 0)
        return dsc_fail(DSC_EINVAL, "%s is NULL for %lld rows of %lld elements and %lld rows of codes", missing,
                        (long long)call->n_rows, (long long)call->n_cols, (long long)call->n_outputs);
    return DSC_OK;
}

struct job {
    const struct dsc_quant_product *call;
    const struct dsc_quant_kernels *kernels;
    int64_t chunk_outputs;
};

static void run_chunks(void *arg, int64_t first, int64_t last)
{
    const struct job *job = arg;
    int64_t end = last * job->chunk_outputs;

    job->kernels->product(job->call, first * job->chunk_outputs,
                          end < job->call->n_outputs ? end : job->call->n_outputs);
}

dsc_status dsc_quant_product(const struct dsc_quant_product *call, const struct dsc_par *par)
{
    struct job job = {.call = call, .kernels = dsc_quant_kernels_get()};

    DSC_TRY(check(call));
    if (call->n_rows == 0 || call->n_outputs == 0)
        return DSC_OK;
    /* Whole strips, so that the loops take as many rows at once as they can. */
    job.chunk_outputs = (DSC_MIN_CHUNK_ELEMS / (call->n_cols + 1) / DSC_PRODUCT_STRIP + 1) * DSC_PRODUCT_STRIP;
    dsc_par_run(par, (call->n_outputs - 1) / job.chunk_outputs + 1, run_chunks, &job);
    return DSC_OK;
}
