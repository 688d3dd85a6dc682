/*
 * Products of matrices against sums in f64; the same bytes for every instruction set and any threads, and of a row or a
 * batch for any number of them.
 */
#include "arrays.h"
#include "pool.h"

#include "dsc/nn.h"

/* The dimension of each operand whose elements lie one behind the other. */
enum layout { TERMS, ROWS_OF_A, TERMS_OF_A, N_LAYOUTS };
static const char *const layout_names[] = {"terms", "rows of a, columns of b", "terms of a, columns of b"};

/* A call and its memory. */
struct run {
    struct dsc_nn_product call;
    struct array a, b, bias, y;
};

/* spare: elements between one row of memory and the next that belong to no operand. */
static struct run run_create(const int64_t *size, enum layout layout, int64_t spare, dsc_dtype dtype, uint64_t *random)
{
    int64_t n_batches = size[0], n_rows = size[1], n_terms = size[2], n_cols = size[3];
    bool is_a_by_row = layout != ROWS_OF_A, is_b_by_term = layout != TERMS;
    int64_t a_lead = (is_a_by_row ? n_terms : n_rows) + spare, b_lead = (is_b_by_term ? n_cols : n_terms) + spare;
    int64_t a_batch = a_lead * (is_a_by_row ? n_rows : n_terms), b_batch = b_lead * (is_b_by_term ? n_terms : n_cols);
    struct run run;

    run.a = array_create(dtype, n_batches * a_batch, 3);
    run.b = array_create(dtype, n_batches * b_batch, 1);
    run.bias = array_create(dtype, n_cols, 2);
    run.y = array_create(dtype, n_batches * n_rows * n_cols, 1);
    array_fill(&run.a, 1, false, random);
    array_fill(&run.b, 0.5, false, random);
    array_fill(&run.bias, 1, false, random);
    run.call = (struct dsc_nn_product){.n_batches = n_batches,
                                       .n_rows = n_rows,
                                       .n_terms = n_terms,
                                       .n_cols = n_cols,
                                       .dtype = dtype,
                                       .a = run.a.data,
                                       .a_batch = a_batch,
                                       .a_row = is_a_by_row ? a_lead : 1,
                                       .a_term = is_a_by_row ? 1 : a_lead,
                                       .b = run.b.data,
                                       .b_batch = b_batch,
                                       .b_term = is_b_by_term ? b_lead : 1,
                                       .b_col = is_b_by_term ? 1 : b_lead,
                                       .bias = run.bias.data,
                                       .y = run.y.data};
    return run;
}

static void run_destroy(struct run *run)
{
    array_destroy(&run->a);
    array_destroy(&run->b);
    array_destroy(&run->bias);
    array_destroy(&run->y);
}

static void check_element(const struct run *run, int64_t batch, int64_t row, int64_t col)
{
    const struct dsc_nn_product *call = &run->call;
    double unit = call->dtype == DSC_DTYPE_F32 ? 0 : call->dtype == DSC_DTYPE_BF16 ? 0x1p-8 : 0x1p-11;
    double sum = call->bias != NULL ? array_get(&run->bias, col) : 0, magnitude = fabs(sum), allowed, found;

    for (int64_t t = 0; t < call->n_terms; t++) {
        double a = array_get(&run->a, batch * call->a_batch + row * call->a_row + t * call->a_term);
        double b = array_get(&run->b, batch * call->b_batch + t * call->b_term + col * call->b_col);

        sum += a * b;
        magnitude += fabs(a * b);
    }
    /* Terms are rounded a few times each, the result once; f16 below its normal numbers as well. */
    allowed = magnitude * 0x1p-20 + fabs(sum) * unit * (1 + 0x1p-20) + (unit > 0 ? 0x1p-25 : 0);
    found = array_get(&run->y, (batch * call->n_rows + row) * call->n_cols + col);
    test_report(fabs(found - sum) <= allowed, __FILE__, __LINE__, "y[%lld][%lld][%lld]: %.9g, not %.9g (%g allowed)",
                (long long)batch, (long long)row, (long long)col, found, sum, allowed);
}

static void check_run(const struct run *run)
{
    for (int64_t i = 0; i < run->call.n_batches; i++)
        for (int64_t r = 0; r < run->call.n_rows; r++)
            for (int64_t c = 0; c < run->call.n_cols; c++)
                check_element(run, i, r, c);
}

