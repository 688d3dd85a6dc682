/* infer/prefixes.c against a naive model: the value of a token in a block is a hash of all tokens up to it and of the
 * salt, as keys and values are. So a block that is found for other tokens is seen. */
#include "test.h"

#include "dsc/infer.h"

#define MAX_SEQUENCES 8
#define MAX_BLOCKS 50
#define MAX_TOKENS 330
#define MAX_COLUMNS (MAX_TOKENS / DSC_KV_TOKENS + 1)
#define MAX_POOLS 2
#define N_TEXTS 3

struct model_sequence {
    int32_t numbers[MAX_POOLS];
    int32_t chain;
    int64_t n;
    int salt;
    int64_t tokens[MAX_TOKENS];
};

struct model {
    struct dsc_kv_prefixes *prefixes;
    int32_t n_pools;
    int64_t windows[MAX_POOLS];
    struct dsc_kv_pool *pools[MAX_POOLS];
    int32_t n_blocks[MAX_POOLS];
    uint64_t memory[MAX_POOLS][MAX_BLOCKS][DSC_KV_TOKENS];
    struct model_sequence sequences[MAX_SEQUENCES];
    int32_t n;
    int64_t texts[N_TEXTS][MAX_TOKENS];
    int64_t n_found;
};

static const char *const salts[] = {"", "a", "b\0c"};
static const size_t salt_sizes[] = {0, 1, 3};

static int64_t blocks_of(int64_t n_tokens)
{
    return (n_tokens + DSC_KV_TOKENS - 1) / DSC_KV_TOKENS;
}

static uint64_t value_of(const struct model_sequence *sequence, int64_t n)
{
    uint64_t value = 77 + (uint64_t)sequence->salt;

    for (int64_t t = 0; t < n; t++)
        value = (value ^ (uint64_t)sequence->tokens[t]) * 0xD6E8FEB86659FD93u;
    return value;
}

static int64_t first_seen(const struct model *model, int32_t pool, int64_t n)
{
    return model->windows[pool] == 0 || n < model->windows[pool] ? 0 : n - model->windows[pool] + 1;
}

/* All tokens that the next token sees are where the tables say. Returns the blocks of tables. */
static int32_t check_pool(const struct model *model, int32_t pool)
{
    bool is_used[MAX_BLOCKS] = {false};
    int32_t table[MAX_COLUMNS];
    int32_t n_used = 0;
    int64_t n_wrong = 0;

    for (int32_t i = 0; i < model->n; i++) {
        const struct model_sequence *sequence = &model->sequences[i];

        CHECK_STATUS(dsc_kv_tables(model->pools[pool], 1, &sequence->numbers[pool], MAX_COLUMNS, table), DSC_OK);
        for (int64_t t = first_seen(model, pool, sequence->n); t < sequence->n; t++) {
            int32_t block = table[t / DSC_KV_TOKENS];

            n_wrong +=
                block == DSC_KV_GONE || model->memory[pool][block][t % DSC_KV_TOKENS] != value_of(sequence, t + 1);
        }
        for (int64_t j = 0; j < MAX_COLUMNS; j++)
            if (table[j] != DSC_KV_GONE)
                is_used[table[j]] = true;
    }
    CHECK_EQ(n_wrong, 0);
    for (int32_t i = 0; i < model->n_blocks[pool]; i++)
        n_used += is_used[i];
    return n_used;
}

static int32_t n_free(const struct model *model, int32_t pool)
{
    struct dsc_kv_counts counts;

    dsc_kv_count(model->pools[pool], &counts);
    return counts.n_free;
}

static void check_state(const struct model *model)
{
    struct dsc_kv_prefix_counts counts;
    int64_t n_most = 3 + MAX_SEQUENCES * MAX_COLUMNS;

    for (int32_t pool = 0; pool < model->n_pools; pool++) {
        CHECK_EQ(n_free(model, pool), model->n_blocks[pool] - check_pool(model, pool));
        n_most += (int64_t)model->n_blocks[pool] * MAX_COLUMNS;
    }
    dsc_kv_prefixes_count(model->prefixes, &counts);
    CHECK_EQ(counts.n_chains, model->n);
    CHECK(counts.n_nodes <= n_most);
}

