/*
 * divergence: the loss and the student's gradient against the formula in f64, in each pair of dtypes, for each kind of
 * mixture, on row lengths near every vector width and block size. Any thread count and instruction set must give the
 * same bits. Logits of -inf, NaN, and rows that are not counted behave as the header says.
 */
#include "arrays.h"

#include "dsc/nn.h"
#include "pool.h"

static const float betas[] = {0.0f, 1.0f, 0.5f, 0.1f, 0.9f, 1e-6f};
#define N_BETAS ((int)(sizeof betas / sizeof betas[0]))

/* Rows x columns: no row, one element, two, primes, columns over several blocks, many chunks of rows. */
static const int64_t shapes[][2] = {{0, 5}, {1, 1}, {3, 2}, {3, 17}, {5, 131}, {2, 2049}, {1, 40001}, {301, 63}};
#define N_SHAPES ((int)(sizeof shapes / sizeof shapes[0]))

#define SCALE 0.7f

struct logits {
    int64_t n_rows;
    int64_t n_cols;
    struct array student;
    struct array teacher;
    uint8_t *is_counted;
    float *dlosses;
};

struct found {
    float *losses;
    struct array gradient;
};

static struct logits make_logits(dsc_dtype dtype, dsc_dtype teacher_dtype, int64_t n_rows, int64_t n_cols, uint64_t *random)
{
    struct logits made = {
        .n_rows = n_rows,
        .n_cols = n_cols,
        .student = array_create(dtype, n_rows * n_cols, 2),
        .teacher = array_create(teacher_dtype, n_rows * n_cols, 4),
        .is_counted = test_alloc((size_t)n_rows),
        .dlosses = test_alloc((size_t)n_rows * sizeof(float)),
    };

    array_fill(&made.student, 8, false, random);
    array_fill(&made.teacher, 8, false, random);
    for (int64_t row = 0; row < n_rows; row++) {
        made.is_counted[row] = row % 3 != 1;
        made.dlosses[row] = (float)(row % 5) - 1.5f;
        for (int64_t i = row * n_cols; i < (row + 1) * n_cols && row % 4 == 2; i++) /* the same distribution */
            array_set(&made.teacher, i, array_get(&made.student, i));
    }
    return made;
}

static void destroy_logits(struct logits *made)
{
    array_destroy(&made->student);
    array_destroy(&made->teacher);
    free(made->is_counted);
    free(made->dlosses);
}

static struct found run(const struct logits *given, float beta, const struct dsc_par *par)
{
    struct dsc_nn_divergence_row *rows = test_alloc((size_t)given->n_rows * sizeof *rows);
    struct found got = {
        .losses = test_alloc((size_t)given->n_rows * sizeof(float)),
        .gradient = array_create(given->student.dtype, given->n_rows * given->n_cols, 2),
    };
    struct dsc_nn_divergence call = {
        .n_rows = given->n_rows,
        .n_cols = given->n_cols,
        .dtype = given->student.dtype,
        .teacher_dtype = given->teacher.dtype,
        .beta = beta,
        .scale = SCALE,
        .student = given->student.data,
        .teacher = given->teacher.data,
        .is_counted = given->is_counted,
        .losses = got.losses,
        .rows = rows,
    };
    struct dsc_nn_divergence_grad grad = {
        .n_rows = given->n_rows,
        .n_cols = given->n_cols,
        .dtype = given->student.dtype,
        .teacher_dtype = given->teacher.dtype,
        .beta = beta,
        .scale = SCALE,
        .student = given->student.data,
        .teacher = given->teacher.data,
        .is_counted = given->is_counted,
        .rows = rows,
        .dlosses = given->dlosses,
        .dstudent = got.gradient.data,
    };

    CHECK_STATUS(dsc_nn_divergence(&call, par), DSC_OK);
    CHECK_STATUS(dsc_nn_divergence_grad(&grad, par), DSC_OK);
    free(rows);
    return got;
}

static double log_sum_of(const struct array *logits, int64_t begin, int64_t n)
{
    double max = -INFINITY;
    double sum = 0;

    for (int64_t i = begin; i < begin + n; i++)
        max = fmax(max, SCALE * (double)array_get(logits, i));
    for (int64_t i = begin; i < begin + n; i++)
        sum += exp(SCALE * (double)array_get(logits, i) - max);
    return max + log(sum);
}

static double term(double weight, double other)
{
    return weight > 0 ? weight * log(weight / other) : 0;
}

