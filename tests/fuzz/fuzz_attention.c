/* dsc_nn_attention: any sizes and rules give the rows that a walk over all pairs of tokens gives; wild numbers are refused before anything is written. */
#include "fuzz.h"

#include "nn/attention_case.h"

#define MAX_TOKENS 160
#define MAX_HEADS 4
#define DIM 2

static float small(struct input *input)
{
    return (float)(take_byte(input) - 128) / 64.0f;
}

static void check_row(const struct dsc_nn_attention *call, int64_t head, int64_t query)
{
    const float *q = (const float *)call->q.data + (head * call->n_queries + query) * DIM;
    const float *k = (const float *)call->k.data + head / (call->n_heads / call->n_kv_heads) * call->n_keys * DIM;
    const float *v = (const float *)call->v.data + head / (call->n_heads / call->n_kv_heads) * call->n_keys * DIM;
    const float *out = (const float *)call->out.data + (head * call->n_queries + query) * DIM;
    double sum = 0, wanted[DIM] = {0}, ignored;

    for (int64_t key = 0; key < call->n_keys; key++) {
        double product = (double)q[0] * k[key * DIM] + (double)q[1] * k[key * DIM + 1];
        double weight = attention_sees(call, 0, query, key) ? exp(attention_score(call, 0, head, query, key, product, &ignored)) : 0;

        sum += weight;
        for (int i = 0; i < DIM; i++)
            wanted[i] += weight * v[key * DIM + i];
    }
    for (int i = 0; i < DIM; i++)
        REQUIRE(fabs(out[i] - (sum > 0 ? wanted[i] / sum : 0)) < 1e-4);
    REQUIRE(sum > 0 ? fabs(call->lse[head * call->n_queries + query] - log(sum)) < 1e-4 : call->lse[head * call->n_queries + query] == -INFINITY);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes)
{
    static float q[MAX_HEADS * MAX_TOKENS * DIM], k[MAX_HEADS * MAX_TOKENS * DIM], v[MAX_HEADS * MAX_TOKENS * DIM], out[MAX_HEADS * MAX_TOKENS * DIM];
    static float lse[MAX_HEADS * MAX_TOKENS], slopes[MAX_HEADS];
    static int32_t documents[MAX_TOKENS];
    struct input input = {data, n_bytes};
    bool is_wild = take_byte(&input) % 4 == 0;
    uint8_t rules = take_byte(&input);
    struct dsc_nn_attention call = {.n_batch = 1, .n_kv_heads = 1 + take_below(&input, 2), .head_dim = DIM, .value_dim = DIM, .scale = 0.5f, .lse = lse};

    call.n_heads = call.n_kv_heads * (1 + take_below(&input, 2));
    call.n_keys = take_below(&input, MAX_TOKENS + 1);
    call.n_queries = take_below(&input, (rules & 1) != 0 ? call.n_keys + 1 : MAX_TOKENS + 1);
    call.documents = (rules & 1) != 0 ? documents : NULL;
    call.is_causal = (rules & 2) != 0;
    call.window = (rules & 4) != 0 ? take_below(&input, MAX_TOKENS) : 0;
    call.soft_cap = (rules & 8) != 0 ? 2 : 0;
    call.slopes = (rules & 16) != 0 ? slopes : NULL;
    for (int i = 0; i < MAX_TOKENS; i++)
        documents[i] = (int32_t)take_byte(&input) % 3 - 1;
    for (int i = 0; i < MAX_HEADS; i++)
        slopes[i] = fabsf(small(&input));
    for (int i = 0; i < MAX_HEADS * MAX_TOKENS * DIM; i++) {
        q[i] = small(&input);
        k[i] = small(&input);
        v[i] = small(&input);
    }
    call.q = (struct dsc_nn_heads){q, {0, call.n_queries * DIM, DIM}};
    call.k = (struct dsc_nn_heads){k, {0, call.n_keys * DIM, DIM}};
    call.v = (struct dsc_nn_heads){v, {0, call.n_keys * DIM, DIM}};
    call.out = (struct dsc_nn_heads){out, {0, call.n_queries * DIM, DIM}};
    if (is_wild) {
        call.n_kv_heads = take_wild(&input);
        call.head_dim = DSC_NN_MAX_HEAD_DIM + 1 + (take_byte(&input) & 1) * (INT64_MAX / 2);
        call.window = take_wild(&input);
        REQUIRE(dsc_nn_attention(&call, NULL) != DSC_OK && dsc_nn_attention_scratch_elems(&call) == 0);
        return 0;
    }
    REQUIRE(dsc_nn_attention(&call, NULL) == DSC_OK);
    for (int64_t row = 0; row < call.n_heads * call.n_queries; row++)
        check_row(&call, row / call.n_queries, row % call.n_queries);
    return 0;
}
