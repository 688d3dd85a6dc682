/*
 * infer/sample.c against the rules in f64 with a sort of the whole vocabulary; frequencies of draws; a row's bits in
 * another company, on other threads and other instruction sets; errors, which write nothing.
 */
#include "arrays.h"
#include "pool.h"

#include "cpu/table.h"
#include "dsc/sample.h"

#define MAX_ROWS 40
#define LARGE 128256

struct test_case {
    struct dsc_sample_rows rows;
    struct dsc_sample_rules rules[MAX_ROWS];
    int64_t n_earlier[MAX_ROWS];
    int64_t *earlier;
    uint64_t seeds[MAX_ROWS];
    int64_t positions[MAX_ROWS];
    struct array logits;
};

struct result {
    int64_t tokens[MAX_ROWS];
    float log_probs[MAX_ROWS];
};

enum shape { SPREAD, FEW_VALUES, EXCLUDED, EQUAL, PEAKED, N_SHAPES };

static float logit_of(enum shape shape, uint64_t *random)
{
    double x = 6 * (test_uniform(random) + test_uniform(random) + test_uniform(random));

    if (shape == EQUAL)
        return -2.5f;
    if (shape == EXCLUDED && test_below(random, 3) > 0)
        return -INFINITY;
    if (shape == FEW_VALUES)
        return (float)(floor(x / 4) / 2) * (test_below(random, 2) == 0 ? 1.0f : -1.0f); /* both zeros are among them */
    return (float)(shape == PEAKED ? 4 * x : x);
}

static struct dsc_sample_rules random_rules(int64_t n_words, uint64_t *random)
{
    static const double top_ps[] = {1e-9, 0.3, 0.9, 0.999};
    static const double min_ps[] = {1e-6, 0.05, 0.5, 1};
    static const double temperatures[] = {0, 0.3, 0.9, 2, 50};
    static const int64_t top_ks[] = {1, 2, 50, 3000};
    struct dsc_sample_rules rules = DSC_SAMPLE_RULES_INIT;

    if (test_below(random, 2) == 0)
        rules.temperature = temperatures[test_below(random, 5)];
    if (test_below(random, 2) == 0)
        rules.top_k = test_below(random, 8) == 0 ? n_words : top_ks[test_below(random, 4)];
    if (test_below(random, 2) == 0)
        rules.top_p = top_ps[test_below(random, 4)];
    if (test_below(random, 3) == 0)
        rules.min_p = min_ps[test_below(random, 4)];
    if (test_below(random, 2) == 0)
        rules.repetition_penalty = test_below(random, 2) == 0 ? 1.3 : 0.8;
    return rules;
}

static void make_case(struct test_case *test, int64_t n_rows, int64_t n_words, dsc_dtype dtype, uint64_t *random)
{
    int64_t n = 0;

    memset(test, 0, sizeof *test);
    test->logits =
        array_create(dtype, n_rows * n_words, dtype == DSC_DTYPE_F32 ? (size_t)test_below(random, 2) * 4 : 2);
    test->earlier = test_alloc((size_t)n_rows * 9 * sizeof *test->earlier);
    for (int64_t row = 0; row < n_rows; row++) {
        enum shape shape = (enum shape)test_below(random, N_SHAPES);

        for (int64_t i = 0; i < n_words; i++)
            array_set(&test->logits, row * n_words + i, logit_of(shape, random));
        array_set(&test->logits, row * n_words + test_below(random, n_words), 1); /* not all are -inf */
        test->rules[row] = random_rules(n_words, random);
        test->n_earlier[row] = test_below(random, 9);
        for (int64_t i = 0; i < test->n_earlier[row]; i++)
            test->earlier[n + i] = test_below(random, i % 2 == 0 ? n_words : (n_words + 3) / 4);
        if (test->n_earlier[row] > 1)
            test->earlier[n + 1] = test->earlier[n]; /* a word counts once */
        n += test->n_earlier[row];
        test->seeds[row] = test_random(random);
        test->positions[row] = test_below(random, 1 << 20);
    }
    test->rows = (struct dsc_sample_rows){n_rows,      n_words,         dtype,         test->logits.data,
                                          test->rules, test->n_earlier, test->earlier, NULL};
    test->rows.scratch = test_alloc(dsc_sample_scratch_bytes(n_rows, n_words));
}

