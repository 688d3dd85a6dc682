/* Rotary positions: rotates pairs of elements of each head by the angles of their token. */
#include "dsc/nn.h"

#include "nn/rows.h"

#include <string.h>

struct rotary_job {
    struct dsc_rows rows;
    const struct dsc_nn_rotary *call;
};

/* Turns a run of n pairs that begins with pair `begin`. */
static void rotate_run(const struct rotary_job *job, const char *x, char *y, int64_t begin, int64_t n,
                       const dsc_f32 *cos, const dsc_f32 *sin)
{
    const struct dsc_nn_rotary *call = job->call;
    const struct dsc_rows *rows = &job->rows;
    float sign = call->is_inverse ? -1.0f : 1.0f;
    DSC_ALIGNED dsc_f32 scratch[DSC_BLOCK_ELEMS];

    if (call->is_interleaved) {
        const dsc_f32 *from = dsc_load(rows, call->dtype, dsc_at(x, call->dtype, 2 * begin), 2 * n, scratch);
        void *out = dsc_at_out(y, call->dtype, 2 * begin);
        dsc_f32 *to = dsc_target(call->dtype, out, scratch);

        rows->nn->rotate_pairs(n, from, cos + begin, sin + begin, sign, to);
        dsc_store(rows, call->dtype, to, 2 * n, out);
        return;
    }

    int64_t second = begin + call->rotary_dim / 2;
    const dsc_f32 *x0 = dsc_load(rows, call->dtype, dsc_at(x, call->dtype, begin), n, scratch);
    const dsc_f32 *x1 = dsc_load(rows, call->dtype, dsc_at(x, call->dtype, second), n, scratch + n);
    dsc_f32 *y0 = dsc_target(call->dtype, dsc_at_out(y, call->dtype, begin), scratch);
    dsc_f32 *y1 = dsc_target(call->dtype, dsc_at_out(y, call->dtype, second), scratch + n);

    rows->nn->rotate_halves(n, x0, x1, cos + begin, sin + begin, sign, y0, y1);
    dsc_store(rows, call->dtype, y0, n, dsc_at_out(y, call->dtype, begin));
    dsc_store(rows, call->dtype, y1, n, dsc_at_out(y, call->dtype, second));
}

static void rotary_row(const void *arg, int64_t row, float *const *sums)
{
    const struct rotary_job *job = arg;
    const struct dsc_nn_rotary *call = job->call;
    int64_t n_pairs = call->rotary_dim / 2;
    size_t rest_bytes = (size_t)(call->head_dim - call->rotary_dim) * dsc_dtype_bytes(call->dtype);
    int64_t head = row % call->n_heads;
    int64_t token = row / call->n_heads % call->n_tokens;
    int64_t batch = row / call->n_heads / call->n_tokens;
    const char *x = dsc_at(call->x, call->dtype,
                           batch * call->x_strides[0] + token * call->x_strides[1] + head * call->x_strides[2]);
    char *y = dsc_at_out(call->y, call->dtype,
                         batch * call->y_strides[0] + token * call->y_strides[1] + head * call->y_strides[2]);
    int64_t table = batch * call->table_strides[0] + token * call->table_strides[1];

    (void)sums;
    for (int64_t begin = 0; begin < n_pairs; begin += DSC_BLOCK_ELEMS / 2) {
        int64_t n = n_pairs - begin < DSC_BLOCK_ELEMS / 2 ? n_pairs - begin : DSC_BLOCK_ELEMS / 2;

        rotate_run(job, x, y, begin, n, (const dsc_f32 *)call->cos + table, (const dsc_f32 *)call->sin + table);
    }
    if (rest_bytes > 0 && x != y)
        memcpy(dsc_at_out(y, call->dtype, call->rotary_dim), dsc_at(x, call->dtype, call->rotary_dim), rest_bytes);
}

dsc_status dsc_nn_rotary_check(const struct dsc_nn_rotary *call)
{
    int64_t n_rows;

    DSC_TRY(dsc_check_dims("batch, tokens and heads", call->n_batch, call->n_tokens, call->n_heads, &n_rows));
    DSC_TRY(dsc_check_rows(n_rows, call->head_dim, call->dtype));
    if (call->rotary_dim < 0 || call->rotary_dim % 2 != 0 || call->rotary_dim > call->head_dim)
        return dsc_fail(DSC_EINVAL, "rotary_dim is %lld, must be even and at most head_dim %lld",
                        (long long)call->rotary_dim, (long long)call->head_dim);
    DSC_TRY(CHECK_PRESENT(n_rows, NAMED(call, x), NAMED(call, y), NAMED(call, cos), NAMED(call, sin)));
    return DSC_OK;
}

dsc_status dsc_nn_rotary(const struct dsc_nn_rotary *call, const struct dsc_par *par)
{
    DSC_TRY(dsc_nn_rotary_check(call));

    struct rotary_job job = {dsc_rows_of(call->n_batch * call->n_tokens * call->n_heads, call->head_dim), call};

    dsc_rows_run(&job.rows, NULL, rotary_row, &job, par);
    return DSC_OK;
}
