/*
 * infer/attention.c against the formula in f64, token by token; and the bits of a token that arrives in another
 * company: with other rows, in other pieces of its prompt, on other threads, in parts that run side by side.
 */
#include "arrays.h"
#include "pool.h"

#include "dsc/infer.h"
#include "dsc/nn.h"

#define MAX_ROWS 4
#define MAX_KEYS 1400

struct test_case {
    struct dsc_kv_attention call; /* with all tokens at once */
    int64_t n_new[MAX_ROWS];
    int64_t n_keys[MAX_ROWS];
    int64_t first[MAX_ROWS];
    int32_t *tables;
    float slopes[64];
    float sinks[64];
    struct array q; /* of all tokens */
    struct array k;
    struct array v;
    struct array keys;
    struct array values;
    int64_t n_tokens;
};

static struct array random_array(dsc_dtype dtype, int64_t n, uint64_t *random)
{
    struct array array = array_create(dtype, n, (size_t)test_below(random, 2) * dsc_dtype_bytes(dtype));

    for (int64_t i = 0; i < n; i++)
        array_set(&array, i, 2 * test_uniform(random));
    return array;
}

static struct dsc_kv_tokens tokens_of(const struct array *array, int64_t first, int64_t n_heads, int64_t dim)
{
    return (struct dsc_kv_tokens){array->data + (size_t)(first * n_heads * dim) * dsc_dtype_bytes(array->dtype),
                                  {n_heads * dim, dim}};
}

/* Every block has one owner, in random order, and holds NaN. */
static void make_blocks(struct test_case *test, uint64_t *random)
{
    struct dsc_kv_attention *call = &test->call;
    int64_t n_columns = 0;
    int32_t *order;

    for (int64_t row = 0; row < call->rows.n_rows; row++)
        n_columns =
            test->n_keys[row] / DSC_KV_TOKENS + 1 > n_columns ? test->n_keys[row] / DSC_KV_TOKENS + 1 : n_columns;
    call->rows.n_columns = n_columns;
    call->shape.n_blocks = call->rows.n_rows * n_columns + 3;
    order = test_alloc((size_t)call->shape.n_blocks * sizeof *order);
    for (int64_t i = 0; i < call->shape.n_blocks; i++) {
        int64_t j = test_below(random, i + 1);

        order[i] = order[j];
        order[j] = (int32_t)i;
    }
    test->tables = test_alloc((size_t)(call->rows.n_rows * n_columns + 1) * sizeof *test->tables);
    for (int64_t i = 0; i < call->rows.n_rows * n_columns; i++)
        test->tables[i] = (i % n_columns) * DSC_KV_TOKENS < test->n_keys[i / n_columns] ? order[i] : DSC_KV_GONE;
    free(order);

    int64_t n_slots = call->shape.n_blocks * call->shape.n_kv_heads * DSC_KV_TOKENS;

    test->keys = array_create(call->shape.dtype, n_slots * call->shape.head_dim, 0);
    test->values = array_create(call->shape.dtype, n_slots * call->shape.value_dim, 0);
    memset(test->keys.data, 0xff, (size_t)test->keys.n * dsc_dtype_bytes(call->shape.dtype));
    memset(test->values.data, 0xff, (size_t)test->values.n * dsc_dtype_bytes(call->shape.dtype));
}