static void destroy_case(struct test_case *test)
{
    array_destroy(&test->logits);
    free(test->earlier);
    free(test->rows.scratch);
}

static void draw(const struct test_case *test, const struct dsc_par *par, struct result *out)
{
    memset(out, 0, sizeof *out);
    CHECK_STATUS(dsc_sample_tokens(&test->rows, test->seeds, test->positions, out->tokens, out->log_probs, par),
                 DSC_OK);
}

struct word {
    double logit;
    int64_t i;
};

static int compare_words(const void *a, const void *b)
{
    const struct word *x = a;
    const struct word *y = b;

    if (x->logit != y->logit)
        return x->logit > y->logit ? -1 : 1;
    return x->i < y->i ? -1 : 1;
}

/*
 * The distribution of a row by the rules, in f64, and NaN for words so near to a bound that rounding decides.
 */
static void distribution(const struct test_case *test, int64_t row, int64_t first_earlier, double *out)
{
    const struct dsc_sample_rules *rules = &test->rules[row];
    int64_t n = test->rows.n_words;
    struct word *words = test_alloc((size_t)n * sizeof *words);
    double sum = 0;
    double before = 0;
    double kept = 0;

    for (int64_t i = 0; i < n; i++) {
        double x = (double)array_get(&test->logits, row * n + i);
        bool is_earlier = false;

        for (int64_t j = 0; j < test->n_earlier[row]; j++)
            is_earlier |= test->earlier[first_earlier + j] == i;
        if (is_earlier)
            x = (double)(float)(x < 0 ? x * rules->repetition_penalty : x / rules->repetition_penalty);
        words[i] = (struct word){x, i};
        out[i] = 0;
    }
    qsort(words, (size_t)n, sizeof *words, compare_words);
    if (rules->temperature == 0) {
        out[words[0].i] = 1;
        free(words);
        return;
    }
    if (rules->top_k > 0 && rules->top_k < n) {
        double least = words[rules->top_k - 1].logit;

        while (words[n - 1].logit < least)
            n--;
    }
    for (int64_t i = 0; i < n; i++)
        sum += exp((words[i].logit - words[0].logit) / rules->temperature);
    for (int64_t i = 0; i < n; i++) {
        double weight = exp((words[i].logit - words[0].logit) / rules->temperature);
        bool is_near = (i > 0 && rules->top_p < 1 && fabs(before / sum - rules->top_p) < 1e-6) ||
                       fabs(weight - rules->min_p) < 1e-5 * rules->min_p;

        if (weight == rules->min_p)
            is_near = false;
        if (is_near)
            out[words[i].i] = NAN;
        else if ((rules->top_p == 1 || before < rules->top_p * sum) && weight >= rules->min_p)
            kept += out[words[i].i] = weight;
        before += weight;
    }
    for (int64_t i = 0; i < test->rows.n_words; i++)
        out[i] /= kept;
    free(words);
}

/* Whether token is the word of this random number; sums of the vocabulary's order, within rounding. */
static bool is_drawn(const double *wanted, int64_t token, uint64_t seed, int64_t position)
{
    float u[2];
    double before = 0;

    dsc_kernels_get()->uniform_f32(2, seed, 4 * (uint64_t)position, u);
    for (int64_t i = 0; i < token; i++)
        before += wanted[i];
    return wanted[token] > 0 && before - 2e-6 <= (double)u[0] && (double)u[0] <= before + wanted[token] + 2e-6;
}

static void check_rules(const struct test_case *test, const struct result *drawn, const float *got, int64_t *n_checked)
{
    int64_t n_words = test->rows.n_words;
    double *wanted = test_alloc((size_t)n_words * sizeof *wanted);
    int64_t first = 0;

    for (int64_t row = 0; row < test->rows.n_rows; first += test->n_earlier[row++]) {
        int64_t n_near = 0;
        int64_t n_wrong = 0;

        distribution(test, row, first, wanted);
        for (int64_t i = 0; i < n_words; i++)
            n_near += isnan(wanted[i]);
        if (n_near > 0)
            continue;
        ++*n_checked;
        TEST_AT(row);
        for (int64_t i = 0; i < n_words; i++) {
            double p = (double)got[row * n_words + i];

            n_wrong += fabs(p - wanted[i]) > 1e-6 || fabs(p - wanted[i]) > 3e-5 * wanted[i] + 1e-37;
            n_wrong += wanted[i] > 1e-37 && p == 0;
        }
        CHECK_EQ(n_wrong, 0);
        CHECK(is_drawn(wanted, drawn->tokens[row], test->seeds[row], test->positions[row]));
        CHECK(fabs((double)drawn->log_probs[row] - log(wanted[drawn->tokens[row]])) < 3e-5);
    }
    free(wanted);
}

