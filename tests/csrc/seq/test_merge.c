/*
 * seq/merge.c: merged parts of a softmax against the whole softmax in f64. Covers rows without keys, large and small
 * magnitudes, threads and refused arguments.
 */
#include "arrays.h"
#include "pool.h"
#include "test.h"

#include "dsc/seq.h"

#define MAX_GROUPS 3
#define MAX_ROWS 12
#define MAX_WIDTH 1100
#define MAX_ELEMS (MAX_GROUPS * MAX_ROWS * MAX_WIDTH)

static float out[MAX_ELEMS];
static double expected[MAX_ELEMS];
static float part[MAX_ELEMS];
static uint16_t half[MAX_ELEMS];
static float again[MAX_ELEMS];

/* Merges parts over ranges of rows, with sums of any magnitude, and compares with sums of exponentials in f64. */
static void check_parts(dsc_dtype dtype, int64_t n_rows, int64_t width, double spread, const struct dsc_par *par)
{
    float log_sums[MAX_GROUPS * MAX_ROWS];
    float of_part[MAX_GROUPS * MAX_ROWS];
    double most[MAX_GROUPS * MAX_ROWS];
    double sum[MAX_GROUPS * MAX_ROWS] = {0};
    uint64_t random = 17;

    for (int64_t i = 0; i < MAX_GROUPS * n_rows; i++) {
        log_sums[i] = -INFINITY;
        most[i] = -INFINITY;
    }
    memset(out, 0, sizeof out);
    memset(expected, 0, sizeof expected);
    for (int n = 0; n < 6; n++) {
        int64_t n_part = n == 0 ? n_rows : 1 + test_below(&random, n_rows);
        int64_t first = test_below(&random, n_rows - n_part + 1);

        for (int64_t g = 0; g < MAX_GROUPS; g++)
            for (int64_t i = 0; i < n_part; i++) {
                int64_t row = g * n_rows + first + i;
                float log_sum = (n + i) % 5 == 1 ? -INFINITY : (float)(spread * test_uniform(&random));
                double scale;

                of_part[g * n_part + i] = log_sum;
                for (int64_t w = 0; w < width; w++) {
                    int64_t at = (g * n_part + i) * width + w;

                    part[at] = log_sum == -INFINITY ? NAN : (float)(4 * test_uniform(&random));
                    if (dtype != DSC_DTYPE_F32) {
                        half[at] = dtype == DSC_DTYPE_BF16 ? dsc_f32_to_bf16(part[at]) : dsc_f32_to_f16(part[at]);
                        part[at] = dtype == DSC_DTYPE_BF16 ? dsc_bf16_to_f32(half[at]) : dsc_f16_to_f32(half[at]);
                    }
                }
                if (log_sum == -INFINITY)
                    continue;
                /* The sums are kept relative to the largest logarithm so far. */
                scale = fmax(most[row], (double)log_sum);
                for (int64_t w = 0; w < width; w++)
                    expected[row * width + w] = expected[row * width + w] * exp(most[row] - scale) +
                                                (double)part[(g * n_part + i) * width + w] * exp((double)log_sum - scale);
                sum[row] = sum[row] * exp(most[row] - scale) + exp((double)log_sum - scale);
                most[row] = scale;
            }
        CHECK_STATUS(dsc_seq_merge(out, log_sums, MAX_GROUPS, n_rows, width, dtype == DSC_DTYPE_F32 ? (void *)part : (void *)half, dtype, of_part,
                                   first, n_part, par),
                     DSC_OK);
    }
    for (int64_t row = 0; row < MAX_GROUPS * n_rows; row++) {
        double log_sum = most[row] == -INFINITY ? -INFINITY : most[row] + log(sum[row]);

        TEST_AT(row);
        CHECK_NEAR(log_sums[row], log_sum, 6, 1.0);
        for (int64_t w = 0; w < width; w++)
            CHECK_NEAR(out[row * width + w], most[row] == -INFINITY ? 0.0 : expected[row * width + w] / sum[row], 24 + 8 * spread, 4.0);
    }
}

static void test_values(void)
{
    const int64_t widths[] = {1, 7, 64, 1025};
    const double spreads[] = {0.5, 20, 1e4, 1e37};
    struct pool pool;
    struct dsc_par par = {&pool, pool_run};

    pool_init(&pool, 3, 1);
    for (size_t w = 0; w < 4; w++)
        for (size_t s = 0; s < 4; s++)
            for (int dtype = 0; dtype < DSC_DTYPE_COUNT; dtype++) {
                TEST_CASE("width %d, logarithms up to %g, %s", (int)widths[w], spreads[s], dtype_names[dtype]);
                check_parts((dsc_dtype)dtype, s % 2 ? MAX_ROWS : 5, widths[w], spreads[s], dtype == 0 ? NULL : &par);
            }
    pool_clear(&pool);
}