/* Sizes around the steps of the loops: 3, 4, 6, 8, 16, 96, 128, 192, 256, 1024. */
static const int64_t sizes[][4] = {
    /* batches, rows, terms, columns */
    {0, 2, 3, 4},    {1, 0, 5, 2},     {2, 3, 0, 2},    {1, 3, 5, 0},   {1, 1, 1, 1},    {3, 7, 1, 3},
    {1, 1, 7, 5},    {2, 2, 17, 4},    {5, 5, 16, 11},  {1, 8, 48, 7},  {1, 13, 64, 9},  {1, 49, 130, 13},
    {2, 67, 97, 65}, {1, 3, 1025, 67}, {1, 1, 1031, 4}, {1, 131, 9, 5}, {1, 193, 33, 3}, {1, 6, 257, 3},
    {2, 4, 3, 257},  {1, 2, 300, 129}, {7, 1, 20, 16},
};
#define N_SIZES ((int)(sizeof sizes / sizeof *sizes))

static void test_formula(const struct dsc_par *par)
{
    uint64_t random = 1;

    for (int s = 0; s < N_SIZES; s++)
        for (int layout = 0; layout < N_LAYOUTS; layout++)
            for (int dtype = 0; dtype < DSC_DTYPE_COUNT; dtype++) {
                struct run run = run_create(sizes[s], (enum layout)layout, s % 4, (dsc_dtype)dtype, &random);

                TEST_CASE("%s, size %d, dense: %s", dtype_names[dtype], s, layout_names[layout]);
                if (s % 3 == 1)
                    run.call.bias = NULL;
                CHECK_STATUS(dsc_nn_product(&run.call, par), DSC_OK);
                check_run(&run);
                run_destroy(&run);
            }
}

/* Every instruction set, and threads, give the same bytes; so does a row, and a batch, by itself. */
static void check_same_bits(struct run *run, const struct dsc_par *par)
{
    size_t size = dsc_dtype_bytes(run->call.dtype);
    struct dsc_nn_product row = run->call, batch = run->call;
    int64_t at = run->call.n_rows - 2;
    struct array first;
    const char *isa;
    int isa_index = 0;

    CHECK_STATUS(dsc_cpu_isa_force("scalar"), DSC_OK);
    CHECK_STATUS(dsc_nn_product(&run->call, NULL), DSC_OK);
    first = array_copy(&run->y, 1);
    row.n_batches = row.n_rows = batch.n_batches = 1;
    row.a = run->a.data + (size_t)(at * row.a_row) * size;
    row.y = run->y.data + (size_t)(at * row.n_cols) * size;
    batch.a = run->a.data + (size_t)batch.a_batch * size;
    batch.b = run->b.data + (size_t)batch.b_batch * size;
    batch.y = run->y.data + (size_t)(batch.n_rows * batch.n_cols) * size;
    while (next_isa(&isa_index, &isa)) {
        TEST_CASE("%s on %s", dtype_names[run->call.dtype], isa);
        memset(run->y.data, 0, (size_t)run->y.n * size);
        CHECK_STATUS(dsc_nn_product(&run->call, par), DSC_OK);
        CHECK_SAME(&run->y, &first);
        memset(row.y, 0, (size_t)row.n_cols * size);
        memset(batch.y, 0, (size_t)(batch.n_rows * batch.n_cols) * size);
        CHECK_STATUS(dsc_nn_product(&row, par), DSC_OK);
        CHECK_STATUS(dsc_nn_product(&batch, par), DSC_OK);
        CHECK_SAME(&run->y, &first);
    }
    array_destroy(&first);
}

static void test_same_bits(const struct dsc_par *par)
{
    static const int64_t large[][4] = {
        {2, 7, 1100, 401}, {3, 250, 260, 131}, {2, 2, 1033, 47}, {2, 3, 1024, 33}, {2, 12, 1031, 49}, {2, 16, 39, 50},
        {2, 17, 39, 50},   {2, 19, 1027, 23},  {2, 22, 16, 8},   {2, 97, 24, 15},  {2, 389, 70, 130},
    };
    uint64_t random = 2;

    for (size_t s = 0; s < sizeof large / sizeof *large; s++)
        for (int layout = 0; layout < N_LAYOUTS; layout++)
            for (int dtype = 0; dtype < DSC_DTYPE_COUNT; dtype++) {
                struct run run = run_create(large[s], (enum layout)layout, 1, (dsc_dtype)dtype, &random);

                check_same_bits(&run, par);
                run_destroy(&run);
            }
}