static void test_rules(const struct dsc_par *par)
{
    static const int64_t sizes[] = {1, 2, 7, 255, 256, 257, 127, 1009, 1024, 1025, 4099, 10007};
    static const dsc_dtype dtypes[] = {DSC_DTYPE_F32, DSC_DTYPE_BF16, DSC_DTYPE_F16};
    static struct test_case test;
    static struct result drawn;
    uint64_t random = 1;
    int64_t n_rows = 0;
    int64_t n_checked = 0;

    for (int round = 0; round < 75; round++) {
        int64_t n_words = round >= 72 ? LARGE : sizes[round % 12];
        float *got;

        make_case(&test, round >= 72 ? 4 : 24, n_words, dtypes[round % 3], &random);
        TEST_CASE("round %d: %d words", round, (int)n_words);
        got = test_alloc((size_t)(test.rows.n_rows * n_words) * sizeof *got);
        draw(&test, par, &drawn);
        CHECK_STATUS(dsc_sample_probabilities(&test.rows, got, par), DSC_OK);
        check_rules(&test, &drawn, got, &n_checked);
        n_rows += test.rows.n_rows;
        free(got);
        destroy_case(&test);
    }
    TEST_CASE("few rows are near a bound");
    CHECK(10 * n_checked > 9 * n_rows);
}

/* Row `row` of a case as a case of its own, in the memory of the first. */
static struct test_case alone(const struct test_case *test, int64_t row)
{
    struct test_case one = *test;
    int64_t first = 0;

    for (int64_t i = 0; i < row; i++)
        first += test->n_earlier[i];
    one.rules[0] = test->rules[row];
    one.n_earlier[0] = test->n_earlier[row];
    one.seeds[0] = test->seeds[row];
    one.positions[0] = test->positions[row];
    one.rows.n_rows = 1;
    one.rows.logits = test->logits.data + (size_t)(row * test->rows.n_words) * dsc_dtype_bytes(test->rows.dtype);
    one.rows.earlier = test->earlier + first;
    return one;
}

/* A row has the same bits alone, on any threads, and on any instruction set. */
static void test_bits(const struct dsc_par *par)
{
    static const int64_t sizes[] = {1, 257, 1009, 4099, LARGE};
    static struct test_case test;
    static struct test_case one;
    static struct result whole;
    static struct result other;
    const char *in_use = dsc_cpu_isa_name();
    uint64_t random = 5;

    for (int round = 0; round < 9; round++) {
        int64_t n_words = sizes[round % 5];
        bool is_runnable;
        const char *isa;

        make_case(&test, n_words == LARGE ? 3 : MAX_ROWS, n_words, (dsc_dtype)(round % 3), &random);
        draw(&test, NULL, &whole);
        for (int32_t i = 0; (isa = dsc_cpu_isa_at(i, &is_runnable)) != NULL; i++) {
            if (!is_runnable)
                continue;
            TEST_CASE("round %d: %d words, %s", round, (int)n_words, isa);
            CHECK_STATUS(dsc_cpu_isa_force(isa), DSC_OK);
            draw(&test, par, &other);
            CHECK_BYTES(&other, &whole, sizeof whole);
        }
        CHECK_STATUS(dsc_cpu_isa_force(in_use), DSC_OK);
        TEST_CASE("round %d: %d words, rows alone", round, (int)n_words);
        for (int64_t row = 0; row < test.rows.n_rows; row++) {
            one = alone(&test, row);
            one.rows.rules = one.rules;
            one.rows.n_earlier = one.n_earlier;
            draw(&one, NULL, &other);
            TEST_AT(row);
            CHECK_EQ(other.tokens[0], whole.tokens[row]);
            CHECK_BYTES(&other.log_probs[0], &whole.log_probs[row], sizeof(float));
        }
        destroy_case(&test);
    }
}

