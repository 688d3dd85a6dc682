/* infer/blocks.c against a naive model: arrays of tokens, each sequence its own, and memory that a caller writes as
 * told. */
#include "test.h"

#include "dsc/infer.h"

#define MAX_SEQUENCES 12
#define MAX_BLOCKS 40
#define MAX_TOKENS 400
#define MAX_COLUMNS (MAX_TOKENS / DSC_KV_TOKENS + 1)

struct model_sequence {
    int64_t n;
    int64_t first; /* tokens before it may be gone */
    int32_t tokens[MAX_TOKENS];
};

struct model {
    struct dsc_kv_pool *pool;
    int32_t n_blocks;
    int32_t numbers[MAX_SEQUENCES]; /* of the pool */
    struct model_sequence sequences[MAX_SEQUENCES];
    int32_t n;
    int32_t memory[MAX_BLOCKS][DSC_KV_TOKENS];
    int32_t next_token;
};

static int64_t blocks_of(int64_t n_tokens)
{
    return (n_tokens + DSC_KV_TOKENS - 1) / DSC_KV_TOKENS;
}

/* Each token that must be there is found through the table, and no block is lost or free twice. */
static void check_state(const struct model *model)
{
    static int32_t tables[MAX_SEQUENCES][MAX_COLUMNS];
    bool is_used[MAX_BLOCKS] = {false};
    struct dsc_kv_counts counts;
    int32_t n_used = 0;
    int64_t n_wrong = 0;

    CHECK_STATUS(dsc_kv_tables(model->pool, model->n, model->numbers, MAX_COLUMNS, &tables[0][0]), DSC_OK);
    for (int32_t i = 0; i < model->n; i++) {
        const struct model_sequence *sequence = &model->sequences[i];

        for (int64_t j = 0; j < MAX_COLUMNS; j++) {
            bool is_gone = (j + 1) * DSC_KV_TOKENS <= sequence->first || j >= blocks_of(sequence->n);

            n_wrong += (tables[i][j] == DSC_KV_GONE) != is_gone;
            if (tables[i][j] != DSC_KV_GONE)
                is_used[tables[i][j]] = true;
        }
        for (int64_t t = sequence->first; t < sequence->n; t++)
            n_wrong += model->memory[tables[i][t / DSC_KV_TOKENS]][t % DSC_KV_TOKENS] != sequence->tokens[t];
    }
    for (int32_t i = 0; i < model->n_blocks; i++)
        n_used += is_used[i];
    dsc_kv_count(model->pool, &counts);
    CHECK_EQ(n_wrong, 0);
    CHECK_EQ(counts.n_free, model->n_blocks - n_used);
    CHECK_EQ(counts.n_blocks, model->n_blocks);
    CHECK_EQ(counts.n_sequences, model->n);
}

/* Some of the sequences, in any order, each once. */
static int32_t choose(const struct model *model, uint64_t *random, int32_t *chosen)
{
    int32_t n = (int32_t)test_below(random, model->n + 1);

    for (int32_t i = 0; i < model->n; i++)
        chosen[i] = i;
    for (int32_t i = 0; i < n; i++) {
        int32_t j = i + (int32_t)test_below(random, model->n - i);
        int32_t other = chosen[i];

        chosen[i] = chosen[j];
        chosen[j] = other;
    }
    return n;
}

static void numbers_of(const struct model *model, int32_t n, const int32_t *chosen, int32_t *out)
{
    for (int32_t i = 0; i < n; i++)
        out[i] = model->numbers[chosen[i]];
}