static void begin(struct model *model, uint64_t *random)
{
    struct model_sequence *sequence = &model->sequences[model->n];

    if (model->n == MAX_SEQUENCES)
        return;
    for (int32_t pool = 0; pool < model->n_pools; pool++)
        CHECK_STATUS(dsc_kv_add(model->pools[pool], 1, &sequence->numbers[pool]), DSC_OK);
    sequence->n = 0;
    sequence->salt = (int)test_below(random, 8) % 3;
    CHECK_STATUS(dsc_kv_prefixes_begin(model->prefixes, sequence->numbers, salts[sequence->salt],
                                       salt_sizes[sequence->salt], &sequence->chain),
                 DSC_OK);
    model->n++;
}

static void end(struct model *model, int32_t i)
{
    struct model_sequence *sequence = &model->sequences[i];

    CHECK_STATUS(dsc_kv_prefixes_end(model->prefixes, sequence->chain), DSC_OK);
    for (int32_t pool = 0; pool < model->n_pools; pool++)
        CHECK_STATUS(dsc_kv_drop(model->pools[pool], 1, &sequence->numbers[pool]), DSC_OK);
    model->sequences[i] = model->sequences[--model->n];
}

/* Writes the tokens [begin, end) of the sequence to their blocks. */
static void write_tokens(struct model *model, const struct model_sequence *sequence, int64_t first, int64_t last)
{
    int32_t table[MAX_COLUMNS];

    for (int32_t pool = 0; pool < model->n_pools; pool++) {
        CHECK_STATUS(dsc_kv_tables(model->pools[pool], 1, &sequence->numbers[pool], MAX_COLUMNS, table), DSC_OK);
        for (int64_t t = first; t < last; t++)
            model->memory[pool][table[t / DSC_KV_TOKENS]][t % DSC_KV_TOKENS] = value_of(sequence, t + 1);
    }
}

/* A piece of a text, and sometimes of nobody's. One of the pools may have no room, or the forward may fail. */
static void put(struct model *model, uint64_t *random)
{
    struct model_sequence *sequence = &model->sequences[test_below(random, model->n)];
    const int64_t *text = model->texts[test_below(random, N_TEXTS)];
    int64_t n_new = test_below(random, 3) == 0 ? 1 : test_below(random, 130);
    int64_t before = sequence->n, found = 0, expected = 0;
    int32_t free_before[MAX_POOLS];
    bool fits = true, is_written;

    n_new = n_new < MAX_TOKENS - before ? n_new : MAX_TOKENS - before;
    for (int64_t t = before; t < before + n_new; t++)
        sequence->tokens[t] = test_below(random, 200) == 0 ? 5 : text[t];
    for (int32_t pool = 0; pool < model->n_pools; pool++) {
        free_before[pool] = n_free(model, pool);
        fits = fits && blocks_of(before + n_new) - blocks_of(before) <= free_before[pool];
    }
    CHECK_STATUS(dsc_kv_prefixes_find(model->prefixes, salts[sequence->salt], salt_sizes[sequence->salt], n_new,
                                      sequence->tokens + before, &expected),
                 DSC_OK);
    CHECK_STATUS(dsc_kv_prefixes_take(model->prefixes, sequence->chain, n_new, sequence->tokens + before, &found),
                 DSC_OK);
    if (before == 0)
        CHECK_EQ(found, expected);
    if (before % DSC_KV_TOKENS != 0)
        CHECK_EQ(found, 0);
    CHECK(found % DSC_KV_TOKENS == 0 && found <= (n_new == 0 ? 0 : n_new - 1));
    is_written = test_below(random, 5) > 0;
    for (int32_t pool = 0; pool < model->n_pools; pool++) {
        int64_t n_rest = n_new - found;
        struct dsc_kv_copy copy;
        int32_t n_copies = 0;
        dsc_status status = dsc_kv_grow(model->pools[pool], 1, &sequence->numbers[pool], &n_rest, &copy, &n_copies);

        CHECK(status == DSC_OK || (status == DSC_ENOSPC && !fits));
        CHECK_EQ(n_copies, 0);
        is_written = is_written && status == DSC_OK;
    }
    if (!is_written) {
        for (int32_t pool = 0; pool < model->n_pools; pool++) {
            CHECK_STATUS(dsc_kv_cut(model->pools[pool], 1, &sequence->numbers[pool], &before), DSC_OK);
            CHECK_EQ(n_free(model, pool), free_before[pool]);
        }
        return;
    }
    model->n_found += found;
    sequence->n += n_new;
    write_tokens(model, sequence, before + found, sequence->n);
    CHECK_STATUS(dsc_kv_prefixes_note(model->prefixes, sequence->chain, n_new, sequence->tokens + before), DSC_OK);
    for (int32_t pool = 0; pool < model->n_pools; pool++) {
        int64_t first = first_seen(model, pool, sequence->n);

        CHECK_STATUS(dsc_kv_slide(model->pools[pool], 1, &sequence->numbers[pool], &first), DSC_OK);
    }
}

