/* seq/heads.c: every rank's heads and exchanges, counted head by head, and refused arguments. */
#include "test.h"

#include "dsc/seq.h"

#define MAX_HEADS 64
#define MAX_RANKS 16

static void expect(int64_t n_heads, int64_t n_key_heads, int32_t n_ranks, const int64_t (*expected)[5])
{
    for (int32_t rank = 0; rank < n_ranks; rank++) {
        struct dsc_seq_heads heads = {0};

        TEST_CASE("%d over %d heads, rank %d of %d", (int)n_heads, (int)n_key_heads, (int)rank, (int)n_ranks);
        CHECK_STATUS(dsc_seq_heads_of(n_heads, n_key_heads, n_ranks, rank, &heads), DSC_OK);
        CHECK_EQ(heads.query_begin, expected[rank][0]);
        CHECK_EQ(heads.query_end, expected[rank][1]);
        CHECK_EQ(heads.key_begin, expected[rank][2]);
        CHECK_EQ(heads.key_end, expected[rank][3]);
        CHECK_EQ(heads.group, expected[rank][4]);
    }
}

static void test_by_hand(void)
{
    expect(8, 8, 4, (const int64_t[][5]){{0, 2, 0, 2, 1}, {2, 4, 2, 4, 1}, {4, 6, 4, 6, 1}, {6, 8, 6, 8, 1}});
    expect(8, 2, 4, (const int64_t[][5]){{0, 2, 0, 1, 2}, {2, 4, 0, 1, 2}, {4, 6, 1, 2, 2}, {6, 8, 1, 2, 2}});
    expect(8, 4, 2, (const int64_t[][5]){{0, 4, 0, 2, 2}, {4, 8, 2, 4, 2}});
    expect(8, 4, 3, (const int64_t[][5]){{0, 3, 0, 2, 1}, {3, 6, 1, 3, 1}, {6, 8, 3, 4, 2}});
    expect(12, 2, 3, (const int64_t[][5]){{0, 4, 0, 1, 4}, {4, 8, 0, 2, 2}, {8, 12, 1, 2, 4}});
    expect(5, 1, 3, (const int64_t[][5]){{0, 2, 0, 1, 2}, {2, 4, 0, 1, 2}, {4, 5, 0, 1, 1}});
}

/*
 * Every query head lies on exactly one rank, together with its key head. The ranks' counts differ by one at most.
 * Groups name the right key head.
 */
static void check_heads(int64_t n_heads, int64_t n_key_heads, int32_t n_ranks)
{
    int64_t next = 0;
    int64_t least = INT64_MAX;
    int64_t most = 0;

    for (int32_t rank = 0; rank < n_ranks; rank++) {
        struct dsc_seq_heads heads = {-1, -1, -1, -1, -1};
        int64_t keys[MAX_HEADS];
        int64_t n;

        TEST_CASE("%d over %d heads, rank %d of %d", (int)n_heads, (int)n_key_heads, (int)rank, (int)n_ranks);
        CHECK_STATUS(dsc_seq_heads_of(n_heads, n_key_heads, n_ranks, rank, &heads), n_heads < n_ranks ? DSC_EINVAL : DSC_OK);
        if (n_heads < n_ranks) {
            CHECK_EQ(heads.query_begin, -1);
            continue;
        }
        n = heads.query_end - heads.query_begin;
        CHECK_EQ(heads.query_begin, next);
        CHECK(n > 0 && heads.group > 0 && n % heads.group == 0);
        CHECK_STATUS(dsc_seq_keys_of(n_heads, n_key_heads, n_ranks, rank, MAX_HEADS, keys), DSC_OK);
        for (int64_t i = 0; i < n; i++) /* the definition of grouped attention */
            CHECK_EQ(heads.key_begin + keys[i / heads.group], (heads.query_begin + i) * n_key_heads / n_heads);
        for (int64_t larger = heads.group + 1; larger <= n; larger++) { /* no larger group would do */
            bool is_good = n % larger == 0;

            for (int64_t i = 0; i < n && is_good; i++)
                is_good = (heads.query_begin + i) * n_key_heads / n_heads ==
                          (heads.query_begin + i / larger * larger) * n_key_heads / n_heads;
            CHECK(!is_good);
        }
        CHECK_EQ(heads.key_begin + keys[0], heads.key_begin);
        CHECK_EQ(heads.key_begin + keys[n / heads.group - 1], heads.key_end - 1);
        CHECK_ERROR(dsc_seq_keys_of(n_heads, n_key_heads, n_ranks, rank, n / heads.group - 1, keys), DSC_EINVAL, "do not fit");
        next = heads.query_end;
        least = n < least ? n : least;
        most = n > most ? n : most;
    }
    CHECK(n_heads < n_ranks || (next == n_heads && most - least <= 1));
}

static void test_all(void)
{
    for (int64_t n_key_heads = 1; n_key_heads <= 8; n_key_heads++)
        for (int64_t group = 1; group <= 8; group++)
            for (int32_t n_ranks = 1; n_ranks <= MAX_RANKS; n_ranks++)
                check_heads(n_key_heads * group, n_key_heads, n_ranks);
}

/*
 * Checks the exchanged amounts by counting: each head of a token goes to each rank that computes this head or attends
 * to it.
 */
