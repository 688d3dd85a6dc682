/*
 * tp/cross_entropy.c: a vocabulary split over ranks against the formula in f64. Covers infinities and NaNs, threads and
 * refused arguments.
 */
#include "arrays.h"
#include "pool.h"
#include "test.h"

#include "dsc/tp.h"

#define MAX_ROWS 40
#define MAX_WORDS 2600

static float logits[MAX_ROWS * MAX_WORDS];
static float part[MAX_ROWS * MAX_WORDS];
static float again[MAX_ROWS * MAX_WORDS];

static double log_sum_of(const float *row, int64_t n)
{
    double most = -INFINITY;
    double sum = 0;

    for (int64_t i = 0; i < n; i++)
        most = fmax(most, (double)row[i]);
    for (int64_t i = 0; i < n; i++)
        sum += exp((double)row[i] - most);
    return most + log(sum);
}

/* Copies columns [begin, end) of every row: the share of one rank. */
static void take(int64_t n_rows, int64_t vocab_size, int64_t begin, int64_t end)
{
    for (int64_t row = 0; row < n_rows; row++)
        for (int64_t i = begin; i < end; i++)
            part[row * (end - begin) + i - begin] = logits[row * vocab_size + i];
}

static void check_cut(int64_t n_rows, int64_t vocab_size, int n_ranks, double smoothing, const struct dsc_par *par)
{
    struct dsc_tp_row rows[4][MAX_ROWS];
    int64_t targets[MAX_ROWS];
    int64_t here[MAX_ROWS];
    float log_sums[MAX_ROWS];
    float scale[MAX_ROWS];
    uint64_t random = 5;

    for (int64_t i = 0; i < n_rows * vocab_size; i++)
        logits[i] = (float)((double)test_below(&random, 40000) / 1000.0 - 20.0);
    for (int64_t row = 0; row < n_rows; row++) {
        targets[row] = test_below(&random, vocab_size);
        scale[row] = row % 5 == 3 ? 0.0f : 0.25f + (float)row;
    }
    for (int rank = 0; rank < n_ranks; rank++) {
        int64_t begin = vocab_size * rank / n_ranks;
        int64_t end = vocab_size * (rank + 1) / n_ranks;

        take(n_rows, vocab_size, begin, end);
        for (int64_t row = 0; row < n_rows; row++)
            here[row] = targets[row] - begin;
        CHECK_STATUS(dsc_tp_cross_entropy_rows(part, DSC_DTYPE_F32, here, n_rows, end - begin, par, rows[rank]),
                     DSC_OK);
    }
    for (int64_t row = 0; row < n_rows; row++) {
        double most = -INFINITY;
        double sum = 0;
        double target = 0;

        for (int rank = 0; rank < n_ranks; rank++)
            most = fmax(most, (double)rows[rank][row].max);
        for (int rank = 0; rank < n_ranks; rank++) {
            if (rows[rank][row].sum_exp > 0)
                sum += (double)rows[rank][row].sum_exp * exp((double)rows[rank][row].max - most);
            target += (double)rows[rank][row].target;
        }
        log_sums[row] = (float)(most + log(sum));
        CHECK(fabs((double)log_sums[row] - log_sum_of(logits + row * vocab_size, vocab_size)) < 4e-6);
        CHECK(target == (double)logits[row * vocab_size + targets[row]]);
    }
    for (int rank = 0; rank < n_ranks; rank++) {
        int64_t begin = vocab_size * rank / n_ranks;
        int64_t end = vocab_size * (rank + 1) / n_ranks;
        double worst = 0;

        take(n_rows, vocab_size, begin, end);
        memcpy(again, part, sizeof part);
        for (int64_t row = 0; row < n_rows; row++)
            here[row] = targets[row] - begin;
        CHECK_STATUS(dsc_tp_cross_entropy_grad(part, DSC_DTYPE_F32, here, n_rows, end - begin, log_sums, scale,
                                               smoothing, vocab_size, par),
                     DSC_OK);
        CHECK_STATUS(dsc_tp_cross_entropy_grad(again, DSC_DTYPE_F32, here, n_rows, end - begin, log_sums, scale,
                                               smoothing, vocab_size, NULL),
                     DSC_OK);
        CHECK_BYTES(part, again, (size_t)(n_rows * (end - begin)) * sizeof *part); /* threads */
        for (int64_t row = 0; row < n_rows; row++)
            for (int64_t i = begin; i < end; i++) {
                double softmax =
                    exp((double)logits[row * vocab_size + i] - log_sum_of(logits + row * vocab_size, vocab_size));
                double expected = (double)scale[row] *
                                  (softmax - smoothing / (double)vocab_size - (i == targets[row] ? 1 - smoothing : 0));

                worst = fmax(worst, fabs(expected - (double)part[row * (end - begin) + i - begin]) /
                                        fmax((double)scale[row], 1));
            }
        CHECK(worst < 4e-6);
    }
}

