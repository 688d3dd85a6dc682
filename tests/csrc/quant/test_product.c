/*
 * Products with packed codes against the formula of dsc/quant.h in f64; the same bytes for every instruction set, any
 * threads and any number of rows.
 */
#include "arrays.h"
#include "pool.h"

#include "dsc/quant.h"

/* A call, and its memory. */
struct run {
    struct dsc_quant_product call;
    struct array x, y, scales, bias;
    unsigned char *codes;
    int64_t row_bytes;
};

static struct run run_create(int64_t n_rows, int64_t n_cols, int64_t n_outputs, int64_t group, int bits,
                             dsc_dtype dtype, dsc_dtype scale_dtype, uint64_t *random)
{
    struct run run = {.row_bytes = (n_cols * bits + 31) / 32 * 4};
    int64_t n_bytes = n_outputs * run.row_bytes;

    run.x = array_create(dtype, n_rows * n_cols, 3);
    run.y = array_create(dtype, n_rows * n_outputs, 1);
    run.scales = array_create(scale_dtype, n_outputs * dsc_quant_n_groups(n_cols, group), 2);
    run.bias = array_create(scale_dtype, n_outputs, 1);
    array_fill(&run.x, 1, false, random);
    array_fill(&run.scales, 0.1, true, random);
    array_fill(&run.bias, 1, false, random);
    run.codes = test_alloc((size_t)n_bytes);
    for (int64_t i = 0; i < n_bytes; i++)
        run.codes[i] = (unsigned char)test_random(random);
    run.call = (struct dsc_quant_product){.n_rows = n_rows,
                                          .n_cols = n_cols,
                                          .n_outputs = n_outputs,
                                          .group = group,
                                          .bits = bits,
                                          .dtype = dtype,
                                          .scale_dtype = scale_dtype,
                                          .bias_dtype = scale_dtype,
                                          .x = run.x.data,
                                          .codes = run.codes,
                                          .scales = run.scales.data,
                                          .bias = run.bias.data,
                                          .y = run.y.data};
    return run;
}

static void run_destroy(struct run *run)
{
    array_destroy(&run->x);
    array_destroy(&run->y);
    array_destroy(&run->scales);
    array_destroy(&run->bias);
    free(run->codes);
}

static int number_at(const struct run *run, int64_t output, int64_t column)
{
    const unsigned char *codes = run->codes + output * run->row_bytes;

    return run->call.bits == 8 ? codes[column] - 128 : (codes[column / 2] >> (column % 2 * 4) & 15) - 8;
}

static void check_run(const struct run *run)
{
    int64_t n_groups = dsc_quant_n_groups(run->call.n_cols, run->call.group);
    double unit = run->call.dtype == DSC_DTYPE_F32 ? 0 : run->call.dtype == DSC_DTYPE_BF16 ? 0x1p-8 : 0x1p-11;

    for (int64_t i = 0; i < run->call.n_rows; i++)
        for (int64_t output = 0; output < run->call.n_outputs; output++) {
            double sum = run->call.bias == NULL ? 0 : array_get(&run->bias, output);
            double magnitude = fabs(sum);

            for (int64_t column = 0; column < run->call.n_cols; column++) {
                double scale = array_get(&run->scales, output * n_groups + column / run->call.group);
                double term =
                    array_get(&run->x, i * run->call.n_cols + column) * number_at(run, output, column) * scale;

                sum += term;
                magnitude += fabs(term);
            }
            TEST_AT(i * run->call.n_outputs + output);
            /* Terms are rounded a few times each, the result once; f16 below its normal numbers as well. */
            double allowed = magnitude * 0x1p-22 + fabs(sum) * unit * (1 + 0x1p-20) + (unit > 0 ? 0x1p-25 : 0);
            double found = array_get(&run->y, i * run->call.n_outputs + output);

            test_report(fabs(found - sum) <= allowed, __FILE__, __LINE__, "%.9g, not %.9g (%g allowed)", found, sum,
                        allowed);
        }
}

static const int64_t sizes[][4] = {
    /* rows, columns, outputs, group */
    {0, 5, 2, 2},     {3, 0, 2, 4},     {3, 5, 0, 4},    {1, 1, 1, 1},     {7, 1, 3, 4},
    {1, 7, 5, 3},     {2, 17, 4, 16},   {1, 16, 9, 16},  {9, 48, 7, 16},   {7, 64, 11, 64},
    {5, 130, 13, 65}, {4, 97, 5, 1000}, {6, 160, 8, 48}, {1, 1200, 4, 16},
};
#define N_SIZES ((int)(sizeof sizes / sizeof *sizes))

