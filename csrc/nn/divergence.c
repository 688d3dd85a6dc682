/* Generalized Jensen-Shannon divergence of a student's distribution from its teacher's, and the student's gradient. */
#include "dsc/nn.h"

#include "nn/rows.h"

#include <math.h>
#include <string.h>

/* One row of logits. */
struct logits_row {
    const void *data;
    dsc_dtype dtype;
    float scale;
};

static struct logits_row logits_of(const struct dsc_rows *rows, const void *data, dsc_dtype dtype, float scale,
                                   int64_t row)
{
    return (struct logits_row){dsc_at(data, dtype, row * rows->n_cols), dtype, scale};
}

/* Writes scale * logits of a block to scores; raises *max. */
static void load_scores(const struct dsc_rows *rows, const struct logits_row *row, int64_t begin, int64_t n,
                        dsc_f32 *scores, float *max)
{
    rows->nn->scores(n, row->dtype, dsc_at(row->data, row->dtype, begin), row->scale, NULL, scores, max);
}

/* The largest score, and the logarithm of the sum of exponentials below it. */
static void read_sum(const struct dsc_rows *rows, const struct logits_row *row, float *out_max, float *out_log_sum)
{
    DSC_ALIGNED dsc_f32 scores[DSC_BLOCK_ELEMS];
    float max = -INFINITY;
    float ignored_max = -INFINITY;
    double sum = 0.0;

    for (int64_t begin = 0; begin < rows->n_cols; begin += DSC_BLOCK_ELEMS)
        load_scores(rows, row, begin, dsc_block_of(rows->n_cols - begin), scores, &max);
    if (max == -INFINITY) /* a row of -inf adds nothing, and a row of NaN is NaN */
        max = 0.0f;
    for (int64_t begin = 0; begin < rows->n_cols; begin += DSC_BLOCK_ELEMS) {
        int64_t n = dsc_block_of(rows->n_cols - begin);

        load_scores(rows, row, begin, n, scores, &ignored_max);
        rows->nn->exps(n, scores, max, scores, DSC_DTYPE_F32, scores, &sum);
    }
    *out_max = max;
    *out_log_sum = (float)log(sum);
}

struct divergence_job {
    struct dsc_rows rows;
    const struct dsc_nn_divergence *call;
};

static void divergence_row(const void *arg, int64_t row_index, float *const *sums)
{
    const struct divergence_job *job = arg;
    const struct dsc_nn_divergence *call = job->call;
    const struct dsc_rows *rows = &job->rows;
    const struct logits_row student = logits_of(rows, call->student, call->dtype, call->scale, row_index);
    const struct logits_row teacher = logits_of(rows, call->teacher, call->teacher_dtype, call->scale, row_index);
    struct dsc_nn_divergence_row *row = &call->rows[row_index];
    DSC_ALIGNED dsc_f32 of_student[DSC_BLOCK_ELEMS];
    DSC_ALIGNED dsc_f32 of_teacher[DSC_BLOCK_ELEMS];
    float ignored_max = -INFINITY;
    double student_sum = 0.0;
    double teacher_sum = 0.0;

    (void)sums;
    *row = (struct dsc_nn_divergence_row){0};
    call->losses[row_index] = 0.0f;
    if (call->is_counted != NULL && call->is_counted[row_index] == 0)
        return;
    read_sum(rows, &student, &row->student_max, &row->student_log_sum);
    read_sum(rows, &teacher, &row->teacher_max, &row->teacher_log_sum);
    for (int64_t begin = 0; begin < rows->n_cols; begin += DSC_BLOCK_ELEMS) {
        int64_t n = dsc_block_of(rows->n_cols - begin);

        load_scores(rows, &student, begin, n, of_student, &ignored_max);
        load_scores(rows, &teacher, begin, n, of_teacher, &ignored_max);
        rows->nn->divergence(n, of_student, of_teacher, row, call->beta, &teacher_sum, &student_sum);
    }
    row->of_student = (float)student_sum;
    if (call->beta == 0.0f || call->beta == 1.0f)
        call->losses[row_index] = (float)(call->beta == 0.0f ? teacher_sum : student_sum);
    else
        call->losses[row_index] = (float)((double)call->beta * teacher_sum + (double)(1.0f - call->beta) * student_sum);
}

