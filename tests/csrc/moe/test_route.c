/* moe/route.c: choices of experts against a sort by brute force in f64, on every instruction set and any threads. */
#include "arrays.h"
#include "pool.h"
#include "test.h"

#include "dsc/moe.h"

#define MAX_LOGITS (1009 * 256)

static float logits[MAX_LOGITS];
static float bias[256];
static int32_t got[MAX_LOGITS];
static int32_t first[MAX_LOGITS];
static double biased[256];

static double score_of(const float *row, int64_t n, int64_t e, int score)
{
    double largest = -INFINITY;
    double sum = 0;

    if (score == DSC_MOE_SIGMOID)
        return 1 / (1 + exp(-(double)row[e]));
    for (int64_t i = 0; i < n; i++)
        largest = fmax(largest, (double)row[i]);
    if (largest == -INFINITY)
        return 0;
    for (int64_t i = 0; i < n; i++)
        sum += exp((double)row[i] - largest);
    return exp((double)row[e] - largest) / sum;
}

static double good(const struct dsc_moe_route *call, int64_t g)
{
    int64_t n = call->n_experts / call->n_groups;
    double best = -INFINITY;
    double second = -INFINITY;

    for (int64_t e = g * n; e < (g + 1) * n; e++) {
        second = fmax(second, fmin(best, biased[e]));
        best = fmax(best, biased[e]);
    }
    return n > 1 ? best + second : best;
}

static bool is_open(const struct dsc_moe_route *call, int64_t group)
{
    int64_t n_better = 0;

    for (int64_t g = 0; g < call->n_groups; g++)
        n_better += good(call, g) > good(call, group) || (good(call, g) == good(call, group) && g < group);
    return n_better < call->n_limited_groups;
}

/* Checks one token: no expert that was left out is better than a chosen one, and the chosen ones are in order. */
static void check_token(const struct dsc_moe_route *call, const float *row, const int32_t *chosen)
{
    int64_t n_each = call->n_experts / call->n_groups;
    bool is_chosen[256] = {false};
    double tolerance = call->bias == NULL ? 0 : 3e-7;

    for (int64_t e = 0; e < call->n_experts; e++)
        biased[e] = score_of(row, call->n_experts, e, call->score) + (call->bias == NULL ? 0 : (double)call->bias[e]);
    for (int64_t j = 0; j < call->k; j++) {
        CHECK(chosen[j] >= 0 && chosen[j] < call->n_experts && !is_chosen[chosen[j]]);
        is_chosen[chosen[j]] = true;
        CHECK(call->n_limited_groups == call->n_groups || is_open(call, chosen[j] / n_each));
    }
    for (int64_t j = 0; j < call->k; j++)
        for (int64_t e = 0; e < call->n_experts; e++) {
            double mine = call->bias == NULL ? (double)row[chosen[j]] : biased[chosen[j]];
            double other = call->bias == NULL ? (double)row[e] : biased[e];
            bool is_later = !is_chosen[e];

            for (int64_t i = j + 1; i < call->k; i++)
                is_later = is_later || chosen[i] == e;
            if (is_later && (call->n_limited_groups == call->n_groups || is_open(call, e / n_each)))
                CHECK(other < mine || (other == mine && e > chosen[j]) || fabs(other - mine) < tolerance);
        }
}

static void check_sizes(int64_t n_tokens, int64_t n_experts, int64_t k, int64_t n_groups, int64_t n_limited,
                        const struct dsc_par *par)
{
    uint64_t random = (uint64_t)(n_tokens * 31 + n_experts);
    float *scratch = test_alloc((size_t)dsc_moe_route_scratch_elems(n_tokens, n_experts) * sizeof *scratch + 1);

    for (int mode = 0; mode < 4; mode++) {
        struct dsc_moe_route call = {n_tokens, n_experts, k, mode % 2, n_groups, n_limited,
                                     logits, mode / 2 ? bias : NULL, scratch, got};
        int32_t isa_index = 0;
        const char *isa;
        bool is_first = true;
        int64_t bad = 7;

        TEST_CASE("%d tokens, %d experts, k %d, %d of %d groups, mode %d", (int)n_tokens, (int)n_experts, (int)k,
                  (int)n_limited, (int)n_groups, mode);
        for (int64_t i = 0; i < n_tokens * n_experts; i++) /* few values: ties are frequent */
            logits[i] = mode == 0 ? (float)test_below(&random, 9) - 4 : (float)(4 * test_uniform(&random));
        for (int64_t e = 0; e < n_experts; e++)
            bias[e] = (float)(0.3 * test_uniform(&random));
        while (next_isa(&isa_index, &isa))
            for (int threads = 0; threads < 2; threads++) {
                memset(got, 0xff, sizeof got);
                CHECK_STATUS(dsc_moe_route(&call, threads ? par : NULL, &bad), DSC_OK);
                CHECK_EQ(bad, -1);
                if (is_first)
                    memcpy(first, got, sizeof got);
                is_first = false;
                CHECK_BYTES(got, first, (size_t)(n_tokens * k) * sizeof *got);
            }
        for (int64_t t = 0; t < n_tokens; t++) {
            TEST_AT(t);
            /* Random scores of groups that differ by rounding alone would be bad luck; ties of mode 0 are exact only
             * where scores are not summed. */
            if (mode != 0 || n_limited == n_groups)
                check_token(&call, logits + t * n_experts, got + t * k);
        }
    }
    free(scratch);
}

