/*
 * nn, attention: outputs, log-sum-exp and gradients against the formula in f64 over all pairs of tokens. Covers each
 * rule of a mask, each dtype and sizes near the tile size. Any thread count and instruction set must give the same
 * bits, and nothing may be written outside the results. Bad arguments are refused.
 */
#include "arrays.h"

#include "attention_case.h"
#include "pool.h"

#define N_RESULTS 6 /* out, lse, dq, dk, dv, dsinks */

static void check_close(double got, double wanted, double error, const char *what, int line)
{
    test_report(fabs(got - wanted) <= error, __FILE__, line, "%s is %.9g, should be %.9g within %.2g", what, got, wanted, error);
}

#define CHECK_CLOSE(got, wanted, error) check_close((double)(got), (wanted), (error), #got, __LINE__)

struct sizes {
    int64_t n_batch, n_heads, n_kv_heads, n_queries, n_keys, head_dim, value_dim;
};

static const struct sizes all_sizes[] = {
    {1, 1, 1, 1, 1, 1, 1},   {1, 2, 1, 0, 5, 8, 8},   {2, 2, 2, 3, 0, 8, 8},      {2, 4, 2, 5, 9, 3, 17},
    {1, 2, 1, 65, 65, 16, 16}, {1, 1, 1, 130, 64, 33, 8}, {1, 2, 2, 64, 193, 64, 32}, {1, 1, 1, 2, 3, 256, 256},
};
#define N_SIZES ((int)(sizeof all_sizes / sizeof all_sizes[0]))

struct rules {
    const char *name;
    bool is_causal;
    int64_t window;
    float soft_cap;
    bool has_slopes, has_documents, has_sinks;
};

static const struct rules all_rules[] = {
    {"no rule", false, 0, 0, false, false, false},     {"causal", true, 0, 0, false, false, false},
    {"window", false, 7, 0, false, false, false},      {"causal window", true, INT64_MAX, 0, false, false, true},
    {"causal window of 3", true, 3, 2, true, false, false}, {"documents", false, 0, 0, false, true, false},
    {"everything", true, 70, 3, true, true, true},
};
#define N_RULES ((int)(sizeof all_rules / sizeof all_rules[0]))

/* Operands with tokens outside of heads: [batch, tokens, heads, dim]. */
struct operand {
    struct array array;
    struct dsc_nn_heads heads;
};

static struct operand make_heads(dsc_dtype dtype, int64_t n_batch, int64_t n_heads, int64_t n_tokens, int64_t dim, uint64_t *random)
{
    struct operand made = {array_create(dtype, n_batch * n_heads * n_tokens * dim, 2), {NULL, {n_tokens * n_heads * dim, dim, n_heads * dim}}};

    array_fill(&made.array, 1, false, random);
    made.heads.data = made.array.data;
    return made;
}

static double element(const struct operand *operand, int64_t batch, int64_t head, int64_t token, int64_t i)
{
    const int64_t *strides = operand->heads.strides;

    return (double)array_get(&operand->array, batch * strides[0] + head * strides[1] + token * strides[2] + i);
}

struct inputs {
    struct sizes n;
    struct dsc_nn_attention call; /* without results */
    struct operand q, k, v, dout;
    struct array dlse, slopes, sinks;
    int32_t *documents;
};

static struct inputs make_inputs(dsc_dtype dtype, const struct sizes *n, const struct rules *rules, uint64_t *random)
{
    struct inputs made = {
        .n = *n,
        .q = make_heads(dtype, n->n_batch, n->n_heads, n->n_queries, n->head_dim, random),
        .k = make_heads(dtype, n->n_batch, n->n_kv_heads, n->n_keys, n->head_dim, random),
        .v = make_heads(dtype, n->n_batch, n->n_kv_heads, n->n_keys, n->value_dim, random),
        .dout = make_heads(dtype, n->n_batch, n->n_heads, n->n_queries, n->value_dim, random),
        .dlse = array_create(DSC_DTYPE_F32, n->n_batch * n->n_heads * n->n_queries, 0),
        .slopes = array_create(DSC_DTYPE_F32, n->n_heads, 0),
        .sinks = array_create(DSC_DTYPE_F32, n->n_heads, 0),
        .documents = test_alloc((size_t)(n->n_batch * n->n_keys) * sizeof(int32_t)),
    };

