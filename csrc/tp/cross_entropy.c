/* Cross-entropy over a vocabulary cut over ranks: one pass for the loss, another writes the gradient in place. */
#include "dsc/tp.h"

#include "base/fail.h"
#include "base/par.h"
#include "cpu/table.h"

#include <math.h>
#include <string.h>

struct job {
    const struct dsc_kernels *kernels;
    char *logits;
    dsc_dtype dtype;
    const int64_t *targets;
    int64_t n_rows;
    int64_t vocab_size;
    int64_t rows_per_chunk;
    struct dsc_tp_row *rows;
    const float *log_sum;
    const float *scale;
    float each;      /* subtracted from the probability of every token id */
    float at_target; /* also subtracted from the target's */
};

static dsc_status check(const void *logits, dsc_dtype dtype, const int64_t *targets, int64_t n_rows, int64_t vocab_size)
{
    int64_t n_elems;

    if (dsc_dtype_bytes(dtype) == 0)
        return dsc_fail(DSC_EINVAL, "dtype is %d, which is no dsc_dtype", (int)dtype);
    if (n_rows < 0 || vocab_size < 0)
        return dsc_fail(DSC_EINVAL, "%lld rows over a vocabulary of %lld: neither must be negative", (long long)n_rows,
                        (long long)vocab_size);
    if (__builtin_mul_overflow(n_rows, vocab_size, &n_elems) || n_elems > INT64_MAX / 4)
        return dsc_fail(DSC_EOVERFLOW, "%lld rows over a vocabulary of %lld do not fit int64_t", (long long)n_rows,
                        (long long)vocab_size);
    if ((logits == NULL && n_elems > 0) || (targets == NULL && n_rows > 0))
        return dsc_fail(DSC_EINVAL, "%s is NULL for %lld rows", logits == NULL ? "logits" : "targets",
                        (long long)n_rows);
    return DSC_OK;
}

static struct job job_of(const void *logits, dsc_dtype dtype, const int64_t *targets, int64_t n_rows,
                         int64_t vocab_size)
{
    int64_t rows_per_chunk = vocab_size > 0 ? DSC_MIN_CHUNK_ELEMS / vocab_size : n_rows;

    return (struct job){
        .kernels = dsc_kernels_get(),
        .logits = (char *)logits,
        .dtype = dtype,
        .targets = targets,
        .n_rows = n_rows,
        .vocab_size = vocab_size,
        .rows_per_chunk = rows_per_chunk < 1 ? 1 : rows_per_chunk,
    };
}

static void run(const struct dsc_par *par, struct job *job, dsc_par_body body)
{
    int64_t per_chunk = job->rows_per_chunk;

    dsc_par_run(par, job->n_rows / per_chunk + (job->n_rows % per_chunk != 0), body, job);
}

static int64_t last_row(const struct job *job, int64_t last_chunk)
{
    int64_t row = last_chunk * job->rows_per_chunk;

    return row < job->n_rows ? row : job->n_rows;
}

static char *logit(const struct job *job, int64_t row, int64_t i)
{
    return job->logits + (size_t)(row * job->vocab_size + i) * dsc_dtype_bytes(job->dtype);
}

static int64_t block_of(int64_t n_left)
{
    return n_left < DSC_BLOCK_ELEMS ? n_left : DSC_BLOCK_ELEMS;
}

static struct dsc_tp_row read_row(const struct job *job, int64_t row)
{
    struct dsc_tp_row found = {.max = -INFINITY};
    DSC_ALIGNED dsc_f32 scratch[DSC_BLOCK_ELEMS];
    int64_t target = job->targets[row];
    double sum_exp = 0.0;
    double sum = 0.0;

    for (int64_t i = 0; i < job->vocab_size; i += DSC_BLOCK_ELEMS) {
        int64_t n = block_of(job->vocab_size - i);

        job->kernels->max_f32(n, dsc_load_f32(job->kernels, job->dtype, logit(job, row, i), n, scratch), &found.max);
    }

    /* A row that holds only -inf adds nothing, and a row that holds only NaN is NaN. */
    float shift = found.max == -INFINITY ? 0.0f : found.max;

    for (int64_t i = 0; i < job->vocab_size; i += DSC_BLOCK_ELEMS) {
        int64_t n = block_of(job->vocab_size - i);
        const dsc_f32 *block = dsc_load_f32(job->kernels, job->dtype, logit(job, row, i), n, scratch);

        if (target >= i && target < i + n)
            found.target = block[target - i];
        job->kernels->sum_f32(n, block, &sum);
        job->kernels->exp_f32(n, block, shift, scratch);
        job->kernels->sum_f32(n, scratch, &sum_exp);
    }
    found.sum_exp = (float)sum_exp;
    found.sum = (float)sum;
    return found;
}

