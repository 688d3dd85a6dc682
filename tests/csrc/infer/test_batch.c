/* infer/batch.c against a naive model: each token by itself, and a pool that gives the blocks. */
#include "test.h"

#include "dsc/infer.h"

#define MAX_ROWS 9
#define MAX_LENGTH 70
#define MAX_BATCH (MAX_ROWS * MAX_LENGTH)
#define UNTOUCHED (-7)

struct example {
    int32_t n_rows;
    int64_t n_seen[MAX_ROWS];
    int64_t n_new[MAX_ROWS];
    int64_t tokens[MAX_BATCH];
    int64_t n_words;
};

/* Token by token: where it stands, and whether the vocabulary has it. */
static void check_places(const struct example *example)
{
    static int64_t positions[MAX_BATCH + 1];
    int64_t last[MAX_ROWS + 1];
    int64_t n_keys[MAX_ROWS + 1];
    struct dsc_kv_batch batch = {example->n_rows, example->n_seen, example->n_new};
    struct dsc_kv_batch_places places = {positions, last, n_keys};
    struct dsc_kv_wrong_token wrong;
    int64_t wrong_index = -1;
    int32_t wrong_row = -1;
    int64_t n_tokens = 0;

    for (int64_t i = 0; i <= MAX_BATCH; i++)
        positions[i] = UNTOUCHED;
    for (int32_t i = 0; i <= MAX_ROWS; i++)
        last[i] = n_keys[i] = UNTOUCHED;
    dsc_kv_batch_place(&batch, example->tokens, example->n_words, &places, &wrong);
    for (int32_t row = 0; row < example->n_rows; row++) {
        int64_t length = example->n_seen[row];

        for (int64_t i = 0; i < example->n_new[row]; i++, length++, n_tokens++) {
            bool is_word = example->tokens[n_tokens] >= 0 && example->tokens[n_tokens] < example->n_words;

            CHECK_EQ(positions[n_tokens], length);
            if (!is_word && wrong_index < 0) {
                wrong_index = n_tokens;
                wrong_row = row;
            }
        }
        CHECK_EQ(last[row], n_tokens - 1);
        CHECK_EQ(n_keys[row], length);
    }
    CHECK_EQ(positions[n_tokens], UNTOUCHED);
    CHECK_EQ(last[example->n_rows], UNTOUCHED);
    CHECK_EQ(n_keys[example->n_rows], UNTOUCHED);
    CHECK_EQ(wrong.index, wrong_index);
    CHECK_EQ(wrong.row, wrong_row);
}

/* A pool that grows as the rows do takes as many blocks, and its tables fit the columns, but no fewer. */
static void check_counts(const struct example *example)
{
    static int32_t tables[MAX_ROWS * (2 * MAX_LENGTH / DSC_KV_TOKENS + 2)];
    struct dsc_kv_batch batch = {example->n_rows, example->n_seen, example->n_new};
    struct dsc_kv_pool *pool;
    struct dsc_kv_copy copies[MAX_ROWS];
    struct dsc_kv_counts before;
    struct dsc_kv_counts after;
    struct dsc_kv_batch_counts counts;
    int32_t sequences[MAX_ROWS];
    int32_t n_copies;
    int64_t n_tokens = 0;

    for (int32_t i = 0; i < example->n_rows; i++)
        n_tokens += example->n_new[i];
    CHECK_STATUS(dsc_kv_batch_count(&batch, INT32_MAX, &counts), DSC_OK);
    CHECK_EQ(counts.n_tokens, n_tokens);
    CHECK_EQ(counts.long_row, -1);
    CHECK_STATUS(dsc_kv_open(1000, &pool), DSC_OK);
    CHECK_STATUS(dsc_kv_add(pool, batch.n_rows, sequences), DSC_OK);
    CHECK_STATUS(dsc_kv_grow(pool, batch.n_rows, sequences, batch.n_seen, copies, &n_copies), DSC_OK);
    dsc_kv_count(pool, &before);
    CHECK_STATUS(dsc_kv_grow(pool, batch.n_rows, sequences, batch.n_new, copies, &n_copies), DSC_OK);
    dsc_kv_count(pool, &after);
    CHECK_EQ(counts.n_blocks, before.n_free - after.n_free);
    CHECK_STATUS(dsc_kv_tables(pool, batch.n_rows, sequences, counts.n_columns, tables), DSC_OK);
    if (counts.n_columns > 0)
        CHECK_ERROR(dsc_kv_tables(pool, batch.n_rows, sequences, counts.n_columns - 1, tables), DSC_EINVAL, "columns");
    dsc_kv_close(pool);
}