static void make_case(struct test_case *test, int round, uint64_t *random)
{
    static const dsc_dtype dtypes[] = {DSC_DTYPE_F32, DSC_DTYPE_BF16, DSC_DTYPE_F16};
    static const int64_t lengths[] = {1, 2, 15, 16, 17, 64, 65, 130, 511, 513, 1100};
    struct dsc_kv_attention *call = &test->call;

    memset(test, 0, sizeof *test);
    call->shape.dtype = dtypes[round % 3];
    call->shape.n_kv_heads = 1 + test_below(random, 3);
    call->shape.head_dim = test_below(random, 3) == 0 ? 64 : 1 + test_below(random, 40);
    call->shape.value_dim = test_below(random, 2) == 0 ? call->shape.head_dim : 1 + test_below(random, 40);
    call->n_heads = call->shape.n_kv_heads * (1 + test_below(random, 4));
    call->is_causal = round % 5 != 4;
    call->window = test_below(random, 3) == 0 ? 1 + test_below(random, 100) : 0;
    call->scale = (float)(0.3 + 0.3 * test_uniform(random));
    call->soft_cap = test_below(random, 4) == 0 ? 2.0f : 0.0f;
    call->rows.n_rows = 1 + test_below(random, MAX_ROWS);
    for (int64_t row = 0; row < call->rows.n_rows; row++) {
        test->n_keys[row] =
            round % 4 == 3 && row == 0 ? lengths[test_below(random, 11)] : lengths[test_below(random, 8)];
        test->n_new[row] = test->n_keys[row];
        test->first[row] = test_below(random, 2) == 0 ? 0 : test_below(random, test->n_keys[row]);
        test->n_tokens += test->n_keys[row];
    }
    for (int i = 0; i < 64; i++) {
        test->slopes[i] = (float)(0.1 * (1 + test_uniform(random)));
        test->sinks[i] = (float)test_uniform(random);
    }
    call->slopes = test_below(random, 4) == 0 ? test->slopes : NULL;
    call->sinks = test_below(random, 4) == 0 ? test->sinks : NULL;
    call->first = test_below(random, 2) == 0 ? test->first : NULL;
    make_blocks(test, random);
    call->rows.n_new = test->n_new;
    call->rows.n_keys = test->n_keys;
    call->rows.tables = test->tables;
    call->keys = test->keys.data;
    call->values = test->values.data;
    test->q = random_array(call->shape.dtype, test->n_tokens * call->n_heads * call->shape.head_dim, random);
    test->k = random_array(call->shape.dtype, test->n_tokens * call->shape.n_kv_heads * call->shape.head_dim, random);
    test->v = random_array(call->shape.dtype, test->n_tokens * call->shape.n_kv_heads * call->shape.value_dim, random);
}

static void destroy_case(struct test_case *test)
{
    struct array *arrays[] = {&test->q, &test->k, &test->v, &test->keys, &test->values};

    for (size_t i = 0; i < sizeof arrays / sizeof *arrays; i++)
        array_destroy(arrays[i]);
    free(test->tables);
}

/* The formula for one token of one row and one head; token and row_begin count the tokens of all rows. */
static void attend_by_formula(const struct test_case *test, int64_t row, int64_t row_begin, int64_t position,
                              int64_t head, double *out)
{
    const struct dsc_kv_attention *call = &test->call;
    int64_t dim = call->shape.head_dim;
    int64_t value_dim = call->shape.value_dim;
    int64_t n_kv = call->shape.n_kv_heads;
    int64_t kv_head = head / (call->n_heads / n_kv);
    double sum = call->sinks == NULL ? 0 : exp((double)call->sinks[head]);

    for (int64_t d = 0; d < value_dim; d++)
        out[d] = 0;
    for (int64_t key = call->first == NULL ? 0 : call->first[row]; key < test->n_keys[row]; key++) {
        double distance = fabs((double)(position - key));
        double score = 0;

        if ((call->is_causal && key > position) || (call->window > 0 && distance >= (double)call->window))
            continue;
        for (int64_t d = 0; d < dim; d++)
            score += array_get(&test->q, ((row_begin + position) * call->n_heads + head) * dim + d) *
                     array_get(&test->k, ((row_begin + key) * n_kv + kv_head) * dim + d);
        score *= call->scale;
        if (call->soft_cap > 0)
            score = call->soft_cap * tanh(score / call->soft_cap);
        if (call->slopes != NULL)
            score -= (double)call->slopes[head] * distance;
        sum += exp(score);
        for (int64_t d = 0; d < value_dim; d++)
            out[d] += exp(score) * array_get(&test->v, ((row_begin + key) * n_kv + kv_head) * value_dim + d);
    }
    for (int64_t d = 0; d < value_dim && sum > 0; d++)
        out[d] /= sum;
}