/* The blocks that growing takes, by brute force: of the sequences that share an open block all but one copy it. */
static int64_t blocks_needed(const struct model *model, int32_t n, const int32_t *chosen, const int64_t *n_tokens)
{
    static int32_t tables[MAX_SEQUENCES][MAX_COLUMNS];
    int64_t needed = 0;

    dsc_kv_tables(model->pool, model->n, model->numbers, MAX_COLUMNS, &tables[0][0]);
    for (int32_t i = 0; i < n; i++) {
        int64_t before = model->sequences[chosen[i]].n;

        needed += blocks_of(before + n_tokens[i]) - blocks_of(before);
    }
    for (int32_t block = 0; block < model->n_blocks; block++) {
        int32_t n_sharing = 0;
        int32_t n_writing = 0;

        for (int32_t i = 0; i < model->n; i++)
            for (int32_t j = 0; j < MAX_COLUMNS; j++)
                n_sharing += tables[i][j] == block;
        for (int32_t i = 0; i < n; i++) {
            int64_t before = model->sequences[chosen[i]].n;

            n_writing +=
                n_tokens[i] > 0 && before % DSC_KV_TOKENS != 0 && tables[chosen[i]][before / DSC_KV_TOKENS] == block;
        }
        needed += n_writing == n_sharing && n_writing > 0 ? n_writing - 1 : n_writing;
    }
    return needed;
}

static void grow(struct model *model, uint64_t *random)
{
    int32_t chosen[MAX_SEQUENCES];
    int32_t numbers[MAX_SEQUENCES];
    int64_t n_tokens[MAX_SEQUENCES] = {0};
    struct dsc_kv_copy copies[MAX_SEQUENCES];
    static int32_t table[MAX_COLUMNS];
    struct dsc_kv_counts counts;
    int32_t n_copies = 0;
    int32_t n = choose(model, random, chosen);

    numbers_of(model, n, chosen, numbers);
    for (int32_t i = 0; i < n; i++) {
        int64_t room = MAX_TOKENS - model->sequences[chosen[i]].n;

        n_tokens[i] = test_below(random, 3) == 0 ? test_below(random, room / 4 + 1) : test_below(random, 3);
        n_tokens[i] = n_tokens[i] > room ? room : n_tokens[i];
    }
    dsc_kv_count(model->pool, &counts);
    if (blocks_needed(model, n, chosen, n_tokens) > counts.n_free) {
        CHECK_ERROR(dsc_kv_grow(model->pool, n, numbers, n_tokens, copies, &n_copies), DSC_ENOSPC, "are free");
        return;
    }
    CHECK_STATUS(dsc_kv_grow(model->pool, n, numbers, n_tokens, copies, &n_copies), DSC_OK);
    for (int32_t i = 0; i < n_copies; i++)
        memcpy(model->memory[copies[i].to], model->memory[copies[i].from], sizeof model->memory[0]);
    for (int32_t i = 0; i < n; i++) {
        struct model_sequence *sequence = &model->sequences[chosen[i]];

        CHECK_STATUS(dsc_kv_tables(model->pool, 1, &numbers[i], MAX_COLUMNS, table), DSC_OK);
        for (int64_t t = 0; t < n_tokens[i]; t++, sequence->n++) {
            sequence->tokens[sequence->n] = model->next_token;
            model->memory[table[sequence->n / DSC_KV_TOKENS]][sequence->n % DSC_KV_TOKENS] = model->next_token++;
        }
    }
}

static void cut(struct model *model, uint64_t *random)
{
    int32_t chosen[MAX_SEQUENCES];
    int32_t numbers[MAX_SEQUENCES];
    int64_t n_tokens[MAX_SEQUENCES] = {0};
    bool is_gone = false;
    int32_t n = choose(model, random, chosen);

    numbers_of(model, n, chosen, numbers);
    for (int32_t i = 0; i < n; i++) {
        const struct model_sequence *sequence = &model->sequences[chosen[i]];

        n_tokens[i] = test_below(random, 8) == 0 ? 0 : sequence->n - test_below(random, sequence->n / 4 + 1);
        is_gone = is_gone || (n_tokens[i] > 0 && n_tokens[i] < sequence->first / DSC_KV_TOKENS * DSC_KV_TOKENS);
    }
    if (is_gone) {
        CHECK_ERROR(dsc_kv_cut(model->pool, n, numbers, n_tokens), DSC_ESTATE, "are gone");
        return;
    }
    CHECK_STATUS(dsc_kv_cut(model->pool, n, numbers, n_tokens), DSC_OK);
    for (int32_t i = 0; i < n; i++) {
        struct model_sequence *sequence = &model->sequences[chosen[i]];

        sequence->n = n_tokens[i];
        sequence->first = sequence->first < sequence->n ? sequence->first : sequence->n;
    }
}

