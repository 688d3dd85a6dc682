/* Partial results of attention become one: rows weighed by the logarithms of their sums. */
#include "seq/seq.h"

#include "base/fail.h"
#include "base/par.h"
#include "cpu/table.h"

#include <math.h>

struct job {
    const struct dsc_kernels *kernels;
    float *out;
    float *log_sum;
    const char *part;
    const float *part_log_sum;
    dsc_dtype dtype;
    int64_t n_rows;
    int64_t width;
    int64_t first_row;
    int64_t n_part_rows;
    int64_t n_all_part_rows;
    int64_t rows_per_chunk;
};

static void merge_row(const struct job *job, float *out, float *log_sum, const char *part, float part_log_sum)
{
    DSC_ALIGNED dsc_f32 scratch[DSC_BLOCK_ELEMS];
    size_t elem_bytes = dsc_dtype_bytes(job->dtype);
    float old = *log_sum;

    if (part_log_sum == -INFINITY)
        return;

    /* NaN is larger than nothing, and ends up in both factors. */
    double larger = old > part_log_sum ? (double)old : (double)part_log_sum;
    double apart = fabs((double)old - (double)part_log_sum);
    double merged = old == -INFINITY ? (double)part_log_sum : larger + log1p(exp(-apart));
    float keep = old == -INFINITY ? 0.0f : (float)exp((double)old - merged);
    float add = (float)exp((double)part_log_sum - merged);

    for (int64_t i = 0; i < job->width; i += DSC_BLOCK_ELEMS) {
        int64_t n = job->width - i < DSC_BLOCK_ELEMS ? job->width - i : DSC_BLOCK_ELEMS;

        job->kernels->blend_f32(
            n, keep, add, dsc_load_f32(job->kernels, job->dtype, part + (size_t)i * elem_bytes, n, scratch), out + i);
    }
    *log_sum = (float)merged;
}

static void merge_chunks(void *arg, int64_t first, int64_t last)
{
    const struct job *job = arg;
    int64_t end = last * job->rows_per_chunk < job->n_all_part_rows ? last * job->rows_per_chunk : job->n_all_part_rows;
    size_t row_bytes = (size_t)job->width * dsc_dtype_bytes(job->dtype);

    for (int64_t i = first * job->rows_per_chunk; i < end; i++) {
        int64_t row = i / job->n_part_rows * job->n_rows + job->first_row + i % job->n_part_rows;

        merge_row(job, job->out + row * job->width, job->log_sum + row, job->part + (size_t)i * row_bytes,
                  job->part_log_sum[i]);
    }
}

dsc_status dsc_seq_merge(float *out, float *log_sum, int64_t n_groups, int64_t n_rows, int64_t width, const void *part,
                         dsc_dtype dtype, const float *part_log_sum, int64_t first_row, int64_t n_part_rows,
                         const struct dsc_par *par)
{
    int64_t n_all_rows;
    int64_t n_elems;

    if (dsc_dtype_bytes(dtype) == 0)
        return dsc_fail(DSC_EINVAL, "dtype is %d, which is no dsc_dtype", (int)dtype);
    if (n_groups < 0 || n_rows < 0 || width < 0)
        return dsc_fail(DSC_EINVAL, "%lld groups of %lld rows of %lld elements: none must be negative",
                        (long long)n_groups, (long long)n_rows, (long long)width);
    if (first_row < 0 || n_part_rows < 0 || n_part_rows > n_rows || first_row > n_rows - n_part_rows)
        return dsc_fail(DSC_EINVAL, "%lld rows from row %lld on do not lie in %lld rows", (long long)n_part_rows,
                        (long long)first_row, (long long)n_rows);
    if (__builtin_mul_overflow(n_groups, n_rows, &n_all_rows) || __builtin_mul_overflow(n_all_rows, width, &n_elems) ||
        n_elems > INT64_MAX / 4 || n_all_rows > INT64_MAX / 4)
        return dsc_fail(DSC_EOVERFLOW, "%lld groups of %lld rows of %lld elements do not fit int64_t",
                        (long long)n_groups, (long long)n_rows, (long long)width);
    if (n_groups * n_part_rows == 0)
        return DSC_OK;
    if (log_sum == NULL || part_log_sum == NULL || (width > 0 && (out == NULL || part == NULL)))
        return dsc_fail(DSC_EINVAL, "out, log_sum, part or part_log_sum is NULL for %lld rows",
                        (long long)(n_groups * n_part_rows));

    struct job job = {.kernels = dsc_kernels_get(),
                      .out = out,
                      .log_sum = log_sum,
                      .part = part,
                      .part_log_sum = part_log_sum,
                      .dtype = dtype,
                      .n_rows = n_rows,
                      .width = width,
                      .first_row = first_row,
                      .n_part_rows = n_part_rows,
                      .n_all_part_rows = n_groups * n_part_rows,
                      .rows_per_chunk = width < DSC_MIN_CHUNK_ELEMS ? DSC_MIN_CHUNK_ELEMS / (width + 1) + 1 : 1};

    dsc_par_run(par, job.n_all_part_rows / job.rows_per_chunk + (job.n_all_part_rows % job.rows_per_chunk != 0),
                merge_chunks, &job);
    return DSC_OK;
}