static void check_formula(const struct test_case *test, const struct array *out)
{
    const struct dsc_kv_attention *call = &test->call;
    double ulp = call->shape.dtype == DSC_DTYPE_F32 ? 0x1p-24 : call->shape.dtype == DSC_DTYPE_BF16 ? 0x1p-8 : 0x1p-11;
    double expected[DSC_NN_MAX_HEAD_DIM];
    int64_t row_begin = 0;

    for (int64_t row = 0; row < call->rows.n_rows; row_begin += test->n_keys[row++])
        for (int64_t position = 0; position < test->n_keys[row]; position += 1 + test->n_keys[row] / 40)
            for (int64_t head = 0; head < call->n_heads; head++) {
                int64_t n_wrong = 0;

                attend_by_formula(test, row, row_begin, position, head, expected);
                for (int64_t d = 0; d < call->shape.value_dim; d++) {
                    int64_t at = ((row_begin + position) * call->n_heads + head) * call->shape.value_dim + d;

                    n_wrong += !(fabs(array_get(out, at) - expected[d]) <= 6e-6 + 1.01 * ulp * fabs(expected[d]));
                }
                TEST_AT(position);
                CHECK_EQ(n_wrong, 0);
            }
}

/*
 * Writes and attends the tokens in pieces, and returns out of all of them. n_pieces: tokens of a row's piece; 0: all at
 * once. With is_alone each row is a call of its own.
 */
static void run_pieces(struct test_case *test, int64_t piece, bool is_alone, bool has_scratch,
                       const struct dsc_par *par, struct array *out)
{
    const struct dsc_kv_attention *whole = &test->call;
    int64_t done[MAX_ROWS] = {0};
    int64_t begins[MAX_ROWS] = {0};
    int64_t most = 0;

    for (int64_t row = 0; row < whole->rows.n_rows; row++) {
        begins[row] = row == 0 ? 0 : begins[row - 1] + test->n_keys[row - 1];
        most = test->n_keys[row] > most ? test->n_keys[row] : most;
    }
    for (int64_t at = 0; at < most; at += piece)
        for (int64_t row = 0; row < whole->rows.n_rows; row++) {
            /* The tokens of one row lie side by side, so a call of several rows takes whole rows alone. */
            int64_t n_rows = !is_alone && piece >= most ? whole->rows.n_rows : 1;
            int64_t n_new[MAX_ROWS];
            int64_t n_keys[MAX_ROWS];
            struct dsc_kv_attention call = *whole;
            struct dsc_kv_tokens k =
                tokens_of(&test->k, begins[row] + done[row], whole->shape.n_kv_heads, whole->shape.head_dim);
            struct dsc_kv_tokens v =
                tokens_of(&test->v, begins[row] + done[row], whole->shape.n_kv_heads, whole->shape.value_dim);

            for (int64_t i = 0; i < n_rows; i++) {
                int64_t left = test->n_keys[row + i] - done[row + i];

                n_new[i] = left < piece ? left : piece;
                n_keys[i] = done[row + i] + n_new[i];
            }
            call.rows = (struct dsc_kv_rows){n_rows, n_new, n_keys, test->tables + row * whole->rows.n_columns,
                                             whole->rows.n_columns};
            call.first = whole->first == NULL ? NULL : whole->first + row;
            call.q = tokens_of(&test->q, begins[row] + done[row], whole->n_heads, whole->shape.head_dim);
            call.out = tokens_of(out, begins[row] + done[row], whole->n_heads, whole->shape.value_dim);
            CHECK_STATUS(dsc_kv_write(&call.shape, &call.rows, &k, &v, test->keys.data, test->values.data, par),
                         DSC_OK);
            call.scratch = has_scratch ? test_alloc(dsc_kv_attention_scratch_bytes(&call)) : NULL;
            CHECK_STATUS(dsc_kv_attention(&call, par), DSC_OK);
            free(call.scratch);
            for (int64_t i = 0; i < n_rows; i++)
                done[row + i] += n_new[i];
            row += n_rows - 1;
        }
}