static void slide(struct model *model, uint64_t *random)
{
    int32_t chosen[MAX_SEQUENCES];
    int32_t numbers[MAX_SEQUENCES];
    int64_t first[MAX_SEQUENCES];
    int32_t n = choose(model, random, chosen);

    numbers_of(model, n, chosen, numbers);
    for (int32_t i = 0; i < n; i++) {
        struct model_sequence *sequence = &model->sequences[chosen[i]];

        first[i] = test_below(random, sequence->n + 20);
        if (first[i] > sequence->first)
            sequence->first = first[i] < sequence->n ? first[i] : sequence->n;
    }
    CHECK_STATUS(dsc_kv_slide(model->pool, n, numbers, first), DSC_OK);
}

static void assign(struct model *model, uint64_t *random)
{
    static struct model_sequence before[MAX_SEQUENCES];
    int32_t chosen[MAX_SEQUENCES];
    int32_t numbers[MAX_SEQUENCES];
    int32_t sources[MAX_SEQUENCES];
    int32_t n = choose(model, random, chosen);

    memcpy(before, model->sequences, sizeof before);
    numbers_of(model, n, chosen, numbers);
    for (int32_t i = 0; i < n; i++) {
        int32_t source = (int32_t)test_below(random, model->n);

        sources[i] = model->numbers[source];
        model->sequences[chosen[i]] = before[source];
    }
    CHECK_STATUS(dsc_kv_assign(model->pool, n, numbers, sources), DSC_OK);
}

static void add_or_drop(struct model *model, uint64_t *random)
{
    int32_t chosen[MAX_SEQUENCES];
    int32_t numbers[MAX_SEQUENCES];
    int32_t n = (int32_t)test_below(random, MAX_SEQUENCES - model->n + 1);

    if (test_below(random, 2) == 0) {
        CHECK_STATUS(dsc_kv_add(model->pool, n, model->numbers + model->n), DSC_OK);
        for (int32_t i = 0; i < n; i++)
            model->sequences[model->n + i].n = model->sequences[model->n + i].first = 0;
        model->n += n;
        return;
    }
    n = choose(model, random, chosen) / 2;
    numbers_of(model, n, chosen, numbers);
    CHECK_STATUS(dsc_kv_drop(model->pool, n, numbers), DSC_OK);
    for (int32_t i = 0; i < n; i++) {
        int32_t at = 0;

        while (model->numbers[at] != numbers[i])
            at++;
        model->n--;
        model->numbers[at] = model->numbers[model->n];
        model->sequences[at] = model->sequences[model->n];
    }
}

/* Wrong arguments of each call, between good ones: check_state then finds the state as it was. */
static void fail(struct model *model, uint64_t *random)
{
    int32_t twice[2] = {model->numbers[0], model->numbers[0]};
    int32_t strange[1] = {test_below(random, 2) == 0 ? -1 : MAX_SEQUENCES + 5};
    int64_t numbers[2] = {1, 1};
    int64_t negative[1] = {-1};
    int64_t huge[1] = {INT64_MAX};
    struct dsc_kv_copy copies[2];
    int32_t n_copies;

    if (model->n == 0)
        return;
    CHECK_ERROR(dsc_kv_drop(model->pool, 2, twice), DSC_EINVAL, "earlier entry");
    CHECK_ERROR(dsc_kv_grow(model->pool, 2, twice, numbers, copies, &n_copies), DSC_EINVAL, "earlier entry");
    CHECK_ERROR(dsc_kv_cut(model->pool, 2, twice, numbers), DSC_EINVAL, "earlier entry");
    CHECK_ERROR(dsc_kv_slide(model->pool, 2, twice, numbers), DSC_EINVAL, "earlier entry");
    CHECK_ERROR(dsc_kv_assign(model->pool, 2, twice, twice), DSC_EINVAL, "earlier entry");
    CHECK_ERROR(dsc_kv_drop(model->pool, 1, strange), DSC_EINVAL, "no sequence");
    CHECK_ERROR(dsc_kv_assign(model->pool, 1, twice, strange), DSC_EINVAL, "sources[0]");
    CHECK_ERROR(dsc_kv_grow(model->pool, 1, twice, negative, copies, &n_copies), DSC_EINVAL, "must not be negative");
    CHECK_ERROR(dsc_kv_grow(model->pool, 1, twice, huge, copies, &n_copies), DSC_EOVERFLOW, "more than a table");
    CHECK_ERROR(dsc_kv_cut(model->pool, 1, twice, negative), DSC_EINVAL, "must be 0 to");
    CHECK_ERROR(dsc_kv_cut(model->pool, 1, twice, huge), DSC_EINVAL, "must be 0 to");
    CHECK_ERROR(dsc_kv_slide(model->pool, 1, twice, negative), DSC_EINVAL, "must not be negative");
    CHECK_ERROR(dsc_kv_add(model->pool, -1, strange), DSC_EINVAL, "n is -1");
}