    array_fill(&made.dlse, 1, false, random);
    array_fill(&made.slopes, 0.5, true, random);
    array_fill(&made.sinks, 1, false, random);
    for (int64_t i = 0; i < n->n_batch * n->n_keys; i++)
        made.documents[i] = (int32_t)(i % n->n_keys / 37) - 1; /* the first are padding */
    made.call = (struct dsc_nn_attention){
        .n_batch = n->n_batch,
        .n_heads = n->n_heads,
        .n_kv_heads = n->n_kv_heads,
        .n_queries = n->n_queries,
        .n_keys = n->n_keys,
        .head_dim = n->head_dim,
        .value_dim = n->value_dim,
        .dtype = dtype,
        .is_causal = rules->is_causal,
        .window = rules->window,
        .scale = 0.75f,
        .soft_cap = rules->soft_cap,
        .q = made.q.heads,
        .k = made.k.heads,
        .v = made.v.heads,
        .slopes = rules->has_slopes ? (const float *)made.slopes.data : NULL,
        .sinks = rules->has_sinks ? (const float *)made.sinks.data : NULL,
        .documents = rules->has_documents ? made.documents : NULL,
    };
    return made;
}

static void destroy_inputs(struct inputs *inputs)
{
    struct array *arrays[] = {&inputs->q.array, &inputs->k.array,  &inputs->v.array,    &inputs->dout.array,
                              &inputs->dlse,    &inputs->slopes, &inputs->sinks};

    for (size_t i = 0; i < sizeof arrays / sizeof arrays[0]; i++)
        array_destroy(arrays[i]);
    free(inputs->documents);
}

struct results {
    struct operand out, dq, dk, dv;
    struct array lse, dsinks;
};

static void run(const struct inputs *in, const struct dsc_par *par, struct results *got)
{
    const struct sizes *n = &in->n;
    uint64_t random = 1;
    struct dsc_nn_attention call = in->call;

    *got = (struct results){
        .out = make_heads(call.dtype, n->n_batch, n->n_heads, n->n_queries, n->value_dim, &random),
        .dq = make_heads(call.dtype, n->n_batch, n->n_heads, n->n_queries, n->head_dim, &random),
        .dk = make_heads(call.dtype, n->n_batch, n->n_kv_heads, n->n_keys, n->head_dim, &random),
        .dv = make_heads(call.dtype, n->n_batch, n->n_kv_heads, n->n_keys, n->value_dim, &random),
        .lse = array_create(DSC_DTYPE_F32, n->n_batch * n->n_heads * n->n_queries, 0),
        .dsinks = array_create(DSC_DTYPE_F32, call.sinks != NULL ? n->n_heads : 0, 0),
    };
    call.out = got->out.heads;
    call.lse = (float *)got->lse.data;

    struct dsc_nn_attention_grad grad = {
        .forward = call,
        .dout = in->dout.heads,
        .dlse = (const float *)in->dlse.data,
        .dq = got->dq.heads,
        .dk = got->dk.heads,
        .dv = got->dv.heads,
        .dsinks = call.sinks != NULL ? (float *)got->dsinks.data : NULL,
        .scratch = test_alloc((size_t)dsc_nn_attention_scratch_elems(&call) * sizeof(float)),
    };

    CHECK_STATUS(dsc_nn_attention(&call, par), DSC_OK);
    CHECK_STATUS(dsc_nn_attention_grad(&grad, par), DSC_OK);
    free(grad.scratch);
}

/* The f64 sums of the keys' gradients, to which each query adds its contribution. */
struct wanted {
    double *dk, *dv, *dsinks;
};