static void test_values(void)
{
    struct pool pool;
    struct dsc_par par = {&pool, pool_run};
    const int64_t vocab_sizes[] = {1, 2, 17, 1024, 1025, 2600};

    pool_init(&pool, 3, 1);
    for (size_t w = 0; w < sizeof vocab_sizes / sizeof *vocab_sizes; w++)
        for (int n_ranks = 1; n_ranks <= 4; n_ranks++) {
            TEST_CASE("a vocabulary of %d over %d ranks", (int)vocab_sizes[w], n_ranks);
            check_cut(w < 4 ? MAX_ROWS : 7, vocab_sizes[w], n_ranks, n_ranks % 2 ? 0.0 : 0.1, &par);
        }
    check_cut(0, 5, 2, 0.0, &par);
    pool_clear(&pool);
}

/*
 * Every instruction set and thread count gives the bits of the first run. Rounding decides the last bits of a mantissa,
 * so any difference would show.
 */
static void test_same_bits(void)
{
    static const int64_t shapes[][2] = {{1, 1}, {5, 17}, {3, 1025}, {MAX_ROWS, 64}, {2, 2600}};
    static char values[MAX_ROWS * MAX_WORDS * 4];
    static char changed[MAX_ROWS * MAX_WORDS * 4];
    static char first[MAX_ROWS * MAX_WORDS * 4];
    static struct dsc_tp_row rows[MAX_ROWS];
    static struct dsc_tp_row first_rows[MAX_ROWS];
    struct pool pool;
    struct dsc_par par = {&pool, pool_run};
    int64_t targets[MAX_ROWS];
    float log_sums[MAX_ROWS];
    float scale[MAX_ROWS];
    uint64_t random = 11;

    pool_init(&pool, 3, 1);
    for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++)
        for (int dtype = 0; dtype < DSC_DTYPE_COUNT; dtype++) {
            int64_t n_rows = shapes[s][0];
            int64_t vocab_size = shapes[s][1];
            size_t n_bytes = (size_t)(n_rows * vocab_size) * dsc_dtype_bytes((dsc_dtype)dtype);
            int32_t isa_index = 0;
            const char *isa;
            bool is_first = true;

            for (int64_t i = 0; i < n_rows * vocab_size; i++) {
                /* Logits over a wide range, so that terms go from vanishing to large. */
                float logit = -(float)test_below(&random, 1 << 22) / 40000.0f;

                if (dtype == DSC_DTYPE_F32)
                    ((float *)values)[i] = logit;
                else
                    ((uint16_t *)values)[i] = dtype == DSC_DTYPE_BF16 ? dsc_f32_to_bf16(logit) : dsc_f32_to_f16(logit);
            }
            for (int64_t row = 0; row < n_rows; row++) {
                targets[row] = test_below(&random, vocab_size);
                log_sums[row] = (float)test_below(&random, 1000) / 300.0f;
                scale[row] = 0.1f + (float)row / 7.0f;
            }
            while (next_isa(&isa_index, &isa))
                for (int n_threads = 1; n_threads <= 3; n_threads += 2) {
                    const struct dsc_par *lent = n_threads == 1 ? NULL : &par;

                    TEST_CASE("[%d, %d] %s on %s, %d threads", (int)n_rows, (int)vocab_size, dtype_names[dtype], isa,
                              n_threads);
                    memcpy(changed, values, n_bytes);
                    CHECK_STATUS(
                        dsc_tp_cross_entropy_rows(changed, (dsc_dtype)dtype, targets, n_rows, vocab_size, lent, rows),
                        DSC_OK);
                    CHECK_STATUS(dsc_tp_cross_entropy_grad(changed, (dsc_dtype)dtype, targets, n_rows, vocab_size,
                                                           log_sums, scale, 0.1, vocab_size, lent),
                                 DSC_OK);
                    if (is_first) {
                        memcpy(first, changed, n_bytes);
                        memcpy(first_rows, rows, sizeof rows);
                        CHECK(memcmp(changed, values, n_bytes) != 0);
                    }
                    is_first = false;
                    CHECK_BYTES(changed, first, n_bytes);
                    CHECK_BYTES(rows, first_rows, (size_t)n_rows * sizeof *rows);
                }
        }
    pool_clear(&pool);
}

