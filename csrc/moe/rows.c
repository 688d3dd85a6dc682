/* Rows of tokens on the way to experts and back, and their gradients. */
#include "dsc/moe.h"

#include "nn/rows.h"

#include <string.h>

static size_t row_bytes(int64_t n_cols, dsc_dtype dtype)
{
    return (size_t)n_cols * dsc_dtype_bytes(dtype);
}

/* Checks the sizes of a call: both arrays of rows, and the slots of the tokens. */
static dsc_status check_sizes(int64_t n_tokens, int64_t n_slots, int64_t k, int64_t n_cols, dsc_dtype dtype)
{
    int64_t n;

    DSC_TRY(dsc_check_rows(n_tokens, n_cols, dtype));
    DSC_TRY(dsc_check_rows(n_slots, n_cols, dtype));
    if (k < 0)
        return dsc_fail(DSC_EINVAL, "k is %lld, must not be negative", (long long)k);
    if (__builtin_mul_overflow(n_tokens, k, &n) || n > INT64_MAX / 8)
        return dsc_fail(DSC_EOVERFLOW, "%lld choices of %lld tokens do not fit int64_t", (long long)k,
                        (long long)n_tokens);
    return DSC_OK;
}

static dsc_status check_inverse(const int64_t *inverse, int64_t n, int64_t k, int64_t n_slots)
{
    for (int64_t slot = 0; slot < n; slot++)
        if (inverse[slot] < -1 || inverse[slot] >= n_slots)
            return dsc_fail(DSC_EINVAL, "inverse[%lld, %lld] is %lld, must be -1 or one of %lld rows",
                            (long long)(slot / k), (long long)(slot % k), (long long)inverse[slot], (long long)n_slots);
    return DSC_OK;
}

struct gather_job {
    const struct dsc_moe_gather *call;
    size_t row_bytes;
};

static void gather_row(const void *arg, int64_t row, float *const *sums)
{
    const struct gather_job *job = arg;
    const struct dsc_moe_gather *call = job->call;
    int64_t token = call->k == 1 ? call->order[row] : call->order[row] / call->k;

    (void)sums;
    memcpy((char *)call->rows + (size_t)row * job->row_bytes, (const char *)call->x + (size_t)token * job->row_bytes,
           job->row_bytes);
}

static dsc_status check_order(const struct dsc_moe_gather *call)
{
    int64_t n = call->n_tokens * call->k;
    int64_t n_placed = 0;

    for (int64_t i = 0; i < call->n_slots; i++)
        if (call->order[i] < 0 || call->order[i] >= n)
            return dsc_fail(DSC_EINVAL, "order[%lld] is %lld, must be one of %lld slots", (long long)i,
                            (long long)call->order[i], (long long)n);
    if (call->inverse == NULL)
        return DSC_OK;
    for (int64_t i = 0; i < call->n_slots; i++)
        if (call->inverse[call->order[i]] != i)
            return dsc_fail(DSC_EINVAL, "order[%lld] is slot %lld, but inverse has %lld there", (long long)i,
                            (long long)call->order[i], (long long)call->inverse[call->order[i]]);
    for (int64_t slot = 0; slot < n; slot++)
        n_placed += call->inverse[slot] != -1;
    if (n_placed != call->n_slots)
        return dsc_fail(DSC_EINVAL, "inverse places %lld slots, order has %lld", (long long)n_placed,
                        (long long)call->n_slots);
    return DSC_OK;
}

dsc_status dsc_moe_gather_check(const struct dsc_moe_gather *call)
{
    DSC_TRY(check_sizes(call->n_tokens, call->n_slots, call->k, call->n_cols, call->dtype));
    if (call->k < 1 && call->n_slots > 0)
        return dsc_fail(DSC_EINVAL, "k is %lld for %lld rows, must be positive", (long long)call->k,
                        (long long)call->n_slots);
    DSC_TRY(CHECK_PRESENT(call->n_slots, NAMED(call, x), NAMED(call, order), NAMED(call, rows)));
    return DSC_OK;
}

dsc_status dsc_moe_gather(const struct dsc_moe_gather *call, const struct dsc_par *par)
{
    DSC_TRY(dsc_moe_gather_check(call));
    DSC_TRY(check_order(call));

    struct dsc_rows rows = dsc_rows_of(call->n_slots, call->n_cols);
    struct gather_job job = {call, row_bytes(call->n_cols, call->dtype)};

    dsc_rows_run(&rows, NULL, gather_row, &job, par);
    return DSC_OK;
}

struct combine_job {
    struct dsc_rows rows;
    const struct dsc_moe_combine *call;
};

static void combine_row(const void *arg, int64_t token, float *const *sums)
{
    const struct combine_job *job = arg;
    const struct dsc_moe_combine *call = job->call;
    int64_t slot = token * call->k;

    (void)sums;
    job->rows.nn->weighted_sum(call->n_cols, call->dtype, call->rows, call->n_cols, call->k, call->inverse + slot,
                               call->weights == NULL ? NULL : call->weights + slot,
                               dsc_at_out(call->out, call->dtype, token * call->n_cols));
}

