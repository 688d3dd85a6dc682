/* Dropout between a bias and a residual connection, and its gradient, which draws the same numbers again. */
#include "dsc/nn.h"

#include "nn/rows.h"

#include <math.h>
#include <string.h>

#define NUMBERS 65536.0

/* The loop's arguments. Elements with random numbers below threshold are dropped, other elements are scaled. */
struct dropping {
    uint64_t seed;
    uint32_t threshold;
    float scale;
    bool drops_all;
};

static struct dropping dropping_of(float p, uint64_t seed)
{
    double threshold = nearbyint((double)p * NUMBERS);

    if (threshold >= NUMBERS)
        return (struct dropping){.seed = seed, .drops_all = true};
    return (struct dropping){
        .seed = seed, .threshold = (uint32_t)threshold, .scale = (float)(NUMBERS / (NUMBERS - threshold))};
}

static dsc_status check_p(float p)
{
    if (!(p >= 0.0f && p <= 1.0f))
        return dsc_fail(DSC_EINVAL, "p is %g, must be in [0, 1]", (double)p);
    return DSC_OK;
}

/* y = keep * x * scale, for elements from first on. */
static void drop(const struct dsc_rows *rows, const struct dropping *how, int64_t n, int64_t first, const dsc_f32 *x,
                 dsc_f32 *y)
{
    if (how->drops_all)
        memset(y, 0, (size_t)n * sizeof *y);
    else
        rows->nn->drop(n, how->seed, (uint64_t)first, how->threshold, how->scale, x, y);
}

struct dropout_job {
    struct dsc_rows rows;
    struct dropping how;
    const struct dsc_nn_dropout *call;
};

static void dropout_row(const void *arg, int64_t row, float *const *sums)
{
    const struct dropout_job *job = arg;
    const struct dsc_nn_dropout *call = job->call;
    const struct dsc_rows *rows = &job->rows;
    DSC_ALIGNED dsc_f32 scratch[2][DSC_BLOCK_ELEMS];

    (void)sums;
    for (int64_t begin = 0; begin < call->n_cols; begin += DSC_BLOCK_ELEMS) {
        int64_t n = dsc_block_of(call->n_cols - begin);
        int64_t i = row * call->n_cols + begin;
        const dsc_f32 *x = dsc_load_biased(rows, call->dtype, dsc_at(call->x, call->dtype, i),
                                           dsc_at(call->bias, call->dtype, begin), n, scratch);
        void *out = dsc_at_out(call->y, call->dtype, i);
        dsc_f32 *target = dsc_target(call->dtype, out, scratch[0]);
        dsc_f32 *y = call->residual == NULL ? target : scratch[0]; /* out may be the residual */

        drop(rows, &job->how, n, i, x, y);
        if (call->residual != NULL)
            rows->nn->add(n, y, dsc_load(rows, call->dtype, dsc_at(call->residual, call->dtype, i), n, scratch[1]),
                          target);
        dsc_store(rows, call->dtype, target, n, out);
    }
}

dsc_status dsc_nn_dropout_check(const struct dsc_nn_dropout *call)
{
    DSC_TRY(dsc_check_rows(call->n_rows, call->n_cols, call->dtype));
    DSC_TRY(check_p(call->p));
    DSC_TRY(CHECK_PRESENT(call->n_rows, NAMED(call, x), NAMED(call, y)));
    return DSC_OK;
}

dsc_status dsc_nn_dropout(const struct dsc_nn_dropout *call, const struct dsc_par *par)
{
    DSC_TRY(dsc_nn_dropout_check(call));

    struct dropout_job job = {dsc_rows_of(call->n_rows, call->n_cols), dropping_of(call->p, call->seed), call};

    dsc_rows_run(&job.rows, NULL, dropout_row, &job, par);
    return DSC_OK;
}

struct dropout_grad_job {
    struct dsc_rows rows;
    struct dropping how;
    const struct dsc_nn_dropout_grad *call;
};

static void dropout_grad_row(const void *arg, int64_t row, float *const *sums)
{
    const struct dropout_grad_job *job = arg;
    const struct dsc_nn_dropout_grad *call = job->call;
    const struct dsc_rows *rows = &job->rows;
    DSC_ALIGNED dsc_f32 scratch[2][DSC_BLOCK_ELEMS];

    for (int64_t begin = 0; begin < call->n_cols; begin += DSC_BLOCK_ELEMS) {
        int64_t n = dsc_block_of(call->n_cols - begin);
        int64_t i = row * call->n_cols + begin;
        const dsc_f32 *dy = dsc_load(rows, call->dtype, dsc_at(call->dy, call->dtype, i), n, scratch[0]);
        void *out = dsc_at_out(call->dx, call->dtype, i);
        dsc_f32 *dx = dsc_target(call->dtype, out, scratch[1]);

        drop(rows, &job->how, n, i, dy, dx);
        if (sums[0] != NULL)
            rows->kernels->add_f32(n, dx, (dsc_f32 *)sums[0] + begin);
        dsc_store(rows, call->dtype, dx, n, out);
    }
}

dsc_status dsc_nn_dropout_grad_check(const struct dsc_nn_dropout_grad *call)
{
    DSC_TRY(dsc_check_rows(call->n_rows, call->n_cols, call->dtype));
    DSC_TRY(check_p(call->p));
    DSC_TRY(CHECK_PRESENT(call->n_rows, NAMED(call, dy), NAMED(call, dx)));
    if (call->dbias != NULL)
        DSC_TRY(CHECK_PRESENT(call->n_rows, NAMED(call, scratch)));
    return DSC_OK;
}

dsc_status dsc_nn_dropout_grad(const struct dsc_nn_dropout_grad *call, const struct dsc_par *par)
{
    DSC_TRY(dsc_nn_dropout_grad_check(call));

    struct dropout_grad_job job = {dsc_rows_of(call->n_rows, call->n_cols), dropping_of(call->p, call->seed), call};
    struct dsc_row_sums sums = {call->dtype, {call->dbias}, call->scratch};

    dsc_rows_run(&job.rows, &sums, dropout_grad_row, &job, par);
    return DSC_OK;
}