static void test_formula(const struct dsc_par *par)
{
    uint64_t random = 1;

    for (int s = 0; s < N_SIZES; s++)
        for (int bits = 4; bits <= 8; bits += 4)
            for (int dtype = 0; dtype < DSC_DTYPE_COUNT; dtype++) {
                struct run run = run_create(sizes[s][0], sizes[s][1], sizes[s][2], sizes[s][3], bits, (dsc_dtype)dtype,
                                            (dsc_dtype)((s + dtype) % DSC_DTYPE_COUNT), &random);

                TEST_CASE("%d bits, %s, size %d", bits, dtype_names[dtype], s);
                if (s % 3 == 1)
                    run.call.bias = NULL;
                CHECK_STATUS(dsc_quant_product(&run.call, par), DSC_OK);
                check_run(&run);
                run_destroy(&run);
            }
}

/* Every instruction set, and threads, give the same bytes; so does every row of x by itself. */
static void test_same_bits(const struct dsc_par *par)
{
    static const int64_t large[][4] = {{7, 1024, 101, 64}, {3, 333, 301, 37}, {5, 257, 403, 257}};
    uint64_t random = 2;

    for (int s = 0; s < 3; s++)
        for (int bits = 4; bits <= 8; bits += 4)
            for (int dtype = 0; dtype < DSC_DTYPE_COUNT; dtype++) {
                struct run run = run_create(large[s][0], large[s][1], large[s][2], large[s][3], bits, (dsc_dtype)dtype,
                                            (dsc_dtype)s, &random);
                struct array first;
                const char *isa;
                int isa_index = 0;

                CHECK_STATUS(dsc_cpu_isa_force("scalar"), DSC_OK);
                CHECK_STATUS(dsc_quant_product(&run.call, NULL), DSC_OK);
                first = array_copy(&run.y, 1);
                while (next_isa(&isa_index, &isa)) {
                    struct dsc_quant_product row = run.call;

                    TEST_CASE("%d bits, %s on %s, size %d", bits, dtype_names[dtype], isa, s);
                    memset(run.y.data, 0, (size_t)run.y.n * dsc_dtype_bytes(run.y.dtype));
                    CHECK_STATUS(dsc_quant_product(&run.call, par), DSC_OK);
                    CHECK_SAME(&run.y, &first);
                    row.n_rows = 1;
                    row.x = run.x.data + (size_t)row.n_cols * dsc_dtype_bytes(run.x.dtype);
                    row.y = run.y.data + (size_t)row.n_outputs * dsc_dtype_bytes(run.y.dtype);
                    memset(row.y, 0, (size_t)row.n_outputs * dsc_dtype_bytes(run.y.dtype));
                    CHECK_STATUS(dsc_quant_product(&row, par), DSC_OK);
                    CHECK_SAME(&run.y, &first);
                }
                array_destroy(&first);
                run_destroy(&run);
            }
}

static void test_refusals(void)
{
    float x[8] = {0}, y[2], scales[2] = {0};
    unsigned char codes[16] = {0};
    struct dsc_quant_product good = {.n_rows = 1,
                                     .n_cols = 8,
                                     .n_outputs = 2,
                                     .group = 8,
                                     .bits = 8,
                                     .x = x,
                                     .codes = codes,
                                     .scales = scales,
                                     .y = y};
    struct dsc_quant_product bad = good;

#define REFUSED(field, value, status, word)                           \
    do {                                                              \
        bad = good;                                                   \
        bad.field = (value);                                          \
        CHECK_ERROR(dsc_quant_product(&bad, NULL), (status), (word)); \
    } while (0)

    CHECK_STATUS(dsc_quant_product(&good, NULL), DSC_OK);
    REFUSED(n_rows, -1, DSC_EINVAL, "negative");
    REFUSED(n_cols, -1, DSC_EINVAL, "negative");
    REFUSED(n_outputs, -1, DSC_EINVAL, "negative");
    REFUSED(n_rows, INT64_MAX / 2, DSC_EOVERFLOW, "int64_t");
    REFUSED(n_outputs, INT64_MAX / 2, DSC_EOVERFLOW, "int64_t");
    REFUSED(group, 0, DSC_EINVAL, "group is 0");
    REFUSED(bits, 5, DSC_EINVAL, "bits is 5");
    REFUSED(dtype, (dsc_dtype)9, DSC_EINVAL, "dtype is 9");
    REFUSED(scale_dtype, (dsc_dtype)9, DSC_EINVAL, "scale_dtype is 9");
    REFUSED(bias_dtype, (dsc_dtype)9, DSC_EINVAL, "bias_dtype is 9");
    REFUSED(x, NULL, DSC_EINVAL, "x is NULL");
    REFUSED(codes, NULL, DSC_EINVAL, "codes is NULL");
    REFUSED(scales, NULL, DSC_EINVAL, "scales is NULL");
    REFUSED(y, NULL, DSC_EINVAL, "y is NULL");
}

int main(void)
{
    struct pool pool;

    pool_init(&pool, 3, 1);
    test_formula(&pool.par);
    test_same_bits(&pool.par);
    test_refusals();
    pool_clear(&pool);
    return test_finish(__FILE__);
}