dsc_status dsc_moe_combine_check(const struct dsc_moe_combine *call)
{
    DSC_TRY(check_sizes(call->n_tokens, call->n_slots, call->k, call->n_cols, call->dtype));
    DSC_TRY(CHECK_PRESENT(call->n_slots, NAMED(call, rows)));
    DSC_TRY(CHECK_PRESENT(call->n_tokens * call->k, NAMED(call, inverse)));
    DSC_TRY(CHECK_PRESENT(call->n_tokens, NAMED(call, out)));
    return DSC_OK;
}

dsc_status dsc_moe_combine(const struct dsc_moe_combine *call, const struct dsc_par *par)
{
    DSC_TRY(dsc_moe_combine_check(call));
    DSC_TRY(check_inverse(call->inverse, call->n_tokens * call->k, call->k, call->n_slots));

    struct combine_job job = {dsc_rows_of(call->n_tokens, call->n_cols), call};

    dsc_rows_run(&job.rows, NULL, combine_row, &job, par);
    return DSC_OK;
}

struct combine_grad_job {
    struct dsc_rows rows;
    const struct dsc_moe_combine_grad *call;
};

static void combine_grad_row(const void *arg, int64_t token, float *const *sums)
{
    const struct combine_grad_job *job = arg;
    const struct dsc_moe_combine_grad *call = job->call;
    const struct dsc_rows *rows = &job->rows;
    DSC_ALIGNED dsc_f32 scratch[2][DSC_BLOCK_ELEMS];

    (void)sums;
    for (int64_t j = 0; j < call->k; j++) {
        int64_t slot = token * call->k + j;
        int64_t place = call->inverse[slot];
        float weight = call->weights == NULL ? 1.0f : call->weights[slot];
        double sum = 0.0;

        for (int64_t begin = 0; place >= 0 && begin < call->n_cols; begin += DSC_BLOCK_ELEMS) {
            int64_t n = dsc_block_of(call->n_cols - begin);
            int64_t at = place * call->n_cols + begin;
            const dsc_f32 *dout = dsc_load(
                rows, call->dtype, dsc_at(call->dout, call->dtype, token * call->n_cols + begin), n, scratch[0]);

            if (call->dweights != NULL)
                rows->nn->dot(n, dout, dsc_load(rows, call->dtype, dsc_at(call->rows, call->dtype, at), n, scratch[1]),
                              &sum);
            rows->nn->scaled(n, dout, weight, call->dtype, dsc_at_out(call->drows, call->dtype, at));
        }
        if (call->dweights != NULL)
            call->dweights[slot] = (float)sum;
    }
}

dsc_status dsc_moe_combine_grad_check(const struct dsc_moe_combine_grad *call)
{
    DSC_TRY(check_sizes(call->n_tokens, call->n_slots, call->k, call->n_cols, call->dtype));
    DSC_TRY(CHECK_PRESENT(call->n_slots, NAMED(call, rows), NAMED(call, drows), NAMED(call, scratch)));
    DSC_TRY(CHECK_PRESENT(call->n_tokens * call->k, NAMED(call, inverse)));
    DSC_TRY(CHECK_PRESENT(call->n_tokens, NAMED(call, dout)));
    return DSC_OK;
}

/* Writes the slot of each row to the scratch, -1 for a row without one. */
static dsc_status find_slots(const struct dsc_moe_combine_grad *call)
{
    for (int64_t i = 0; i < call->n_slots; i++)
        call->scratch[i] = -1;
    for (int64_t slot = 0; slot < call->n_tokens * call->k; slot++) {
        int64_t place = call->inverse[slot];

        if (place < 0)
            continue;
        if (call->scratch[place] >= 0)
            return dsc_fail(DSC_EINVAL, "inverse[%lld, %lld] is row %lld, which another slot has too",
                            (long long)(slot / call->k), (long long)(slot % call->k), (long long)place);
        call->scratch[place] = slot;
    }
    return DSC_OK;
}

dsc_status dsc_moe_combine_grad(const struct dsc_moe_combine_grad *call, const struct dsc_par *par)
{
    DSC_TRY(dsc_moe_combine_grad_check(call));
    DSC_TRY(check_inverse(call->inverse, call->n_tokens * call->k, call->k, call->n_slots));
    DSC_TRY(find_slots(call));

    size_t n_bytes = row_bytes(call->n_cols, call->dtype);
    struct combine_grad_job job = {dsc_rows_of(call->n_tokens, call->n_cols), call};

    for (int64_t i = 0; i < call->n_slots; i++)
        if (call->scratch[i] < 0)
            memset((char *)call->drows + (size_t)i * n_bytes, 0, n_bytes);
    dsc_rows_run(&job.rows, NULL, combine_grad_row, &job, par);
    return DSC_OK;
}
