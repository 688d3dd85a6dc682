/*
 * Products of rows with a weight, and their gradients, against sums in f64; the same bytes for every instruction set
 * and any threads, and of a row for any number of rows.
 */
#include "arrays.h"
#include "pool.h"

#include "dsc/nn.h"

/* A call, its gradients, and their memory. */
struct run {
    struct dsc_nn_linear call;
    struct dsc_nn_linear_grad grad;
    struct array x, weight, bias, y, dy, dx, dweight, dbias;
};

static struct run run_create(int64_t n_rows, int64_t n_cols, int64_t n_outputs, dsc_dtype dtype, uint64_t *random)
{
    struct run run;

    run.x = array_create(dtype, n_rows * n_cols, 3);
    run.weight = array_create(dtype, n_outputs * n_cols, 1);
    run.bias = array_create(dtype, n_outputs, 2);
    run.y = array_create(dtype, n_rows * n_outputs, 1);
    run.dy = array_create(dtype, n_rows * n_outputs, 5);
    run.dx = array_create(dtype, n_rows * n_cols, 1);
    run.dweight = array_create(dtype, n_outputs * n_cols, 3);
    run.dbias = array_create(dtype, n_outputs, 1);
    array_fill(&run.x, 1, false, random);
    array_fill(&run.weight, 0.5, false, random);
    array_fill(&run.bias, 1, false, random);
    array_fill(&run.dy, 1, false, random);
    run.call = (struct dsc_nn_linear){.n_rows = n_rows,
                                      .n_cols = n_cols,
                                      .n_outputs = n_outputs,
                                      .dtype = dtype,
                                      .x = run.x.data,
                                      .weight = run.weight.data,
                                      .bias = run.bias.data,
                                      .y = run.y.data};
    run.grad = (struct dsc_nn_linear_grad){.n_rows = n_rows,
                                           .n_cols = n_cols,
                                           .n_outputs = n_outputs,
                                           .dtype = dtype,
                                           .x = run.x.data,
                                           .weight = run.weight.data,
                                           .dy = run.dy.data,
                                           .dx = run.dx.data,
                                           .dweight = run.dweight.data,
                                           .dbias = run.dbias.data};
    return run;
}

static void run_destroy(struct run *run)
{
    struct array *arrays[] = {&run->x,  &run->weight, &run->bias,    &run->y,
                              &run->dy, &run->dx,     &run->dweight, &run->dbias};

    for (size_t i = 0; i < sizeof arrays / sizeof *arrays; i++)
        array_destroy(arrays[i]);
}

/* A sum in f64, and the sum of its terms' magnitudes. */
struct sum {
    double value;
    double magnitude;
};

static void add(struct sum *sum, double term)
{
    sum->value += term;
    sum->magnitude += fabs(term);
}

static void check_sum(const struct array *found, int64_t i, const char *name, struct sum sum)
{
    double unit = found->dtype == DSC_DTYPE_F32 ? 0 : found->dtype == DSC_DTYPE_BF16 ? 0x1p-8 : 0x1p-11;
    /* Terms are rounded a few times each, the result once; f16 below its normal numbers as well. */
    double allowed = sum.magnitude * 0x1p-20 + fabs(sum.value) * unit * (1 + 0x1p-20) + (unit > 0 ? 0x1p-25 : 0);

    test_report(fabs(array_get(found, i) - sum.value) <= allowed, __FILE__, __LINE__,
                "%s[%lld]: %.9g, not %.9g (%g allowed)", name, (long long)i, array_get(found, i), sum.value, allowed);
}

static void check_run(const struct run *run)
{
    int64_t n_rows = run->call.n_rows, n_cols = run->call.n_cols, n_outputs = run->call.n_outputs;

    for (int64_t i = 0; i < n_rows; i++)
        for (int64_t o = 0; o < n_outputs; o++) {
            struct sum y = {0};

            if (run->call.bias != NULL)
                add(&y, array_get(&run->bias, o));
            for (int64_t c = 0; c < n_cols; c++)
                add(&y, (double)array_get(&run->x, i * n_cols + c) * array_get(&run->weight, o * n_cols + c));
            check_sum(&run->y, i * n_outputs + o, "y", y);
        }
    for (int64_t i = 0; i < n_rows; i++)
        for (int64_t c = 0; c < n_cols; c++) {
            struct sum dx = {0};

            for (int64_t o = 0; o < n_outputs; o++)
                add(&dx, (double)array_get(&run->dy, i * n_outputs + o) * array_get(&run->weight, o * n_cols + c));
            check_sum(&run->dx, i * n_cols + c, "dx", dx);
        }
    for (int64_t o = 0; o < n_outputs; o++) {
        struct sum dbias = {0};

        for (int64_t c = 0; c < n_cols; c++) {
            struct sum dweight = {0};

            for (int64_t i = 0; i < n_rows; i++)
                add(&dweight, (double)array_get(&run->dy, i * n_outputs + o) * array_get(&run->x, i * n_cols + c));
            check_sum(&run->dweight, o * n_cols + c, "dweight", dweight);
        }
        for (int64_t i = 0; i < n_rows; i++)
            add(&dbias, array_get(&run->dy, i * n_outputs + o));
        check_sum(&run->dbias, o, "dbias", dbias);
    }
}