static void open_model(struct model *model, uint64_t *random)
{
    model->n = 0;
    model->n_pools = 1 + (int32_t)test_below(random, MAX_POOLS);
    for (int32_t pool = 0; pool < model->n_pools; pool++) {
        model->windows[pool] = test_below(random, 2) == 0 ? 0 : 1 + test_below(random, 80);
        model->n_blocks[pool] = 1 + (int32_t)test_below(random, MAX_BLOCKS);
        CHECK_STATUS(dsc_kv_open(model->n_blocks[pool], &model->pools[pool]), DSC_OK);
    }
    for (int i = 0; i < N_TEXTS; i++)
        for (int64_t t = 0; t < MAX_TOKENS; t++)
            model->texts[i][t] = i > 0 && t < 100 ? model->texts[0][t] : test_below(random, 3);
    CHECK_STATUS(dsc_kv_prefixes_open(model->n_pools, model->pools, model->windows, (uint64_t)test_below(random, 99),
                                      &model->prefixes),
                 DSC_OK);
}

static void test_against_a_naive_model(int n_rounds)
{
    static struct model model;
    uint64_t random = 5;

    for (int round = 0; round < n_rounds; round++) {
        open_model(&model, &random);
        for (int i = 0; i < 300; i++) {
            TEST_CASE("round %d, step %d", round, i);
            if (model.n == 0 || test_below(&random, 6) == 0)
                begin(&model, &random);
            else if (test_below(&random, 7) == 0)
                end(&model, (int32_t)test_below(&random, model.n));
            else
                put(&model, &random);
            check_state(&model);
        }
        while (model.n > 0)
            end(&model, 0);
        check_state(&model);
        dsc_kv_prefixes_close(model.prefixes);
        for (int32_t pool = 0; pool < model.n_pools; pool++) {
            CHECK_EQ(n_free(&model, pool), model.n_blocks[pool]);
            dsc_kv_close(model.pools[pool]);
        }
    }
    CHECK(model.n_found > 10000);
}

struct single {
    struct dsc_kv_pool *pool;
    struct dsc_kv_prefixes *prefixes;
};

static struct single open_single(int32_t n_blocks)
{
    int64_t window = 0;
    struct single single;

    CHECK_STATUS(dsc_kv_open(n_blocks, &single.pool), DSC_OK);
    CHECK_STATUS(dsc_kv_prefixes_open(1, &single.pool, &window, 1, &single.prefixes), DSC_OK);
    return single;
}

static void close_single(struct single *single)
{
    dsc_kv_prefixes_close(single->prefixes);
    dsc_kv_close(single->pool);
}

/* A sequence of n equal tokens, whose blocks are idle afterwards. Returns the tokens that it found. */
static int64_t run_and_end(struct single *single, int64_t token, int64_t n)
{
    int64_t tokens[MAX_TOKENS], found, n_rest;
    int32_t sequence, chain, n_copies;
    struct dsc_kv_copy copy;

    for (int64_t t = 0; t < n; t++)
        tokens[t] = token;
    CHECK_STATUS(dsc_kv_add(single->pool, 1, &sequence), DSC_OK);
    CHECK_STATUS(dsc_kv_prefixes_begin(single->prefixes, &sequence, NULL, 0, &chain), DSC_OK);
    CHECK_STATUS(dsc_kv_prefixes_take(single->prefixes, chain, n, tokens, &found), DSC_OK);
    n_rest = n - found;
    CHECK_STATUS(dsc_kv_grow(single->pool, 1, &sequence, &n_rest, &copy, &n_copies), DSC_OK);
    CHECK_STATUS(dsc_kv_prefixes_note(single->prefixes, chain, n, tokens), DSC_OK);
    CHECK_STATUS(dsc_kv_drop(single->pool, 1, &sequence), DSC_OK);
    CHECK_STATUS(dsc_kv_prefixes_end(single->prefixes, chain), DSC_OK);
    return found;
}