/* Columns past the end of a row are no terms: a NaN or an infinity stays in its own results. */
static void test_special_values(void)
{
    static const int64_t size[] = {1, 5, 13, 7};
    uint64_t random = 3;

    for (int layout = 0; layout < N_LAYOUTS; layout++) {
        struct run run = run_create(size, (enum layout)layout, 0, DSC_DTYPE_BF16, &random);

        TEST_CASE("a NaN in row 2 of a, an infinity in column 3 of b; dense: %s", layout_names[layout]);
        array_set(&run.a, 2 * run.call.a_row + 12 * run.call.a_term, NAN);
        array_set(&run.b, 1 * run.call.b_term + 3 * run.call.b_col, INFINITY);
        CHECK_STATUS(dsc_nn_product(&run.call, NULL), DSC_OK);
        for (int64_t r = 0; r < 5; r++)
            for (int64_t c = 0; c < 7; c++)
                CHECK_EQ(isfinite(array_get(&run.y, r * 7 + c)) != 0, r != 2 && c != 3);
        run_destroy(&run);
    }
}

/* The stride of a dimension of one element may be anything. */
static void test_lone_strides(void)
{
    float a[3] = {1, 2, 3}, b[3] = {4, 5, 6}, y[9] = {0};
    struct dsc_nn_product call = {.n_batches = 1,
                                  .n_rows = 1,
                                  .n_terms = 3,
                                  .n_cols = 1,
                                  .a = a,
                                  .a_row = 77,
                                  .a_term = 1,
                                  .b = b,
                                  .b_term = 1,
                                  .b_col = 99,
                                  .y = y};

    TEST_CASE("one row and one column");
    CHECK_STATUS(dsc_nn_product(&call, NULL), DSC_OK);
    CHECK_EQ((int)y[0], 32);
    call.n_rows = call.n_cols = 3;
    call.n_terms = 1;
    call.a_row = call.b_col = 1;
    call.a_term = call.b_term = 88;
    TEST_CASE("one term");
    CHECK_STATUS(dsc_nn_product(&call, NULL), DSC_OK);
    for (int i = 0; i < 9; i++)
        CHECK_EQ((int)y[i], (int)(a[i / 3] * b[i % 3]));
}

/* A slice of one row: its stride says nothing, and its terms lie apart. */
static void test_one_row_of_spread_terms(void)
{
    float a[5] = {1, 9, 2, 9, 3}, b[6] = {1, 2, 3, 4, 5, 6}, y[2] = {0};
    struct dsc_nn_product call = {.n_batches = 1,
                                  .n_rows = 1,
                                  .n_terms = 3,
                                  .n_cols = 2,
                                  .a = a,
                                  .a_row = 14,
                                  .a_term = 2,
                                  .b = b,
                                  .b_term = 2,
                                  .b_col = 1,
                                  .y = y};

    TEST_CASE("one row of every second element");
    CHECK_STATUS(dsc_nn_product(&call, NULL), DSC_OK);
    CHECK_EQ((int)y[0], 1 * 1 + 2 * 3 + 3 * 5);
    CHECK_EQ((int)y[1], 1 * 2 + 2 * 4 + 3 * 6);
}