static void check_query(const struct inputs *in, const struct results *got, int64_t batch, int64_t head, int64_t query, const struct wanted *wanted)
{
    const struct sizes *n = &in->n;
    const struct dsc_nn_attention *call = &in->call;
    int64_t kv_head = head / (n->n_heads / n->n_kv_heads), row = (batch * n->n_heads + head) * n->n_queries + query;
    double of_rounding = call->dtype == DSC_DTYPE_F32 ? 3e-6 : call->dtype == DSC_DTYPE_BF16 ? 0x1p-7 : 0x1p-10;
    double sum = call->sinks != NULL ? exp((double)call->sinks[head]) : 0, out[DSC_NN_MAX_HEAD_DIM] = {0}, dq[DSC_NN_MAX_HEAD_DIM] = {0}, delta = 0;
    double *scores = test_alloc((size_t)(n->n_keys + 1) * sizeof(double)), *slopes = test_alloc((size_t)(n->n_keys + 1) * sizeof(double));

    for (int64_t key = 0; key < n->n_keys; key++) {
        double product = 0;

        for (int64_t i = 0; i < n->head_dim; i++)
            product += element(&in->q, batch, head, query, i) * element(&in->k, batch, kv_head, key, i);
        scores[key] = attention_score(call, batch, head, query, key, product, &slopes[key]);
        if (!attention_sees(call, batch, query, key))
            scores[key] = -INFINITY;
        sum += exp(scores[key]);
    }
    TEST_AT(row);
    if (sum == 0)
        CHECK(array_get(&got->lse, row) == -INFINITY);
    else
        CHECK_CLOSE(array_get(&got->lse, row), log(sum), 1e-6 * (1 + fabs(log(sum))));
    for (int64_t key = 0; key < n->n_keys; key++)
        for (int64_t i = 0; i < n->value_dim && sum > 0; i++)
            out[i] += exp(scores[key]) / sum * element(&in->v, batch, kv_head, key, i);
    for (int64_t i = 0; i < n->value_dim; i++) {
        CHECK_CLOSE(element(&got->out, batch, head, query, i), out[i], of_rounding);
        delta += element(&got->out, batch, head, query, i) * element(&in->dout, batch, head, query, i); /* as it was rounded */
    }
    delta -= array_get(&in->dlse, row);
    for (int64_t key = 0; key < n->n_keys; key++) {
        double p = sum > 0 ? exp(scores[key]) / sum : 0, dp = 0;
        double *dk = wanted->dk + ((batch * n->n_kv_heads + kv_head) * n->n_keys + key) * n->head_dim;
        double *dv = wanted->dv + ((batch * n->n_kv_heads + kv_head) * n->n_keys + key) * n->value_dim;

        for (int64_t i = 0; i < n->value_dim; i++) {
            dp += element(&in->dout, batch, head, query, i) * element(&in->v, batch, kv_head, key, i);
            dv[i] += p * element(&in->dout, batch, head, query, i);
        }
        for (int64_t i = 0; i < n->head_dim; i++) {
            dq[i] += p * (dp - delta) * slopes[key] * element(&in->k, batch, kv_head, key, i);
            dk[i] += p * (dp - delta) * slopes[key] * element(&in->q, batch, head, query, i);
        }
    }
    for (int64_t i = 0; i < n->head_dim; i++)
        CHECK_CLOSE(element(&got->dq, batch, head, query, i), dq[i], of_rounding * (4 + fabs(dq[i])));
    if (call->sinks != NULL)
        wanted->dsinks[head] -= exp((double)call->sinks[head]) / sum * delta;
    free(scores);
    free(slopes);
}