static struct array out_of(const struct test_case *test)
{
    return array_create(test->call.shape.dtype, test->n_tokens * test->call.n_heads * test->call.shape.value_dim, 0);
}

/* Each token lies in its block: keys by element, values by token. */
static void check_contents(const struct test_case *test)
{
    const struct dsc_kv_shape *shape = &test->call.shape;
    int64_t n_wrong = 0;
    int64_t begin = 0;

    for (int64_t row = 0; row < test->call.rows.n_rows; begin += test->n_keys[row++])
        for (int64_t token = 0; token < test->n_keys[row]; token++)
            for (int64_t head = 0; head < shape->n_kv_heads; head++) {
                int64_t block = test->tables[row * test->call.rows.n_columns + token / 16];
                int64_t from = (begin + token) * shape->n_kv_heads + head;
                int64_t to = block * shape->n_kv_heads + head;

                for (int64_t d = 0; d < shape->head_dim; d++)
                    n_wrong += array_bits(&test->keys, (to * shape->head_dim + d) * 16 + token % 16) !=
                               array_bits(&test->k, from * shape->head_dim + d);
                for (int64_t d = 0; d < shape->value_dim; d++)
                    n_wrong += array_bits(&test->values, (to * 16 + token % 16) * shape->value_dim + d) !=
                               array_bits(&test->v, from * shape->value_dim + d);
            }
    CHECK_EQ(n_wrong, 0);
}

/* Blocks that no window reaches are gone: results stay the same. */
static void give_back(struct test_case *test)
{
    const struct dsc_kv_attention *call = &test->call;

    for (int64_t row = 0; row < call->rows.n_rows; row++) {
        int64_t first = test->n_keys[row] - call->window;

        for (int64_t i = 0; (i + 1) * DSC_KV_TOKENS <= first; i++)
            test->tables[row * call->rows.n_columns + i] = DSC_KV_GONE;
    }
}

static void check_last_token(struct test_case *test, const struct array *whole, const struct dsc_par *par)
{
    struct dsc_kv_attention call = test->call;
    int64_t n_new[MAX_ROWS] = {1, 1, 1, 1};
    int64_t n_bytes = call.n_heads * call.shape.value_dim * (int64_t)dsc_dtype_bytes(call.shape.dtype);
    struct array q = array_create(call.shape.dtype, call.rows.n_rows * call.n_heads * call.shape.head_dim, 0);
    struct array out = array_create(call.shape.dtype, call.rows.n_rows * call.n_heads * call.shape.value_dim, 0);
    int64_t begin = 0;

    for (int64_t row = 0; row < call.rows.n_rows; begin += test->n_keys[row++]) {
        int64_t n = call.n_heads * call.shape.head_dim * (int64_t)dsc_dtype_bytes(call.shape.dtype);

        memcpy(q.data + row * n, test->q.data + (begin + test->n_keys[row] - 1) * n, (size_t)n);
    }
    call.rows.n_new = n_new;
    call.q = tokens_of(&q, 0, call.n_heads, call.shape.head_dim);
    call.out = tokens_of(&out, 0, call.n_heads, call.shape.value_dim);
    call.scratch = test_alloc(dsc_kv_attention_scratch_bytes(&call));
    CHECK_STATUS(dsc_kv_attention(&call, par), DSC_OK);
    free(call.scratch);
    begin = 0;
    for (int64_t row = 0; row < call.rows.n_rows; begin += test->n_keys[row++]) {
        TEST_AT(row);
        CHECK_BYTES(out.data + row * n_bytes, whole->data + (begin + test->n_keys[row] - 1) * n_bytes, (size_t)n_bytes);
    }
    array_destroy(&q);
    array_destroy(&out);
}