/* 100,000 draws, over positions with one seed, or over seeds at one position; within 5 standard deviations. */
static void test_frequencies(void)
{
    enum { N_WORDS = 12, N_DRAWS = 100000, N_CALL = 1000 };
    static const float logits[N_WORDS] = {0, 1, -1, 2, 0.5f, 2, -INFINITY, 1.5f, -3, 0, 3, 2.5f};
    static struct dsc_sample_rules rules[N_CALL];
    static float rows[N_CALL][N_WORDS];
    static uint64_t seeds[N_CALL];
    static int64_t positions[N_CALL];
    static int64_t tokens[N_CALL];
    static float log_probs[N_CALL];
    struct dsc_sample_rows call = {N_CALL, N_WORDS, DSC_DTYPE_F32, rows, rules, NULL, NULL, NULL};

    call.scratch = test_alloc(dsc_sample_scratch_bytes(N_CALL, N_WORDS));
    for (int kind = 0; kind < 4; kind++) {
        int64_t counts[N_WORDS] = {0};
        float wanted[N_WORDS];

        TEST_CASE("frequencies %d", kind);
        for (int i = 0; i < N_CALL; i++) {
            memcpy(rows[i], logits, sizeof logits);
            rules[i] = (struct dsc_sample_rules){0.8, kind >= 2 ? 0.85 : 1, 0, 1, kind >= 2 ? 7 : 0};
        }
        for (int64_t done = 0; done < N_DRAWS; done += N_CALL) {
            for (int64_t i = 0; i < N_CALL; i++) {
                seeds[i] = kind % 2 == 0 ? 17 : (uint64_t)(done + i);
                positions[i] = kind % 2 == 0 ? done + i : 3;
            }
            CHECK_STATUS(dsc_sample_tokens(&call, seeds, positions, tokens, log_probs, NULL), DSC_OK);
            for (int i = 0; i < N_CALL; i++)
                counts[tokens[i]]++;
        }
        call.n_rows = 1;
        CHECK_STATUS(dsc_sample_probabilities(&call, wanted, NULL), DSC_OK);
        call.n_rows = N_CALL;
        for (int i = 0; i < N_WORDS; i++) {
            double p = (double)wanted[i];

            TEST_AT(i);
            CHECK(fabs((double)counts[i] - N_DRAWS * p) <= 5 * sqrt(N_DRAWS * p * (1 - p)));
        }
    }
    free(call.scratch);
}

/* One row of f32 logits with rules; the word and its probability. */
static void check_row(int64_t n_words, const float *logits, const struct dsc_sample_rules *rules,
                      const int64_t *earlier, int64_t n_earlier, int64_t token, double probability)
{
    struct dsc_sample_rows rows = {1, n_words, DSC_DTYPE_F32, logits, rules, &n_earlier, earlier, NULL};
    uint64_t seed = 1;
    int64_t position = DSC_SAMPLE_MAX_POSITION - 1;
    int64_t got = -1;
    float log_prob = 1;

    rows.scratch = test_alloc(dsc_sample_scratch_bytes(1, n_words));
    CHECK_STATUS(dsc_sample_tokens(&rows, &seed, &position, &got, &log_prob, NULL), DSC_OK);
    CHECK_EQ(got, token);
    CHECK_NEAR(log_prob, log(probability), 8, 1);
    free(rows.scratch);
}

/* A number of 24 bits would be below the first word's probability here, the one of 48 bits is above it. */
static void test_rare_words(void)
{
    struct dsc_sample_rules rules = DSC_SAMPLE_RULES_INIT;
    const uint64_t seed = 9;
    float logits[2] = {0, 0};
    int64_t position = -1;
    int64_t token = -1;
    float log_prob;
    float u[2];
    struct dsc_sample_rows rows = {1, 2, DSC_DTYPE_F32, logits, &rules, NULL, NULL, NULL};

    TEST_CASE("rare words");
    do
        dsc_kernels_get()->uniform_f32(2, seed, 4 * (uint64_t)++position, u);
    while (!(u[0] > 0 && u[0] < 0x1p-18f && u[1] > 0.5f));
    logits[0] = (float)log((double)u[0] + (double)u[1] / 2 * 0x1p-24);
    rows.scratch = test_alloc(dsc_sample_scratch_bytes(1, 2));
    CHECK_STATUS(dsc_sample_tokens(&rows, &seed, &position, &token, &log_prob, NULL), DSC_OK);
    CHECK_EQ(token, 1);
    free(rows.scratch);
}