static dsc_status check(int64_t n_rows, int64_t n_cols, dsc_dtype dtype, dsc_dtype teacher_dtype, float beta,
                        float scale)
{
    DSC_TRY(dsc_check_rows(n_rows, n_cols, dsc_dtype_bytes(dtype) == 0 ? dtype : teacher_dtype));
    if (!(beta >= 0.0f && beta <= 1.0f))
        return dsc_fail(DSC_EINVAL, "beta is %g, must be 0 to 1", (double)beta);
    if (!(scale > 0.0f && scale < INFINITY))
        return dsc_fail(DSC_EINVAL, "scale is %g, must be positive and finite", (double)scale);
    return DSC_OK;
}

dsc_status dsc_nn_divergence(const struct dsc_nn_divergence *call, const struct dsc_par *par)
{
    DSC_TRY(check(call->n_rows, call->n_cols, call->dtype, call->teacher_dtype, call->beta, call->scale));
    DSC_TRY(CHECK_PRESENT(call->n_rows, NAMED(call, student), NAMED(call, teacher), NAMED(call, losses),
                          NAMED(call, rows)));

    struct divergence_job job = {dsc_rows_of(call->n_rows, call->n_cols), call};

    dsc_rows_run(&job.rows, NULL, divergence_row, &job, par);
    return DSC_OK;
}

struct divergence_grad_job {
    struct dsc_rows rows;
    const struct dsc_nn_divergence_grad *call;
};

static void divergence_grad_row(const void *arg, int64_t row, float *const *sums)
{
    const struct divergence_grad_job *job = arg;
    const struct dsc_nn_divergence_grad *call = job->call;
    const struct dsc_rows *rows = &job->rows;
    const struct logits_row student = logits_of(rows, call->student, call->dtype, call->scale, row);
    const struct logits_row teacher = logits_of(rows, call->teacher, call->teacher_dtype, call->scale, row);
    void *dstudent = dsc_at_out(call->dstudent, call->dtype, row * rows->n_cols);
    DSC_ALIGNED dsc_f32 of_student[DSC_BLOCK_ELEMS];
    DSC_ALIGNED dsc_f32 of_teacher[DSC_BLOCK_ELEMS];
    float factor = call->scale * call->dlosses[row];
    float ignored_max = -INFINITY;

    (void)sums;
    if (call->is_counted != NULL && call->is_counted[row] == 0) {
        memset(dstudent, 0, (size_t)rows->n_cols * dsc_dtype_bytes(call->dtype));
        return;
    }
    for (int64_t begin = 0; begin < rows->n_cols; begin += DSC_BLOCK_ELEMS) {
        int64_t n = dsc_block_of(rows->n_cols - begin);

        load_scores(rows, &student, begin, n, of_student, &ignored_max);
        load_scores(rows, &teacher, begin, n, of_teacher, &ignored_max);
        rows->nn->divergence_grad(n, of_student, of_teacher, &call->rows[row], call->beta, factor, of_student);
        dsc_store(rows, call->dtype, of_student, n, dsc_at_out(dstudent, call->dtype, begin));
    }
}

dsc_status dsc_nn_divergence_grad(const struct dsc_nn_divergence_grad *call, const struct dsc_par *par)
{
    DSC_TRY(check(call->n_rows, call->n_cols, call->dtype, call->teacher_dtype, call->beta, call->scale));
    DSC_TRY(CHECK_PRESENT(call->n_rows, NAMED(call, student), NAMED(call, teacher), NAMED(call, rows),
                          NAMED(call, dlosses), NAMED(call, dstudent)));

    struct divergence_grad_job job = {dsc_rows_of(call->n_rows, call->n_cols), call};

    dsc_rows_run(&job.rows, NULL, divergence_grad_row, &job, par);
    return DSC_OK;
}