static void test_cases(const struct dsc_par *par)
{
    static const int64_t pieces[] = {1, 7, 64, 100};
    static struct test_case test;
    uint64_t random = 3;

    for (int round = 0; round < 36; round++) {
        struct array whole;
        struct array other;
        size_t n_bytes;

        make_case(&test, round, &random);
        TEST_CASE("round %d: %d rows, %d of %d heads of %d and %d, window %d", round, (int)test.call.rows.n_rows,
                  (int)test.call.n_heads, (int)test.call.shape.n_kv_heads, (int)test.call.shape.head_dim,
                  (int)test.call.shape.value_dim, (int)test.call.window);
        whole = out_of(&test);
        other = out_of(&test);
        n_bytes = (size_t)whole.n * dsc_dtype_bytes(whole.dtype);
        run_pieces(&test, MAX_KEYS, false, false, par, &whole);
        check_formula(&test, &whole);
        check_contents(&test);
        run_pieces(&test, MAX_KEYS, true, true, NULL, &other);
        CHECK_BYTES(other.data, whole.data, n_bytes);
        if (test.call.is_causal) {
            memset(test.keys.data, 0xff, (size_t)test.keys.n * dsc_dtype_bytes(whole.dtype));
            memset(test.values.data, 0xff, (size_t)test.values.n * dsc_dtype_bytes(whole.dtype));
            run_pieces(&test, pieces[round % 4], true, round % 2 == 0, par, &other);
            CHECK_BYTES(other.data, whole.data, n_bytes);
        }
        if (test.call.window > 0)
            give_back(&test);
        check_last_token(&test, &whole, par);
        array_destroy(&whole);
        array_destroy(&other);
        destroy_case(&test);
    }
}

static void test_bad_calls(void)
{
    static struct test_case test;
    uint64_t random = 7;
    struct array out;
    struct dsc_kv_attention call;
    struct dsc_kv_tokens none = {NULL, {0, 0}};
    int64_t long_keys[MAX_ROWS];
    int64_t negative[MAX_ROWS] = {-1, 0, 0, 0};

    make_case(&test, 0, &random);
    TEST_CASE("bad calls");
    out = out_of(&test);
    test.call.q = tokens_of(&test.q, 0, test.call.n_heads, test.call.shape.head_dim);
    test.call.out = tokens_of(&out, 0, test.call.n_heads, test.call.shape.value_dim);
    for (int i = 0; i < MAX_ROWS; i++)
        long_keys[i] = test.call.rows.n_columns * DSC_KV_TOKENS + 1;
#define CHECK_BAD(field, value, word)                                 \
    do {                                                              \
        call = test.call;                                             \
        call.field = value;                                           \
        CHECK_ERROR(dsc_kv_attention(&call, NULL), DSC_EINVAL, word); \
    } while (0)
    CHECK_BAD(shape.head_dim, 0, "heads of 0");
    CHECK_BAD(shape.value_dim, DSC_NN_MAX_HEAD_DIM + 1, "values of 257");
    CHECK_BAD(shape.n_blocks, 1, "table is block");
    CHECK_BAD(shape.n_kv_heads, -1, "kv_heads");
    CHECK_BAD(n_heads, -1, "cannot share");
    CHECK_BAD(rows.n_keys, long_keys, "its table room for");
    CHECK_BAD(rows.n_new, negative, "new tokens");
    CHECK_BAD(first, negative, "first[0] is -1");
    CHECK_BAD(window, -1, "window is -1");
    CHECK_BAD(soft_cap, -1.0f, "soft_cap is -1");
    CHECK_BAD(scale, NAN, "scale is");
    CHECK_BAD(keys, NULL, "keys is NULL");
    CHECK_BAD(q, none, "q.data is NULL");
    test.tables[0] = DSC_KV_GONE;
    CHECK_ERROR(dsc_kv_write(&test.call.shape, &test.call.rows, &none, &none, test.keys.data, test.values.data, NULL),
                DSC_EINVAL, "token 0 of row 0 has no block");
    array_destroy(&out);
    destroy_case(&test);
}

int main(void)
{
    struct pool pool;

    pool_init(&pool, 3, 1);
    test_cases(&pool.par);
    pool_clear(&pool);
    test_bad_calls();
    return test_finish(__FILE__);
}