static void check_values(const struct inputs *in, const struct results *got)
{
    const struct sizes *n = &in->n;
    int64_t n_rows = n->n_batch * n->n_kv_heads * n->n_keys;
    double of_rounding = in->call.dtype == DSC_DTYPE_F32 ? 1e-5 : in->call.dtype == DSC_DTYPE_BF16 ? 0x1p-7 : 0x1p-10;
    struct wanted wanted = {test_alloc((size_t)(n_rows * n->head_dim + 1) * sizeof(double)), test_alloc((size_t)(n_rows * n->value_dim + 1) * sizeof(double)),
                            test_alloc((size_t)n->n_heads * sizeof(double))};

    memset(wanted.dk, 0, (size_t)(n_rows * n->head_dim) * sizeof(double));
    memset(wanted.dv, 0, (size_t)(n_rows * n->value_dim) * sizeof(double));
    memset(wanted.dsinks, 0, (size_t)n->n_heads * sizeof(double));
    for (int64_t row = 0; row < n->n_batch * n->n_heads * n->n_queries; row++)
        check_query(in, got, row / n->n_queries / n->n_heads, row / n->n_queries % n->n_heads, row % n->n_queries, &wanted);
    for (int64_t row = 0; row < n_rows; row++) {
        int64_t batch = row / n->n_keys / n->n_kv_heads, head = row / n->n_keys % n->n_kv_heads, key = row % n->n_keys;

        TEST_AT(row);
        for (int64_t i = 0; i < n->head_dim; i++) {
            double dk = wanted.dk[row * n->head_dim + i];

            CHECK_CLOSE(element(&got->dk, batch, head, key, i), dk, of_rounding * (4 + fabs(dk)));
        }
        for (int64_t i = 0; i < n->value_dim; i++) {
            double dv = wanted.dv[row * n->value_dim + i];

            CHECK_CLOSE(element(&got->dv, batch, head, key, i), dv, of_rounding * (4 + fabs(dv)));
        }
    }
    for (int64_t head = 0; head < n->n_heads && in->call.sinks != NULL; head++)
        CHECK_CLOSE(array_get(&got->dsinks, head), wanted.dsinks[head], 1e-4);
    free(wanted.dk);
    free(wanted.dv);
    free(wanted.dsinks);
}

static void arrays_of(struct results *results, struct array *arrays[N_RESULTS])
{
    struct array *all[N_RESULTS] = {&results->out.array, &results->lse, &results->dq.array, &results->dk.array, &results->dv.array, &results->dsinks};

    memcpy(arrays, all, sizeof all);
}

static void destroy_results(struct results *results)
{
    struct array *arrays[N_RESULTS];

    arrays_of(results, arrays);
    for (int i = 0; i < N_RESULTS; i++)
        array_destroy(arrays[i]);
}

static void check_everywhere(const struct inputs *in, const struct dsc_par *par)
{
    struct results first, got;
    struct array *wanted[N_RESULTS], *arrays[N_RESULTS];
    int32_t isa_index = 0;
    const char *isa;

    run(in, NULL, &first);
    check_values(in, &first);
    arrays_of(&first, wanted);
    while (next_isa(&isa_index, &isa)) {
        run(in, par, &got);
        arrays_of(&got, arrays);
        for (int i = 0; i < N_RESULTS; i++)
            CHECK_SAME(arrays[i], wanted[i]);
        destroy_results(&got);
    }
    destroy_results(&first);
}

static void check_all(const struct dsc_par *par)
{
    uint64_t random = 5;

    for (int s = 0; s < N_SIZES; s++) {
        for (int r = 0; r < N_RULES; r++) {
            for (int dtype = 0; dtype < DSC_DTYPE_COUNT; dtype++) {
                const struct sizes *n = &all_sizes[s];
                struct inputs in;

                if (all_rules[r].has_documents && n->n_queries > n->n_keys)
                    continue;
                in = make_inputs((dsc_dtype)dtype, n, &all_rules[r], &random);
                TEST_CASE("%s, %d queries and %d keys of %d and %d, %s", all_rules[r].name, (int)n->n_queries, (int)n->n_keys, (int)n->head_dim,
                          (int)n->value_dim, dtype_names[dtype]);
                check_everywhere(&in, par);
                destroy_inputs(&in);
            }
        }
    }
}

