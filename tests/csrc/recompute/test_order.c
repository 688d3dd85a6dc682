/* recompute/order.c against an insertion sort that compares fractions by products of 128 bits alone. */
#include "test.h"

#include "recompute/front.h"

#define MAX_MOVES 400

static bool is_behind(const struct dsc_recompute_move *a, const struct dsc_recompute_move *b)
{
    __int128 x = (__int128)a->saved_ns * b->bytes;
    __int128 y = (__int128)b->saved_ns * a->bytes;

    if (x != y)
        return x < y;
    return a->group != b->group ? a->group > b->group : a->choice > b->choice;
}

/* transient_bytes numbers the moves, to show the order of moves that compare equal. */
static void check_order(struct dsc_recompute_move *moves, int64_t n_moves)
{
    static struct dsc_recompute_move expected[MAX_MOVES];
    struct dsc_recompute_place *places = test_alloc((size_t)(2 * n_moves + 1) * sizeof *places);
    struct dsc_recompute_move *spare = test_alloc((size_t)(n_moves + 1) * sizeof *spare);
    int64_t n_wrong = 0;

    for (int64_t i = 0; i < n_moves; i++) {
        struct dsc_recompute_move move = moves[i];
        int64_t j = i;

        for (; j > 0 && is_behind(&expected[j - 1], &move); j--)
            expected[j] = expected[j - 1];
        expected[j] = move;
    }
    dsc_recompute_sort_moves(moves, n_moves, places, spare);
    for (int64_t i = 0; i < n_moves; i++)
        n_wrong += moves[i].transient_bytes != expected[i].transient_bytes;
    CHECK_EQ(n_wrong, 0);
    free(places);
    free(spare);
}

static void test_against_an_insertion_sort(void)
{
    static const int64_t limits[] = {3, 1000, (int64_t)1 << 40, (int64_t)1 << 53, INT64_MAX};
    static struct dsc_recompute_move moves[MAX_MOVES];
    uint64_t random = 5;

    for (int round = 0; round < 1000; round++) {
        int64_t limit = limits[round % 5];
        int64_t n_moves = round % 20 < 2 ? round % 20 : test_below(&random, MAX_MOVES);

        for (int64_t i = 0; i < n_moves; i++)
            moves[i] = (struct dsc_recompute_move){
                .bytes = 1 + test_below(&random, limit),
                .saved_ns = 1 + test_below(&random, test_below(&random, 2) == 0 ? limit : 1000),
                .transient_bytes = i,
                .group = (int32_t)test_below(&random, 3),
                .choice = (int32_t)test_below(&random, 3),
            };
        TEST_CASE("round %d: %lld moves of numbers below %lld", round, (long long)n_moves, (long long)limit);
        check_order(moves, n_moves);
    }
}

/* Neighbouring fractions of large numbers. Doubles cannot tell these fractions apart. */
static void test_fractions_that_doubles_blur(void)
{
    static struct dsc_recompute_move moves[MAX_MOVES];

    for (int bits = 26; bits < 63; bits++) {
        int64_t large = (int64_t)1 << bits;

        for (int64_t i = 0; i < MAX_MOVES; i++)
            moves[i] = (struct dsc_recompute_move){
                .bytes = large - 1 - (i * 7) % 200,
                .saved_ns = large - 1 - (i * 11) % 201,
                .transient_bytes = i,
                .group = (int32_t)(i % 2),
            };
        TEST_CASE("numbers of %d bits", bits);
        check_order(moves, MAX_MOVES);
    }
}

int main(void)
{
    test_against_an_insertion_sort();
    test_fractions_that_doubles_blur();
    return test_finish(__FILE__);
}