static void test_against_a_naive_model(void)
{
    typedef void step(struct model *, uint64_t *);
    static step *const steps[] = {grow, grow, grow, grow, cut, slide, assign, add_or_drop, fail};
    static struct model model;
    uint64_t random = 11;

    for (int round = 0; round < 120; round++) {
        model.n = model.next_token = 0;
        model.n_blocks = round < 3 ? round : 1 + (int32_t)test_below(&random, MAX_BLOCKS);
        CHECK_STATUS(dsc_kv_open(model.n_blocks, &model.pool), DSC_OK);
        for (int i = 0; i < 250; i++) {
            int which = (int)test_below(&random, sizeof steps / sizeof *steps);

            if (steps[which] == assign && model.n == 0)
                continue;
            TEST_CASE("round %d of %d blocks, step %d of kind %d", round, (int)model.n_blocks, i, which);
            steps[which](&model, &random);
            check_state(&model);
        }
        CHECK_STATUS(dsc_kv_drop(model.pool, model.n, model.numbers), DSC_OK);
        model.n = 0;
        check_state(&model);
        dsc_kv_close(model.pool);
    }
}

/* Eight samples of a prompt hold it once, and a thousand tokens later each has copied one block at most. */
static void test_samples_share_their_prompt(void)
{
    struct dsc_kv_pool *pool;
    struct dsc_kv_copy copies[8];
    struct dsc_kv_counts counts;
    int32_t sequences[8];
    int32_t sources[8];
    int64_t n_tokens[8] = {0};
    int32_t n_copies;
    int32_t n_all = 0;

    TEST_CASE("8 samples");
    CHECK_STATUS(dsc_kv_open(600, &pool), DSC_OK);
    CHECK_STATUS(dsc_kv_add(pool, 8, sequences), DSC_OK);
    n_tokens[0] = 517;
    CHECK_STATUS(dsc_kv_grow(pool, 1, sequences, n_tokens, copies, &n_copies), DSC_OK);
    for (int i = 0; i < 8; i++)
        sources[i] = sequences[0];
    CHECK_STATUS(dsc_kv_assign(pool, 8, sequences, sources), DSC_OK);
    dsc_kv_count(pool, &counts);
    CHECK_EQ(counts.n_free, 600 - 33);
    for (int step = 0; step < 1000; step++) {
        for (int i = 0; i < 8; i++)
            n_tokens[i] = 1;
        CHECK_STATUS(dsc_kv_grow(pool, 8, sequences, n_tokens, copies, &n_copies), DSC_OK);
        n_all += n_copies;
    }
    dsc_kv_count(pool, &counts);
    CHECK_EQ(n_all, 7);
    CHECK_EQ(600 - counts.n_free, 32 + 8 * (blocks_of(1517) - 32));
    dsc_kv_close(pool);
    dsc_kv_close(NULL);
    CHECK_ERROR(dsc_kv_open(-1, &pool), DSC_EINVAL, "n_blocks is -1");
}

int main(void)
{
    test_against_a_naive_model();
    test_samples_share_their_prompt();
    return test_finish(__FILE__);
}