static void check_near(double got, double wanted, double error)
{
    test_report(fabs(got - wanted) <= error, __FILE__, __LINE__, "%.9g is not within %g of %.9g", got, error, wanted);
}

/* The loss by the paper's formula, and the gradient of softmax by the chain rule: q (g - sum of q g), g = dloss/dq. */
static void check_row(const struct logits *given, float beta_f32, const struct found *got, int64_t row)
{
    int64_t n = given->n_cols;
    int64_t begin = row * n;
    double beta = (double)beta_f32;
    double of_student = log_sum_of(&given->student, begin, n);
    double of_teacher = log_sum_of(&given->teacher, begin, n);
    double loss = 0;
    double mean = 0;
    dsc_dtype dtype = given->student.dtype;
    double rounding = dtype == DSC_DTYPE_F32 ? 0 : dtype == DSC_DTYPE_BF16 ? 0x1p-8 : 0x1p-11;

    for (int pass = 0; pass < 2; pass++) {
        for (int64_t i = begin; i < begin + n; i++) {
            double q = exp(SCALE * (double)array_get(&given->student, i) - of_student);
            double p = exp(SCALE * (double)array_get(&given->teacher, i) - of_teacher);
            double m = beta * p + (1 - beta) * q;
            double slope = beta == 0 ? -p / q : beta == 1 ? log(q / p) + 1 : (1 - beta) * log(q / m);
            double wanted;

            if (pass == 0) {
                loss += beta == 0 ? term(p, q) : beta == 1 ? term(q, p) : beta * term(p, m) + (1 - beta) * term(q, m);
                mean += q * slope;
                continue;
            }
            wanted = given->is_counted[row] == 0 ? 0 : SCALE * given->dlosses[row] * q * (slope - mean);
            TEST_AT(i);
            check_near(array_get(&got->gradient, i), wanted, 2e-6 + 1.01 * rounding * fabs(wanted) + (dtype == DSC_DTYPE_F16 ? 0x1p-24 : 0));
        }
    }
    TEST_AT(row);
    check_near(got->losses[row], given->is_counted[row] == 0 ? 0 : loss, 2e-6 + 2e-6 * fabs(loss));
}

static void check_results(const struct logits *given, const struct found *got, const struct found *first)
{
    CHECK_SAME(&got->gradient, &first->gradient);
    if (given->n_rows > 0)
        CHECK(memcmp(got->losses, first->losses, (size_t)given->n_rows * sizeof(float)) == 0);
}

static void destroy_found(struct found *found)
{
    free(found->losses);
    array_destroy(&found->gradient);
}

static void check_variants(const struct logits *given, float beta, struct pool *pool)
{
    struct found first = run(given, beta, NULL);
    int32_t isa_index = 0;
    const char *isa;

    for (int64_t row = 0; row < given->n_rows; row++)
        check_row(given, beta, &first, row);
    while (next_isa(&isa_index, &isa)) {
        for (int is_shared = 0; is_shared < 2; is_shared++) {
            struct found got = run(given, beta, is_shared ? &pool->par : NULL);

            TEST_CASE("divergence of [%d, %d] %s, beta %g on %s", (int)given->n_rows, (int)given->n_cols, dtype_names[given->student.dtype],
                      (double)beta, isa);
            check_results(given, &got, &first);
            destroy_found(&got);
        }
    }
    destroy_found(&first);
}

static void check_everywhere(struct pool *pool)
{
    uint64_t random = 11;

    for (int s = 0; s < N_SHAPES; s++) {
        for (int dtype = 0; dtype < DSC_DTYPE_COUNT; dtype++) {
            for (int teacher = 0; teacher < DSC_DTYPE_COUNT; teacher++) {
                struct logits given = make_logits((dsc_dtype)dtype, (dsc_dtype)teacher, shapes[s][0], shapes[s][1], &random);

                for (int b = 0; b < N_BETAS; b++) {
                    TEST_CASE("divergence of [%d, %d] %s from %s, beta %g", (int)shapes[s][0], (int)shapes[s][1], dtype_names[dtype],
                              dtype_names[teacher], (double)betas[b]);
                    check_variants(&given, betas[b], pool);
                }
                destroy_logits(&given);
            }
        }
    }
}