static void read_chunks(void *arg, int64_t first, int64_t last)
{
    struct job *job = arg;

    for (int64_t row = first * job->rows_per_chunk; row < last_row(job, last); row++)
        job->rows[row] = read_row(job, row);
}

dsc_status dsc_tp_cross_entropy_rows_check(const void *logits, dsc_dtype dtype, const int64_t *targets, int64_t n_rows,
                                           int64_t vocab_size, const struct dsc_tp_row *out_rows)
{
    DSC_TRY(check(logits, dtype, targets, n_rows, vocab_size));
    if (out_rows == NULL && n_rows > 0)
        return dsc_fail(DSC_EINVAL, "out_rows is NULL for %lld rows", (long long)n_rows);
    return DSC_OK;
}

dsc_status dsc_tp_cross_entropy_rows(const void *logits, dsc_dtype dtype, const int64_t *targets, int64_t n_rows,
                                     int64_t vocab_size, const struct dsc_par *par, struct dsc_tp_row *out_rows)
{
    DSC_TRY(dsc_tp_cross_entropy_rows_check(logits, dtype, targets, n_rows, vocab_size, out_rows));

    struct job job = job_of(logits, dtype, targets, n_rows, vocab_size);

    job.rows = out_rows;
    run(par, &job, read_chunks);
    return DSC_OK;
}

static void write_row(const struct job *job, int64_t row)
{
    DSC_ALIGNED dsc_f32 scratch[DSC_BLOCK_ELEMS];
    int64_t target = job->targets[row];
    float scale = job->scale[row];

    if (scale == 0.0f) {
        if (job->vocab_size > 0)
            memset(logit(job, row, 0), 0, (size_t)job->vocab_size * dsc_dtype_bytes(job->dtype));
        return;
    }
    for (int64_t i = 0; i < job->vocab_size; i += DSC_BLOCK_ELEMS) {
        int64_t n = block_of(job->vocab_size - i);
        const dsc_f32 *block = dsc_load_f32(job->kernels, job->dtype, logit(job, row, i), n, scratch);

        job->kernels->exp_f32(n, block, job->log_sum[row], scratch);
        if (target >= i && target < i + n)
            scratch[target - i] -= job->at_target;
        job->kernels->sub_scale_f32(n, job->each, scale, scratch);
        dsc_store_f32(job->kernels, job->dtype, scratch, n, logit(job, row, i));
    }
}

static void write_chunks(void *arg, int64_t first, int64_t last)
{
    struct job *job = arg;

    for (int64_t row = first * job->rows_per_chunk; row < last_row(job, last); row++)
        write_row(job, row);
}

dsc_status dsc_tp_cross_entropy_grad_check(const void *logits, dsc_dtype dtype, const int64_t *targets, int64_t n_rows,
                                           int64_t vocab_size, const float *log_sum, const float *scale,
                                           double smoothing, int64_t full_vocab_size)
{
    DSC_TRY(check(logits, dtype, targets, n_rows, vocab_size));
    if ((log_sum == NULL || scale == NULL) && n_rows > 0)
        return dsc_fail(DSC_EINVAL, "%s is NULL for %lld rows", log_sum == NULL ? "log_sum" : "scale",
                        (long long)n_rows);
    if (!(smoothing >= 0.0 && smoothing <= 1.0))
        return dsc_fail(DSC_EINVAL, "smoothing is %g, must be 0 to 1", smoothing);
    if (full_vocab_size < vocab_size || full_vocab_size < 1)
        return dsc_fail(DSC_EINVAL, "full_vocab_size is %lld, this rank alone has %lld", (long long)full_vocab_size,
                        (long long)vocab_size);
    return DSC_OK;
}

dsc_status dsc_tp_cross_entropy_grad(void *logits, dsc_dtype dtype, const int64_t *targets, int64_t n_rows,
                                     int64_t vocab_size, const float *log_sum, const float *scale, double smoothing,
                                     int64_t full_vocab_size, const struct dsc_par *par)
{
    DSC_TRY(dsc_tp_cross_entropy_grad_check(logits, dtype, targets, n_rows, vocab_size, log_sum, scale, smoothing,
                                            full_vocab_size));

    struct job job = job_of(logits, dtype, targets, n_rows, vocab_size);

    job.log_sum = log_sum;
    job.scale = scale;
    job.each = (float)(smoothing / (double)full_vocab_size);
    job.at_target = (float)(1.0 - smoothing);
    run(par, &job, write_chunks);
    return DSC_OK;
}