static void test_bad_logits(const struct dsc_par *par)
{
    static float scratch[3 * 64 * 8];
    struct dsc_moe_route call = {5000, 8, 2, DSC_MOE_SOFTMAX, 1, 1, logits, NULL, scratch, got};
    int64_t bad = 0;

    TEST_CASE("logits without a score");
    memset(logits, 0, sizeof logits);
    logits[4999 * 8] = NAN;
    logits[4321 * 8 + 6] = INFINITY;
    logits[17] = -INFINITY;
    for (int threads = 0; threads < 2; threads++) {
        CHECK_STATUS(dsc_moe_route(&call, threads ? par : NULL, &bad), DSC_OK);
        CHECK_EQ(bad, 4321 * 8 + 6);
    }
    bad = 99;
    call.k = 9;
    CHECK_ERROR(dsc_moe_route(&call, NULL, &bad), DSC_EINVAL, "k is 9");
    call.k = 3;
    call.n_groups = 4;
    CHECK_ERROR(dsc_moe_route(&call, NULL, &bad), DSC_EINVAL, "k is 3");
    call.n_groups = 3;
    CHECK_ERROR(dsc_moe_route(&call, NULL, &bad), DSC_EINVAL, "n_groups is 3");
    call.n_groups = 4;
    call.n_limited_groups = 5;
    CHECK_ERROR(dsc_moe_route(&call, NULL, &bad), DSC_EINVAL, "n_limited_groups is 5");
    call.n_groups = call.n_limited_groups = 1;
    call.score = 2;
    CHECK_ERROR(dsc_moe_route(&call, NULL, &bad), DSC_EINVAL, "score is 2");
    call.score = 0;
    call.bias = bias;
    bias[5] = NAN;
    CHECK_ERROR(dsc_moe_route(&call, NULL, &bad), DSC_EINVAL, "bias[5]");
    call.bias = NULL;
    call.n_tokens = INT64_MAX / 4;
    CHECK_ERROR(dsc_moe_route(&call, NULL, &bad), DSC_EOVERFLOW, "int64_t");
    call.n_tokens = -1;
    CHECK_ERROR(dsc_moe_route(&call, NULL, &bad), DSC_EINVAL, "negative");
    call.n_tokens = 5000;
    call.scratch = NULL;
    CHECK_ERROR(dsc_moe_route(&call, NULL, &bad), DSC_EINVAL, "scratch");
    CHECK_EQ(bad, 99);
}

/* Word i of Philox4x32-7, one counter at a time. */
static uint32_t word(uint64_t seed, uint64_t i)
{
    uint32_t c[4] = {(uint32_t)(i / 4), (uint32_t)(i / 4 >> 32), 0, 0};
    uint32_t key[2] = {(uint32_t)seed, (uint32_t)(seed >> 32)};

    for (int round = 0; round < 7; round++) {
        uint64_t a = (uint64_t)0xD2511F53u * c[0];
        uint64_t b = (uint64_t)0xCD9E8D57u * c[2];
        uint32_t next[4] = {(uint32_t)(b >> 32) ^ c[1] ^ key[0], (uint32_t)b, (uint32_t)(a >> 32) ^ c[3] ^ key[1],
                            (uint32_t)a};

        memcpy(c, next, sizeof c);
        key[0] += 0x9E3779B9u;
        key[1] += 0xBB67AE85u;
    }
    return c[i % 4];
}

static void test_uniform_numbers(const struct dsc_par *par)
{
    static float numbers[20011];
    const int64_t offsets[] = {0, 1, 3, 1021, (INT64_C(1) << 34) - 2, INT64_C(1) << 50};
    const int64_t lengths[] = {0, 1, 5, 511, 20011};
    const uint64_t seed = 0xFEDCBA9876543210u;

    for (size_t o = 0; o < sizeof offsets / sizeof *offsets; o++)
        for (size_t l = 0; l < sizeof lengths / sizeof *lengths; l++) {
            int32_t isa_index = 0;
            const char *isa;

            while (next_isa(&isa_index, &isa)) {
                TEST_CASE("%d numbers from %" PRId64 " on %s", (int)lengths[l], offsets[o], isa);
                CHECK_STATUS(dsc_moe_uniform(lengths[l], seed, offsets[o], par, numbers), DSC_OK);
                for (int64_t i = 0; i < lengths[l]; i++) {
                    TEST_AT(i);
                    CHECK((double)numbers[i] == (word(seed, (uint64_t)(offsets[o] + i)) >> 8) / 16777216.0);
                }
            }
        }
    CHECK_ERROR(dsc_moe_uniform(3, 0, -1, NULL, numbers), DSC_EINVAL, "negative");
    CHECK_ERROR(dsc_moe_uniform(3, 0, INT64_MAX - 1, NULL, numbers), DSC_EINVAL, "int64_t");
    CHECK_ERROR(dsc_moe_uniform(3, 0, 0, NULL, NULL), DSC_EINVAL, "out is NULL");
}

int main(void)
{
    static const int64_t sizes[][5] = {{0, 8, 2, 1, 1},   {1, 1, 1, 1, 1},     {5, 0, 0, 1, 1},     {3, 7, 7, 1, 1},
                                       {17, 5, 0, 1, 1},  {127, 16, 2, 4, 1},  {127, 6, 3, 6, 3},   {1009, 8, 2, 1, 1},
                                       {131, 64, 6, 8, 3}, {67, 256, 8, 8, 4}, {3, 256, 255, 1, 1}, {31, 17, 1, 1, 1}};
    struct pool pool;

    pool_init(&pool, 3, 1);
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        check_sizes(sizes[i][0], sizes[i][1], sizes[i][2], sizes[i][3], sizes[i][4], &pool.par);
    test_bad_logits(&pool.par);
    test_uniform_numbers(&pool.par);
    pool_clear(&pool);
    return test_finish(__FILE__);
}