/* The first row beyond a limit, and the counts of the rows before it. */
static void check_limit(const struct example *example, int64_t max_tokens)
{
    struct dsc_kv_batch batch = {example->n_rows, example->n_seen, example->n_new};
    struct dsc_kv_batch_counts counts;
    struct dsc_kv_batch_counts expected;
    int32_t row = 0;

    while (row < batch.n_rows && batch.n_seen[row] + batch.n_new[row] <= max_tokens)
        row++;
    CHECK_STATUS(dsc_kv_batch_count(&batch, max_tokens, &counts), DSC_OK);
    CHECK_EQ(counts.long_row, row < batch.n_rows ? row : -1);
    batch.n_rows = row;
    CHECK_STATUS(dsc_kv_batch_count(&batch, INT32_MAX, &expected), DSC_OK);
    CHECK_EQ(counts.n_tokens, expected.n_tokens);
    CHECK_EQ(counts.n_blocks, expected.n_blocks);
    CHECK_EQ(counts.n_columns, expected.n_columns);
}

static void test_against_a_naive_model(void)
{
    static const int64_t lengths[] = {0, 1, 2, 15, 16, 17, 31, 32, 33, MAX_LENGTH};
    static struct example example;
    uint64_t random = 5;

    for (int round = 0; round < 4000; round++) {
        int64_t n_tokens = 0;

        TEST_CASE("round %d", round);
        example.n_rows = (int32_t)test_below(&random, MAX_ROWS + 1);
        example.n_words = 1 + test_below(&random, 50);
        for (int32_t i = 0; i < example.n_rows; i++) {
            example.n_seen[i] = lengths[test_below(&random, sizeof lengths / sizeof *lengths)];
            example.n_new[i] =
                test_below(&random, 2) == 0 ? 1 : lengths[test_below(&random, sizeof lengths / sizeof *lengths)];
            n_tokens += example.n_new[i];
        }
        for (int64_t i = 0; i < n_tokens; i++)
            example.tokens[i] = test_below(&random, example.n_words);
        for (int64_t n_wrong = n_tokens > 0 ? test_below(&random, 3) : 0; n_wrong > 0; n_wrong--) {
            static const int64_t strange[] = {-1, INT64_MIN, INT64_MAX};
            int64_t which = test_below(&random, 4);

            example.tokens[test_below(&random, n_tokens)] = which < 3 ? strange[which] : example.n_words;
        }
        check_places(&example);
        check_counts(&example);
        check_limit(&example, test_below(&random, 2 * MAX_LENGTH));
    }
}

static void test_numbers_at_their_ends(void)
{
    int64_t n_seen[2] = {3, 0};
    int64_t n_new[2] = {1, INT64_MAX};
    struct dsc_kv_batch batch = {2, n_seen, n_new};
    struct dsc_kv_batch_counts counts = {.n_tokens = UNTOUCHED};

    TEST_CASE("a row that no number counts");
    CHECK_STATUS(dsc_kv_batch_count(&batch, INT32_MAX, &counts), DSC_OK);
    CHECK_EQ(counts.long_row, 1);
    CHECK_EQ(counts.n_tokens, 1);
    n_seen[1] = INT64_MAX;
    CHECK_STATUS(dsc_kv_batch_count(&batch, 0, &counts), DSC_OK);
    CHECK_EQ(counts.long_row, 0);
    n_seen[1] = 0;
    n_new[1] = INT32_MAX;
    CHECK_STATUS(dsc_kv_batch_count(&batch, INT32_MAX, &counts), DSC_OK);
    CHECK_EQ(counts.long_row, -1);
    CHECK_EQ(counts.n_tokens, (int64_t)INT32_MAX + 1);
    CHECK_EQ(counts.n_columns, (int64_t)1 << 27);

    TEST_CASE("wrong numbers");
    counts.n_tokens = UNTOUCHED;
    n_new[1] = -1;
    CHECK_ERROR(dsc_kv_batch_count(&batch, INT32_MAX, &counts), DSC_EINVAL, "row 1 has -1 new tokens behind 0");
    n_new[1] = 1;
    n_seen[0] = -2;
    CHECK_ERROR(dsc_kv_batch_count(&batch, INT32_MAX, &counts), DSC_EINVAL, "row 0 has 1 new tokens behind -2");
    n_seen[0] = 2;
    CHECK_ERROR(dsc_kv_batch_count(&batch, -1, &counts), DSC_EINVAL, "max_tokens is -1");
    CHECK_ERROR(dsc_kv_batch_count(&batch, (int64_t)INT32_MAX + 1, &counts), DSC_EINVAL, "max_tokens is 2147483648");
    batch.n_rows = -1;
    CHECK_ERROR(dsc_kv_batch_count(&batch, INT32_MAX, &counts), DSC_EINVAL, "n_rows is -1");
    CHECK_EQ(counts.n_tokens, UNTOUCHED);
}

int main(void)
{
    test_against_a_naive_model();
    test_numbers_at_their_ends();
    return test_finish(__FILE__);
}