/* Products of one call have the bits of each alone, for sizes with and without elements, and a bad one stops all. */
static void test_several(const struct dsc_par *par)
{
    static const int64_t each[][4] = {{1, 1, 67, 130},   {1, 3, 0, 5}, {2, 1, 1031, 97}, {1, 0, 4, 4},
                                      {1, 16, 700, 301}, {3, 5, 2, 1}, {1, 2, 9, 0},     {1, 200, 33, 300}};
    struct run runs[DSC_NN_MAX_PRODUCTS];
    struct array alone[DSC_NN_MAX_PRODUCTS];
    struct dsc_nn_product calls[DSC_NN_MAX_PRODUCTS];
    uint64_t random = 5;

    for (int i = 0; i < DSC_NN_MAX_PRODUCTS; i++) {
        runs[i] = run_create(each[i], i == 5 ? TERMS_OF_A : TERMS, i, i % 2 ? DSC_DTYPE_F32 : DSC_DTYPE_BF16, &random);
        calls[i] = runs[i].call;
        CHECK_STATUS(dsc_nn_product(&calls[i], NULL), DSC_OK);
        alone[i] = array_copy(&runs[i].y, 1);
    }
    for (int n = 0; n <= DSC_NN_MAX_PRODUCTS; n++) {
        TEST_CASE("%d products at once", n);
        for (int i = 0; i < n; i++)
            memset(runs[i].y.data, 0, (size_t)runs[i].y.n * dsc_dtype_bytes(calls[i].dtype));
        CHECK_STATUS(dsc_nn_products(n, calls, par), DSC_OK);
        for (int i = 0; i < DSC_NN_MAX_PRODUCTS; i++)
            CHECK_SAME(&runs[i].y, &alone[i]);
    }
    TEST_CASE("the last of %d is bad", DSC_NN_MAX_PRODUCTS);
    memset(runs[0].y.data, 0, (size_t)runs[0].y.n * dsc_dtype_bytes(calls[0].dtype));
    array_destroy(&alone[0]);
    alone[0] = array_copy(&runs[0].y, 1);
    calls[DSC_NN_MAX_PRODUCTS - 1].b_term = 2;
    CHECK_ERROR(dsc_nn_products(DSC_NN_MAX_PRODUCTS, calls, par), DSC_EINVAL, "strides");
    CHECK_SAME(&runs[0].y, &alone[0]);
    CHECK_ERROR(dsc_nn_products(DSC_NN_MAX_PRODUCTS + 1, calls, par), DSC_EINVAL, "9 products");
    CHECK_ERROR(dsc_nn_products(-1, calls, par), DSC_EINVAL, "-1 products");
    for (int i = 0; i < DSC_NN_MAX_PRODUCTS; i++) {
        array_destroy(&alone[i]);
        run_destroy(&runs[i]);
    }
}

static void test_refusals(void)
{
    float a[8] = {0}, b[16] = {0}, y[2] = {0};
    struct dsc_nn_product good = {.n_batches = 1,
                                  .n_rows = 1,
                                  .n_terms = 8,
                                  .n_cols = 2,
                                  .a = a,
                                  .a_row = 8,
                                  .a_term = 1,
                                  .b = b,
                                  .b_term = 1,
                                  .b_col = 8,
                                  .y = y};
    struct dsc_nn_product bad = good;

#define REFUSED(field, value, status, word)                        \
    do {                                                           \
        bad = good;                                                \
        bad.field = (value);                                       \
        CHECK_ERROR(dsc_nn_product(&bad, NULL), (status), (word)); \
    } while (0)

    CHECK_STATUS(dsc_nn_product(&good, NULL), DSC_OK);
    REFUSED(n_batches, -1, DSC_EINVAL, "negative");
    REFUSED(n_rows, -1, DSC_EINVAL, "negative");
    REFUSED(n_terms, -1, DSC_EINVAL, "negative");
    REFUSED(n_cols, -1, DSC_EINVAL, "negative");
    REFUSED(n_batches, INT64_MAX, DSC_EOVERFLOW, "int64_t");
    REFUSED(n_rows, INT64_MAX / 2, DSC_EOVERFLOW, "int64_t");
    REFUSED(n_cols, INT64_MAX / 2, DSC_EOVERFLOW, "int64_t");
    REFUSED(dtype, (dsc_dtype)9, DSC_EINVAL, "dtype is 9");
    REFUSED(a, NULL, DSC_EINVAL, "a is NULL");
    REFUSED(b, NULL, DSC_EINVAL, "b is NULL");
    REFUSED(y, NULL, DSC_EINVAL, "y is NULL");
    REFUSED(a_term, 2, DSC_EINVAL, "strides");
    REFUSED(b_term, 2, DSC_EINVAL, "strides");
}

int main(void)
{
    struct pool pool;

    pool_init(&pool, 3, 1);
    test_formula(&pool.par);
    test_same_bits(&pool.par);
    test_special_values();
    test_lone_strides();
    test_one_row_of_spread_terms();
    test_several(&pool.par);
    test_refusals();
    pool_clear(&pool);
    return test_finish(__FILE__);
}