static void test_extremes(void)
{
    const float ends[] = {-INFINITY, -3e38f, 3e38f, -1, -INFINITY};
    const float equal[] = {-1, 4, 4, 4, 0};
    const float small[] = {1e-40f, 2e-40f, 0, -1e-40f};
    const int64_t earlier[] = {1, 2, 3};
    const int64_t only = 0;
    struct dsc_sample_rules rules = DSC_SAMPLE_RULES_INIT;

    TEST_CASE("extremes");
    check_row(5, ends, &rules, NULL, 0, 2, 1);
    rules.temperature = 5e-324; /* its inverse is inf */
    check_row(5, ends, &rules, NULL, 0, 2, 1);
    check_row(4, small, &rules, NULL, 0, 1, 1);
    rules.repetition_penalty = 5e-324; /* quotients and products beyond f32 */
    check_row(5, ends, &rules, earlier, 3, 2, 1);
    rules.repetition_penalty = 1e308;
    check_row(5, ends, &rules, earlier, 3, 2, 1);
    check_row(1, &ends[1], &rules, &only, 1, 0, 1);
    rules = (struct dsc_sample_rules){0, 1, 0, 1, 0};
    check_row(5, equal, &rules, NULL, 0, 1, 1); /* the first of the largest */
    rules.repetition_penalty = 2;
    check_row(5, equal, &rules, earlier, 2, 3, 1);
    rules = (struct dsc_sample_rules){1, 0.5, 0, 1, 1}; /* top_k keeps three, top_p the first two of them */
    {
        const int64_t two[] = {2, 1};
        struct dsc_sample_rows rows = {1, 5, DSC_DTYPE_F32, equal, &rules, NULL, two, NULL};
        float p[5];

        rows.scratch = test_alloc(dsc_sample_scratch_bytes(1, 5));
        CHECK_STATUS(dsc_sample_probabilities(&rows, p, NULL), DSC_OK);
        CHECK(p[0] == 0 && p[1] == 0.5f && p[2] == 0.5f && p[3] == 0 && p[4] == 0);
        free(rows.scratch);
    }
}