/* Four blocks hold two sequences of two. A third takes the blocks of the one that was used less recently. */
static void test_blocks_leave_in_the_order_of_last_use(void)
{
    struct single single = open_single(4);
    struct dsc_kv_prefix_counts counts;

    TEST_CASE("order of last use");
    CHECK_EQ(run_and_end(&single, 1, 32), 0);
    CHECK_EQ(run_and_end(&single, 2, 32), 0);
    CHECK_EQ(run_and_end(&single, 1, 32), 16); /* the last token is computed, and its block with it */
    CHECK_EQ(run_and_end(&single, 3, 32), 0);
    CHECK_EQ(run_and_end(&single, 1, 32), 16);
    CHECK_EQ(run_and_end(&single, 2, 32), 0);
    dsc_kv_prefixes_count(single.prefixes, &counts);
    CHECK_EQ(counts.n_chains, 0);
    CHECK(counts.n_nodes <= 4 + 4 + 1);
    close_single(&single);
}

/* A sequence that is cut within a block, whose tokens others may ask for, writes to a copy. */
static void test_a_kept_block_is_not_written(void)
{
    struct single single = open_single(3);
    struct dsc_kv_copy copy;
    int32_t sequence, chain, n_copies = 0, before, after;
    int64_t tokens[16] = {0}, n = 16, cut = 3, one = 1;

    TEST_CASE("cut within a kept block");
    CHECK_STATUS(dsc_kv_add(single.pool, 1, &sequence), DSC_OK);
    CHECK_STATUS(dsc_kv_prefixes_begin(single.prefixes, &sequence, "x", 1, &chain), DSC_OK);
    CHECK_STATUS(dsc_kv_grow(single.pool, 1, &sequence, &n, &copy, &n_copies), DSC_OK);
    CHECK_STATUS(dsc_kv_prefixes_note(single.prefixes, chain, n, tokens), DSC_OK);
    CHECK_STATUS(dsc_kv_tables(single.pool, 1, &sequence, 1, &before), DSC_OK);
    CHECK_STATUS(dsc_kv_cut(single.pool, 1, &sequence, &cut), DSC_OK);
    CHECK_STATUS(dsc_kv_grow(single.pool, 1, &sequence, &one, &copy, &n_copies), DSC_OK);
    CHECK_STATUS(dsc_kv_tables(single.pool, 1, &sequence, 1, &after), DSC_OK);
    CHECK_EQ(n_copies, 1);
    CHECK_EQ(copy.from, before);
    CHECK_EQ(copy.to, after);
    CHECK(before != after);
    close_single(&single);
}

static void test_wrong_calls(void)
{
    struct single single = open_single(3);
    struct dsc_kv_prefixes *other;
    int64_t window = 0, negative = -1, token = 0, found;
    int32_t sequence = 7, chain;

    TEST_CASE("wrong calls");
    CHECK_ERROR(dsc_kv_prefixes_open(1, &single.pool, &window, 0, &other), DSC_ESTATE, "already");
    CHECK_ERROR(dsc_kv_prefixes_open(0, &single.pool, &window, 0, &other), DSC_EINVAL, "n_pools is 0");
    CHECK_ERROR(dsc_kv_prefixes_open(1, &single.pool, &negative, 0, &other), DSC_EINVAL, "windows[0]");
    CHECK_ERROR(dsc_kv_prefixes_begin(single.prefixes, &sequence, NULL, 0, &chain), DSC_EINVAL, "no sequence");
    CHECK_ERROR(dsc_kv_prefixes_end(single.prefixes, 0), DSC_EINVAL, "chain is 0");
    CHECK_ERROR(dsc_kv_prefixes_take(single.prefixes, -1, 1, &token, &found), DSC_EINVAL, "chain is -1");
    CHECK_STATUS(dsc_kv_add(single.pool, 1, &sequence), DSC_OK);
    CHECK_STATUS(dsc_kv_prefixes_begin(single.prefixes, &sequence, NULL, 0, &chain), DSC_OK);
    CHECK_ERROR(dsc_kv_prefixes_note(single.prefixes, chain, -1, &token), DSC_EINVAL, "n_tokens is -1");
    CHECK_ERROR(dsc_kv_prefixes_take(single.prefixes, chain, -1, &token, &found), DSC_EINVAL, "n_tokens is -1");
    CHECK_ERROR(dsc_kv_prefixes_find(single.prefixes, NULL, 0, -1, &token, &found), DSC_EINVAL, "n_tokens is -1");
    CHECK_STATUS(dsc_kv_prefixes_take(single.prefixes, chain, 0, &token, &found), DSC_OK);
    CHECK_EQ(found, 0);
    close_single(&single);
    dsc_kv_prefixes_close(NULL);
}

int main(void)
{
    test_against_a_naive_model(150);
    test_blocks_leave_in_the_order_of_last_use();
    test_a_kept_block_is_not_written();
    test_wrong_calls();
    return test_finish(__FILE__);
}