/* Every instruction set and thread count gives the bits of the first. */
static void test_same_bits(void)
{
    static float first[MAX_ELEMS];
    float sums[MAX_ROWS];
    float first_sums[MAX_ROWS];
    struct pool pool;
    struct dsc_par par = {&pool, pool_run};
    uint64_t random = 23;
    float of_part[MAX_ROWS];
    int32_t isa_index = 0;
    const char *isa;
    bool is_first = true;

    pool_init(&pool, 3, 1);
    for (int64_t i = 0; i < MAX_ROWS * MAX_WIDTH; i++) {
        part[i] = (float)test_uniform(&random);
        out[i] = (float)test_uniform(&random);
    }
    for (int64_t i = 0; i < MAX_ROWS; i++)
        of_part[i] = (float)(9 * test_uniform(&random));
    while (next_isa(&isa_index, &isa))
        for (int n_threads = 1; n_threads <= 3; n_threads += 2) {
            TEST_CASE("%s, %d threads", isa, n_threads);
            memcpy(again, out, sizeof again);
            memset(sums, 0, sizeof sums);
            CHECK_STATUS(dsc_seq_merge(again, sums, 1, MAX_ROWS, MAX_WIDTH, part, DSC_DTYPE_F32, of_part, 0, MAX_ROWS, n_threads == 1 ? NULL : &par), DSC_OK);
            if (is_first) {
                memcpy(first, again, sizeof first);
                memcpy(first_sums, sums, sizeof sums);
            }
            is_first = false;
            CHECK_BYTES(again, first, MAX_ROWS * MAX_WIDTH * sizeof *again);
            CHECK_BYTES(sums, first_sums, sizeof sums);
        }
    pool_clear(&pool);
}

static void test_not_finite(void)
{
    float row[2] = {3, 4};
    float log_sum = 1;
    const float values[2] = {1, 2};
    const float nan = NAN;
    const float none = -INFINITY;

    TEST_CASE("a part without keys");
    CHECK_STATUS(dsc_seq_merge(row, &log_sum, 1, 1, 2, values, DSC_DTYPE_F32, &none, 0, 1, NULL), DSC_OK);
    CHECK(row[0] == 3 && row[1] == 4 && log_sum == 1);
    TEST_CASE("NaN is kept");
    CHECK_STATUS(dsc_seq_merge(row, &log_sum, 1, 1, 2, values, DSC_DTYPE_F32, &nan, 0, 1, NULL), DSC_OK);
    CHECK(isnan(row[0]) && isnan(log_sum));
}

static void test_bad_input(void)
{
    float row[2] = {3, 4};
    float log_sum = 1;
    float of_part = 1;

    CHECK_ERROR(dsc_seq_merge(row, &log_sum, 1, 1, 2, row, DSC_DTYPE_COUNT, &of_part, 0, 1, NULL), DSC_EINVAL, "dtype");
    CHECK_ERROR(dsc_seq_merge(row, &log_sum, -1, 1, 2, row, DSC_DTYPE_F32, &of_part, 0, 1, NULL), DSC_EINVAL, "-1 groups");
    CHECK_ERROR(dsc_seq_merge(row, &log_sum, 1, 1, 2, row, DSC_DTYPE_F32, &of_part, 1, 1, NULL), DSC_EINVAL, "from row 1");
    CHECK_ERROR(dsc_seq_merge(row, &log_sum, 1, 1, 2, row, DSC_DTYPE_F32, &of_part, 0, 2, NULL), DSC_EINVAL, "2 rows");
    CHECK_ERROR(dsc_seq_merge(row, &log_sum, INT64_MAX, 2, 2, row, DSC_DTYPE_F32, &of_part, 0, 1, NULL), DSC_EOVERFLOW, "int64_t");
    CHECK_ERROR(dsc_seq_merge(NULL, &log_sum, 1, 1, 2, row, DSC_DTYPE_F32, &of_part, 0, 1, NULL), DSC_EINVAL, "NULL");
    CHECK_STATUS(dsc_seq_merge(NULL, NULL, 0, 1, 2, NULL, DSC_DTYPE_F32, NULL, 0, 1, NULL), DSC_OK);
    CHECK(row[0] == 3 && log_sum == 1);
}

int main(void)
{
    test_values();
    test_same_bits();
    test_not_finite();
    test_bad_input();
    return test_finish(__FILE__);
}