static void test_errors(void)
{
    enum { N_WORDS = 70, N_ROWS = 3 };
    static float logits[N_ROWS][N_WORDS];
    const int64_t earlier[] = {0, 69, 5};
    const int64_t n_earlier[] = {1, 0, 2};
    struct dsc_sample_rules rules[N_ROWS];
    const uint64_t seeds[N_ROWS] = {0};
    int64_t positions[N_ROWS] = {0};
    int64_t tokens[N_ROWS] = {-7, -7, -7};
    float log_probs[N_ROWS] = {7, 7, 7};
    static float probabilities[N_ROWS][N_WORDS];
    struct dsc_sample_rows call = {N_ROWS, N_WORDS, DSC_DTYPE_F32, logits, rules, n_earlier, earlier, NULL};
    struct dsc_sample_rows good;

    call.scratch = test_alloc(dsc_sample_scratch_bytes(N_ROWS, N_WORDS));
    good = call;
    for (int i = 0; i < N_ROWS; i++)
        rules[i] = (struct dsc_sample_rules)DSC_SAMPLE_RULES_INIT;
    rules[2].repetition_penalty = 2;
    probabilities[0][0] = 7;
    TEST_CASE("errors");
#define CHECK_BAD(word)                                                                                     \
    do {                                                                                                    \
        CHECK_ERROR(dsc_sample_tokens(&call, seeds, positions, tokens, log_probs, NULL), DSC_EINVAL, word); \
        CHECK_ERROR(dsc_sample_probabilities(&call, probabilities[0], NULL), DSC_EINVAL, word);             \
        CHECK(tokens[0] == -7 && tokens[2] == -7 && log_probs[0] == 7 && log_probs[2] == 7 &&               \
              probabilities[0][0] == 7);                                                                    \
        call = good;                                                                                        \
    } while (0)
#define CHECK_BAD_RULE(field, value, word)                         \
    do {                                                           \
        rules[1].field = value;                                    \
        CHECK_BAD(word);                                           \
        rules[1] = (struct dsc_sample_rules)DSC_SAMPLE_RULES_INIT; \
    } while (0)
    CHECK_BAD_RULE(temperature, -1, "temperature of row 1 is -1, must be finite and not negative");
    CHECK_BAD_RULE(temperature, (double)INFINITY, "temperature of row 1 is inf");
    CHECK_BAD_RULE(temperature, (double)NAN, "temperature of row 1 is");
    CHECK_BAD_RULE(top_p, 0, "top_p of row 1 is 0, must be above 0 and at most 1");
    CHECK_BAD_RULE(top_p, 1.5, "top_p of row 1 is 1.5");
    CHECK_BAD_RULE(min_p, -0.1, "min_p of row 1 is -0.1, must be from 0 to 1");
    CHECK_BAD_RULE(min_p, (double)NAN, "min_p of row 1 is");
    CHECK_BAD_RULE(repetition_penalty, 0, "repetition_penalty of row 1 is 0, must be finite and above 0");
    CHECK_BAD_RULE(repetition_penalty, (double)INFINITY, "repetition_penalty of row 1 is inf");
    CHECK_BAD_RULE(top_k, -2, "top_k of row 1 is -2, must not be negative");

    logits[2][5] = NAN; /* an earlier word, with a penalty */
    logits[2][68] = NAN;
    logits[2][1] = INFINITY;
    CHECK_BAD("logit 5 of row 2 is NaN");
    logits[1][66] = NAN;
    CHECK_BAD("logit 66 of row 1 is NaN");
    memset(logits, 0, sizeof logits);
    logits[2][5] = INFINITY; /* no penalty makes it finite */
    CHECK_BAD("logit 5 of row 2 is inf");
    for (int i = 0; i < N_WORDS; i++)
        logits[2][i] = -INFINITY;
    CHECK_BAD("all logits of row 2 are -inf");
    memset(logits, 0, sizeof logits);
    logits[1][69] = INFINITY;
    logits[1][3] = -INFINITY;
    CHECK_BAD("logit 69 of row 1 is inf");
    for (int i = 0; i < N_WORDS; i++)
        logits[1][i] = -INFINITY;
    CHECK_BAD("all logits of row 1 are -inf");
    memset(logits, 0, sizeof logits);

    const int64_t outside[] = {0, 69, 70};
    const int64_t negative[] = {0, 69, -1};
    const int64_t bad_counts[] = {1, -1, 2};

    call.earlier = outside;
    CHECK_BAD("earlier word 1 of row 2 is 70, and there are 70 words");
    call.earlier = negative;
    CHECK_BAD("earlier word 1 of row 2 is -1");
    call.earlier = NULL;
    CHECK_BAD("earlier is NULL");
    call.n_earlier = bad_counts;
    CHECK_BAD("n_earlier of row 1 is -1");
    call.n_words = 0;
    CHECK_BAD("3 rows of 0 words");
    call.n_rows = -1;
    CHECK_BAD("-1 rows of 70 words");
    call.dtype = DSC_DTYPE_COUNT;
    CHECK_BAD("dtype is 3");
    call.logits = NULL;
    CHECK_BAD("logits is NULL");
    call.rules = NULL;
    CHECK_BAD("rules is NULL");
    call.scratch = NULL;
    CHECK_BAD("scratch is NULL");
    CHECK_ERROR(dsc_sample_tokens(&call, NULL, positions, tokens, log_probs, NULL), DSC_EINVAL, "seeds");
    CHECK_ERROR(dsc_sample_probabilities(&call, NULL, NULL), DSC_EINVAL, "out is NULL");
    positions[1] = -1;
    CHECK_ERROR(dsc_sample_tokens(&call, seeds, positions, tokens, log_probs, NULL), DSC_EINVAL,
                "position of row 1 is -1");
    positions[1] = DSC_SAMPLE_MAX_POSITION;
    CHECK_ERROR(dsc_sample_tokens(&call, seeds, positions, tokens, log_probs, NULL), DSC_EINVAL, "position of row 1");
    CHECK_EQ(tokens[0], -7);
    call.n_rows = 0;
    CHECK_STATUS(dsc_sample_tokens(&call, NULL, NULL, NULL, NULL, NULL), DSC_OK);
    CHECK_STATUS(dsc_sample_probabilities(&call, NULL, NULL), DSC_OK);
    CHECK_EQ(dsc_sample_scratch_bytes(-1, 5), 0);
    CHECK_EQ(dsc_sample_scratch_bytes(5, -1), 0);
    free(call.scratch);
}

int main(void)
{
    struct pool pool;

    pool_init(&pool, 3, 1);
    test_rules(&pool.par);
    test_bits(&pool.par);
    pool_clear(&pool);
    test_frequencies();
    test_rare_words();
    test_extremes();
    test_errors();
    return test_finish(__FILE__);
}