/* Sizes around the steps of the loops: 3 and 4, 6, 8, 16, 48, 64, 96, 128, 256, 1024. */
static const int64_t sizes[][3] = {
    /* rows, columns, outputs */
    {0, 5, 2},   {3, 0, 2},    {3, 5, 0},   {1, 1, 1},     {7, 1, 3},     {1, 7, 5},     {2, 17, 4},
    {5, 16, 11}, {8, 48, 7},   {13, 64, 9}, {49, 130, 13}, {67, 97, 65},  {3, 1025, 67}, {1, 1031, 4},
    {131, 9, 5}, {129, 33, 3}, {6, 257, 3}, {4, 3, 257},   {2, 300, 129},
};
#define N_SIZES ((int)(sizeof sizes / sizeof *sizes))

static void test_formula(const struct dsc_par *par)
{
    uint64_t random = 1;

    for (int s = 0; s < N_SIZES; s++)
        for (int dtype = 0; dtype < DSC_DTYPE_COUNT; dtype++) {
            struct run run = run_create(sizes[s][0], sizes[s][1], sizes[s][2], (dsc_dtype)dtype, &random);

            TEST_CASE("%s, size %d", dtype_names[dtype], s);
            if (s % 3 == 1)
                run.call.bias = NULL;
            CHECK_STATUS(dsc_nn_linear(&run.call, par), DSC_OK);
            CHECK_STATUS(dsc_nn_linear_grad(&run.grad, par), DSC_OK);
            check_run(&run);
            run_destroy(&run);
        }
}

/* Every instruction set, and threads, give the same bytes; so does a row of x by itself. */
static void test_same_bits(const struct dsc_par *par)
{
    static const int64_t large[][3] = {{7, 1100, 401}, {250, 260, 131}};
    uint64_t random = 2;

    for (int s = 0; s < 2; s++)
        for (int dtype = 0; dtype < DSC_DTYPE_COUNT; dtype++) {
            struct run run = run_create(large[s][0], large[s][1], large[s][2], (dsc_dtype)dtype, &random);
            struct array *results[] = {&run.y, &run.dx, &run.dweight, &run.dbias};
            struct array first[4];
            size_t size = dsc_dtype_bytes((dsc_dtype)dtype);
            const char *isa;
            int isa_index = 0;

            CHECK_STATUS(dsc_cpu_isa_force("scalar"), DSC_OK);
            CHECK_STATUS(dsc_nn_linear(&run.call, NULL), DSC_OK);
            CHECK_STATUS(dsc_nn_linear_grad(&run.grad, NULL), DSC_OK);
            for (int i = 0; i < 4; i++)
                first[i] = array_copy(results[i], 1);
            while (next_isa(&isa_index, &isa)) {
                struct dsc_nn_linear row = run.call;
                struct dsc_nn_linear_grad row_grad = run.grad;
                int64_t at = run.call.n_rows - 2;

                TEST_CASE("%s on %s, size %d", dtype_names[dtype], isa, s);
                for (int i = 0; i < 4; i++)
                    memset(results[i]->data, 0, (size_t)results[i]->n * size);
                CHECK_STATUS(dsc_nn_linear(&run.call, par), DSC_OK);
                CHECK_STATUS(dsc_nn_linear_grad(&run.grad, par), DSC_OK);
                for (int i = 0; i < 4; i++)
                    CHECK_SAME(results[i], &first[i]);
                row.n_rows = row_grad.n_rows = 1;
                row.x = run.x.data + (size_t)(at * row.n_cols) * size;
                row.y = run.y.data + (size_t)(at * row.n_outputs) * size;
                row_grad.dy = run.dy.data + (size_t)(at * row.n_outputs) * size;
                row_grad.dx = run.dx.data + (size_t)(at * row.n_cols) * size;
                row_grad.dweight = row_grad.dbias = NULL;
                memset(row.y, 0, (size_t)row.n_outputs * size);
                memset(row_grad.dx, 0, (size_t)row.n_cols * size);
                CHECK_STATUS(dsc_nn_linear(&row, par), DSC_OK);
                CHECK_STATUS(dsc_nn_linear_grad(&row_grad, par), DSC_OK);
                CHECK_SAME(&run.y, &first[0]);
                CHECK_SAME(&run.dx, &first[1]);
            }
            for (int i = 0; i < 4; i++)
                array_destroy(&first[i]);
            run_destroy(&run);
        }
}