/* Checks the exponential against exp(). No logit is above log_sum. */
static void test_exponential(void)
{
    int64_t target = -1;
    const float zero = 0;
    const float one = 1;

    for (double x = -90; x <= 0; x += 0.0071) {
        float value = (float)x;

        CHECK_STATUS(dsc_tp_cross_entropy_grad(&value, DSC_DTYPE_F32, &target, 1, 1, &zero, &one, 0.0, 1, NULL),
                     DSC_OK);
        if ((float)x < -87.3f)
            CHECK(value == 0.0f);
        else
            CHECK(fabs((double)value - exp((double)(float)x)) <= 3e-7 * exp(x));
    }
}

static void test_not_finite(void)
{
    float values[4] = {-INFINITY, -INFINITY, -INFINITY, -INFINITY};
    int64_t target = 9;
    struct dsc_tp_row row;

    TEST_CASE("nothing but -inf");
    CHECK_STATUS(dsc_tp_cross_entropy_rows(values, DSC_DTYPE_F32, &target, 1, 4, NULL, &row), DSC_OK);
    CHECK(row.max == -INFINITY && row.sum_exp == 0.0f && row.target == 0.0f);
    TEST_CASE("NaN");
    values[2] = NAN;
    CHECK_STATUS(dsc_tp_cross_entropy_rows(values, DSC_DTYPE_F32, &target, 1, 4, NULL, &row), DSC_OK);
    CHECK(isnan(row.sum_exp));
    TEST_CASE("inf");
    values[2] = INFINITY;
    CHECK_STATUS(dsc_tp_cross_entropy_rows(values, DSC_DTYPE_F32, &target, 1, 4, NULL, &row), DSC_OK);
    CHECK(row.max == INFINITY && isnan(row.sum_exp));
    TEST_CASE("an empty vocabulary");
    CHECK_STATUS(dsc_tp_cross_entropy_rows(NULL, DSC_DTYPE_F32, &target, 1, 0, NULL, &row), DSC_OK);
    CHECK(row.max == -INFINITY && row.sum_exp == 0.0f);
}

static void test_bad_input(void)
{
    float values[4] = {1, 2, 3, 4};
    int64_t target = 0;
    const float one = 1;
    struct dsc_tp_row row = {.max = -7};

    CHECK_ERROR(dsc_tp_cross_entropy_rows(values, DSC_DTYPE_COUNT, &target, 1, 4, NULL, &row), DSC_EINVAL, "dtype");
    CHECK_ERROR(dsc_tp_cross_entropy_rows(values, DSC_DTYPE_F32, &target, -1, 4, NULL, &row), DSC_EINVAL, "negative");
    CHECK_ERROR(dsc_tp_cross_entropy_rows(values, DSC_DTYPE_F32, &target, INT64_MAX, 4, NULL, &row), DSC_EOVERFLOW,
                "int64_t");
    CHECK_ERROR(dsc_tp_cross_entropy_rows(values, DSC_DTYPE_F32, NULL, 1, 4, NULL, &row), DSC_EINVAL, "targets");
    CHECK_ERROR(dsc_tp_cross_entropy_rows(NULL, DSC_DTYPE_F32, &target, 1, 4, NULL, &row), DSC_EINVAL, "logits");
    CHECK_ERROR(dsc_tp_cross_entropy_rows(values, DSC_DTYPE_F32, &target, 1, 4, NULL, NULL), DSC_EINVAL, "out_rows");
    CHECK_ERROR(dsc_tp_cross_entropy_grad(values, DSC_DTYPE_F32, &target, 1, 4, NULL, &one, 0, 4, NULL), DSC_EINVAL,
                "log_sum");
    CHECK_ERROR(dsc_tp_cross_entropy_grad(values, DSC_DTYPE_F32, &target, 1, 4, &one, &one, 1.5, 4, NULL), DSC_EINVAL,
                "smoothing");
    CHECK_ERROR(dsc_tp_cross_entropy_grad(values, DSC_DTYPE_F32, &target, 1, 4, &one, &one, 0, 3, NULL), DSC_EINVAL,
                "full_vocab_size");
    CHECK(row.max == -7 && values[0] == 1);
}

int main(void)
{
    test_values();
    test_same_bits();
    test_exponential();
    test_not_finite();
    test_bad_input();
    return test_finish(__FILE__);
}