static float loss_of(const float *student, const float *teacher, float beta, float *gradient, struct dsc_nn_divergence_row *row)
{
    float loss;
    float one = 1.0f;
    struct dsc_nn_divergence call = {1, 3, DSC_DTYPE_F32, DSC_DTYPE_F32, beta, 1.0f, student, teacher, NULL, &loss, row};
    struct dsc_nn_divergence_grad grad = {1, 3, DSC_DTYPE_F32, DSC_DTYPE_F32, beta, 1.0f, student, teacher, NULL, row, &one, gradient};

    CHECK_STATUS(dsc_nn_divergence(&call, NULL), DSC_OK);
    CHECK_STATUS(dsc_nn_divergence_grad(&grad, NULL), DSC_OK);
    return loss;
}

static void check_special_values(void)
{
    const float some[3] = {0.0f, 0.0f, -INFINITY};
    const float others[3] = {-INFINITY, 0.0f, 0.0f};
    const float none[3] = {-INFINITY, -INFINITY, -INFINITY};
    const float bad[3] = {0.0f, NAN, 1.0f};
    const float huge[3] = {3e38f, -3e38f, 0.0f};
    struct dsc_nn_divergence_row row;
    float gradient[3];
    double wanted = 0.5 * (0.5 * log(2.0) + 0.0) + 0.5 * (0.5 * log(2.0) + 0.0); /* one half of each is where the other is not */

    TEST_CASE("special values");
    CHECK(fabs(loss_of(some, others, 0.5f, gradient, &row) - wanted) < 1e-6);
    for (int i = 0; i < 3; i++)
        CHECK(isfinite(gradient[i]));
    CHECK(gradient[2] == 0.0f);
    CHECK(isinf(loss_of(some, others, 0.0f, gradient, &row)));
    CHECK(isinf(loss_of(some, others, 1.0f, gradient, &row)));
    for (int b = 0; b < N_BETAS; b++) {
        CHECK(loss_of(some, some, betas[b], gradient, &row) == 0.0f);
        CHECK(gradient[0] == 0.0f && gradient[1] == 0.0f && gradient[2] == 0.0f);
        CHECK(isnan(loss_of(bad, some, betas[b], gradient, &row)) && isnan(gradient[0]));
        CHECK(isnan(loss_of(some, bad, betas[b], gradient, &row)) && isnan(gradient[0]));
        loss_of(none, some, betas[b], gradient, &row);
        CHECK(row.student_log_sum == -INFINITY && row.teacher_log_sum > 0.0f);
        CHECK(loss_of(huge, huge, betas[b], gradient, &row) == 0.0f);
    }
}

static void check_refusals(void)
{
    float x[4] = {0};
    float y[4] = {0};
    struct dsc_nn_divergence_row row = {0};
    struct dsc_nn_divergence call = {1, 4, DSC_DTYPE_F32, DSC_DTYPE_F32, 0.5f, 1.0f, x, x, NULL, y, &row};
    struct dsc_nn_divergence_grad grad = {1, 4, DSC_DTYPE_F32, DSC_DTYPE_F32, 0.5f, 1.0f, x, x, NULL, &row, x, NULL};

    TEST_CASE("refusals");
    CHECK_ERROR(dsc_nn_divergence_grad(&grad, NULL), DSC_EINVAL, "dstudent is NULL for 1 rows");
    call.beta = 1.5f;
    CHECK_ERROR(dsc_nn_divergence(&call, NULL), DSC_EINVAL, "beta is 1.5, must be 0 to 1");
    call.beta = NAN;
    CHECK_ERROR(dsc_nn_divergence(&call, NULL), DSC_EINVAL, "beta is nan");
    call.beta = 0.5f;
    call.scale = 0.0f;
    CHECK_ERROR(dsc_nn_divergence(&call, NULL), DSC_EINVAL, "scale is 0");
    call.scale = 1.0f;
    call.teacher_dtype = DSC_DTYPE_COUNT;
    CHECK_ERROR(dsc_nn_divergence(&call, NULL), DSC_EINVAL, "which is no dsc_dtype");
    call.teacher_dtype = DSC_DTYPE_F32;
    call.teacher = NULL;
    CHECK_ERROR(dsc_nn_divergence(&call, NULL), DSC_EINVAL, "teacher is NULL for 1 rows");
    call.n_cols = 0;
    CHECK_ERROR(dsc_nn_divergence(&call, NULL), DSC_EINVAL, "n_cols is 0");
    for (int i = 0; i < 4; i++)
        CHECK(y[i] == 0.0f);
}

int main(void)
{
    struct pool pool;

    pool_init(&pool, 3, 1);
    check_everywhere(&pool);
    check_special_values();
    check_refusals();
    pool_clear(&pool);
    return test_finish(__FILE__);
}