/* Columns past the end of a row are no terms: a NaN or an infinity stays in its own results. */
static void test_special_values(void)
{
    uint64_t random = 3;
    struct run run = run_create(5, 13, 7, DSC_DTYPE_BF16, &random);

    TEST_CASE("a NaN in row 2 of x, an infinity in row 3 of the weight");
    array_set(&run.x, 2 * 13 + 12, NAN);
    array_set(&run.weight, 3 * 13 + 1, INFINITY);
    CHECK_STATUS(dsc_nn_linear(&run.call, NULL), DSC_OK);
    CHECK_STATUS(dsc_nn_linear_grad(&run.grad, NULL), DSC_OK);
    for (int64_t i = 0; i < 5; i++)
        for (int64_t o = 0; o < 7; o++)
            CHECK_EQ(isfinite(array_get(&run.y, i * 7 + o)) != 0, i != 2 && o != 3);
    for (int64_t i = 0; i < 5; i++)
        for (int64_t c = 0; c < 13; c++)
            CHECK_EQ(isfinite(array_get(&run.dx, i * 13 + c)) != 0, c != 1);
    for (int64_t o = 0; o < 7; o++)
        for (int64_t c = 0; c < 13; c++)
            CHECK_EQ(isfinite(array_get(&run.dweight, o * 13 + c)) != 0, c != 12);
    run_destroy(&run);
}

static void test_refusals(void)
{
    float x[8] = {0}, weight[16] = {0}, y[2] = {0}, dx[8], dweight[16];
    struct dsc_nn_linear good = {.n_rows = 1, .n_cols = 8, .n_outputs = 2, .x = x, .weight = weight, .y = y};
    struct dsc_nn_linear bad = good;
    struct dsc_nn_linear_grad good_grad = {
        .n_rows = 1, .n_cols = 8, .n_outputs = 2, .x = x, .weight = weight, .dy = y, .dx = dx, .dweight = dweight};
    struct dsc_nn_linear_grad bad_grad = good_grad;

#define REFUSED(field, value, status, word)                       \
    do {                                                          \
        bad = good;                                               \
        bad.field = (value);                                      \
        CHECK_ERROR(dsc_nn_linear(&bad, NULL), (status), (word)); \
    } while (0)
#define GRAD_REFUSED(field, value, status, word)                            \
    do {                                                                    \
        bad_grad = good_grad;                                               \
        bad_grad.field = (value);                                           \
        CHECK_ERROR(dsc_nn_linear_grad(&bad_grad, NULL), (status), (word)); \
    } while (0)

    CHECK_STATUS(dsc_nn_linear(&good, NULL), DSC_OK);
    CHECK_STATUS(dsc_nn_linear_grad(&good_grad, NULL), DSC_OK);
    REFUSED(n_rows, -1, DSC_EINVAL, "negative");
    REFUSED(n_cols, -1, DSC_EINVAL, "negative");
    REFUSED(n_outputs, -1, DSC_EINVAL, "negative");
    REFUSED(n_rows, INT64_MAX / 2, DSC_EOVERFLOW, "int64_t");
    REFUSED(n_outputs, INT64_MAX / 2, DSC_EOVERFLOW, "int64_t");
    REFUSED(dtype, (dsc_dtype)9, DSC_EINVAL, "dtype is 9");
    REFUSED(x, NULL, DSC_EINVAL, "x is NULL");
    REFUSED(weight, NULL, DSC_EINVAL, "weight is NULL");
    REFUSED(y, NULL, DSC_EINVAL, "y is NULL");
    GRAD_REFUSED(n_cols, -1, DSC_EINVAL, "negative");
    GRAD_REFUSED(n_outputs, INT64_MAX / 2, DSC_EOVERFLOW, "int64_t");
    GRAD_REFUSED(dtype, (dsc_dtype)9, DSC_EINVAL, "dtype is 9");
    GRAD_REFUSED(dy, NULL, DSC_EINVAL, "dy is NULL");
    GRAD_REFUSED(x, NULL, DSC_EINVAL, "x is NULL");
    GRAD_REFUSED(weight, NULL, DSC_EINVAL, "weight is NULL");
}

int main(void)
{
    struct pool pool;

    pool_init(&pool, 3, 1);
    test_formula(&pool.par);
    test_same_bits(&pool.par);
    test_special_values();
    test_refusals();
    pool_clear(&pool);
    return test_finish(__FILE__);
}