static void test_exchange(void)
{
    const struct dsc_seq_widths widths = {24, 7};
    uint64_t random = 9;

    for (int round = 0; round < 200; round++) {
        int64_t n_key_heads = 1 + test_below(&random, 6);
        int64_t group = 1 + test_below(&random, 6);
        int64_t n_heads = n_key_heads * group;
        int32_t n_ranks = (int32_t)(1 + test_below(&random, n_heads < MAX_RANKS ? n_heads : MAX_RANKS));
        int64_t tokens[MAX_RANKS];
        int64_t numbers[MAX_RANKS][4][MAX_RANKS];
        bool computes[MAX_RANKS][MAX_HEADS] = {{false}};

        TEST_CASE("round %d: %d x %d heads, %d ranks", round, (int)n_key_heads, (int)group, (int)n_ranks);
        for (int32_t rank = 0; rank < n_ranks; rank++)
            tokens[rank] = test_below(&random, 5);
        for (int32_t rank = 0; rank < n_ranks; rank++) {
            struct dsc_seq_heads heads;

            CHECK_STATUS(dsc_seq_heads_of(n_heads, n_key_heads, n_ranks, rank, &heads), DSC_OK);
            for (int64_t head = heads.query_begin; head < heads.query_end; head++)
                computes[rank][head] = true;
            CHECK_STATUS(dsc_seq_exchange_of(n_heads, n_key_heads, &widths, tokens, n_ranks, rank, numbers[rank][0], numbers[rank][1],
                                             numbers[rank][2], numbers[rank][3]),
                         DSC_OK);
        }
        for (int32_t from = 0; from < n_ranks; from++)
            for (int32_t to = 0; to < n_ranks; to++) {
                int64_t sent = 0;
                int64_t returned = 0;

                for (int64_t head = 0; head < n_heads; head++) {
                    sent += computes[to][head] ? tokens[from] * widths.query : 0;
                    returned += computes[from][head] ? tokens[to] * widths.value : 0;
                }
                for (int64_t key = 0; key < n_key_heads; key++) {
                    bool is_needed = false;

                    for (int64_t head = key * group; head < (key + 1) * group; head++)
                        is_needed |= computes[to][head];
                    sent += is_needed ? tokens[from] * (widths.query + widths.value) : 0;
                }
                CHECK_EQ(numbers[from][0][to], sent);
                CHECK_EQ(numbers[to][1][from], sent);
                CHECK_EQ(numbers[from][2][to], returned);
                CHECK_EQ(numbers[to][3][from], returned);
            }
    }
}

static void test_bad_input(void)
{
    struct dsc_seq_heads heads = {.group = -7};
    struct dsc_seq_widths widths = {64, 64};
    int64_t tokens[2] = {5, DSC_SEQ_MAX_TOKENS};
    int64_t sent[2] = {-7, -7};

    CHECK_ERROR(dsc_seq_heads_of(8, 3, 2, 0, &heads), DSC_EINVAL, "8 query heads do not divide among 3");
    CHECK_ERROR(dsc_seq_heads_of(8, 0, 2, 0, &heads), DSC_EINVAL, "0 key heads");
    CHECK_ERROR(dsc_seq_heads_of(0, 1, 2, 0, &heads), DSC_EINVAL, "0 query heads");
    CHECK_ERROR(dsc_seq_heads_of(3, 1, 4, 0, &heads), DSC_EINVAL, "3 query heads for 4 ranks");
    CHECK_ERROR(dsc_seq_heads_of(4, 1, 4, 4, &heads), DSC_EINVAL, "rank is 4");
    CHECK_ERROR(dsc_seq_heads_of(4, 1, 0, 0, &heads), DSC_EINVAL, "n_ranks is 0");
    CHECK_ERROR(dsc_seq_heads_of(4, 1, 1, 0, NULL), DSC_EINVAL, "out_heads");
    CHECK_ERROR(dsc_seq_keys_of(4, 1, 1, 0, 4, NULL), DSC_EINVAL, "out_keys");
    CHECK_ERROR(dsc_seq_exchange_of(4, 4, NULL, tokens, 2, 0, sent, NULL, NULL, NULL), DSC_EINVAL, "widths");
    CHECK_ERROR(dsc_seq_exchange_of(4, 4, &widths, NULL, 2, 0, sent, NULL, NULL, NULL), DSC_EINVAL, "tokens");
    widths.value = -1;
    CHECK_ERROR(dsc_seq_exchange_of(4, 4, &widths, tokens, 2, 0, sent, NULL, NULL, NULL), DSC_EINVAL, "negative");
    widths.value = INT64_MAX / 4;
    CHECK_ERROR(dsc_seq_exchange_of(4, 4, &widths, tokens, 2, 0, sent, NULL, NULL, NULL), DSC_EOVERFLOW, "int64_t");
    widths.value = 64;
    tokens[1] = -1;
    CHECK_ERROR(dsc_seq_exchange_of(4, 4, &widths, tokens, 2, 0, sent, NULL, NULL, NULL), DSC_EINVAL, "tokens[1] is -1");
    CHECK(heads.group == -7 && sent[0] == -7);
}

int main(void)
{
    test_by_hand();
    test_all();
    test_exchange();
    test_bad_input();
    return test_finish(__FILE__);
}