/* A NaN in a query affects that query's row only. Scores of any magnitude leave the sums finite. */
static void check_special_values(void)
{
    float q[4] = {NAN, 1e4f, -1e4f, 0}, k[2] = {1e4f, -1e4f}, v[2] = {1, 3}, out[4], lse[4];
    struct dsc_nn_attention call = {
        .n_batch = 1, .n_heads = 1, .n_kv_heads = 1, .n_queries = 4, .n_keys = 2, .head_dim = 1, .value_dim = 1, .scale = 1,
        .q = {q, {4, 4, 1}}, .k = {k, {2, 2, 1}}, .v = {v, {2, 2, 1}}, .out = {out, {4, 4, 1}}, .lse = lse,
    };

    TEST_CASE("special values");
    CHECK_STATUS(dsc_nn_attention(&call, NULL), DSC_OK);
    CHECK(isnan(out[0]) && isnan(lse[0]));
    CHECK_EQ(out[1], 1);
    CHECK_EQ(out[2], 3);
    CHECK_EQ(out[3], 2);
    CHECK_EQ(lse[1], 1e8f);
}

static void check_refusals(void)
{
    float x[4] = {0}, y[4] = {0};
    int32_t documents[4] = {0};
    const struct dsc_nn_heads heads = {x, {1, 1, 1}};
    const struct dsc_nn_attention good = {
        .n_batch = 1, .n_heads = 2, .n_kv_heads = 1, .n_queries = 2, .n_keys = 1, .head_dim = 1, .value_dim = 1, .scale = 1,
        .q = heads, .k = heads, .v = heads, .out = {y, {0, 0, 0}}, .lse = y,
    };
    struct dsc_nn_attention call;
    struct dsc_nn_attention_grad grad = {.forward = good, .dout = heads, .dq = heads, .dk = heads, .dv = heads};

#define REFUSED(status, words, ...)                                \
    do {                                                           \
        call = good;                                               \
        __VA_ARGS__;                                               \
        CHECK_ERROR(dsc_nn_attention(&call, NULL), status, words); \
        CHECK_EQ(dsc_nn_attention_scratch_elems(&call), 0);        \
    } while (0)
    TEST_CASE("refusals");
    REFUSED(DSC_EINVAL, "must not be negative", call.n_heads = -1);
    REFUSED(DSC_EINVAL, "3 heads of q cannot share 2 heads", call.n_heads = 3, call.n_kv_heads = 2);
    REFUSED(DSC_EINVAL, "2 heads of q cannot share 0 heads", call.n_kv_heads = 0);
    REFUSED(DSC_EINVAL, "head_dim is 257, must be 1 to 256", call.head_dim = 257);
    REFUSED(DSC_EINVAL, "value_dim is 0", call.value_dim = 0);
    REFUSED(DSC_EINVAL, "window is -1", call.window = -1);
    REFUSED(DSC_EINVAL, "soft_cap is nan", call.soft_cap = NAN);
    REFUSED(DSC_EINVAL, "scale is inf", call.scale = INFINITY);
    REFUSED(DSC_EINVAL, "documents of 1 keys leave none to the first of 2 queries", call.documents = documents);
    REFUSED(DSC_EINVAL, "k is NULL", call.k.data = NULL);
    REFUSED(DSC_EINVAL, "lse is NULL", call.lse = NULL);
    REFUSED(DSC_EINVAL, "dtype is 9", call.dtype = (dsc_dtype)9);
    REFUSED(DSC_EOVERFLOW, "batch, heads and queries", call.n_queries = INT64_MAX);
    REFUSED(DSC_EOVERFLOW, "rows of", call.n_keys = INT64_MAX / 8);
#undef REFUSED
    CHECK_ERROR(dsc_nn_attention_grad(&grad, NULL), DSC_EINVAL, "scratch is NULL");
    grad.scratch = y;
    grad.dsinks = y;
    CHECK_ERROR(dsc_nn_attention_grad(&grad, NULL), DSC_EINVAL, "without sinks");
    grad.dk.data = NULL;
    CHECK_ERROR(dsc_nn_attention_grad(&grad, NULL), DSC_EINVAL, "dk is NULL");
    for (int i = 0; i < 4; i++)
        CHECK(y[i] == 0.0f);
}

int main(void)
{
    struct pool pool;

    pool_init(&pool, 3, 1);
    check_all(&pool.par);
    check_special_values();
    check_refusals();
    pool_clear(&pool);
    return test_finish(__FILE__);
}
