/* zero/balance.c against a literal reading of LPT (pick the largest unassigned item again and again), Graham's bound, and the true optimum of small cases. */
#include "test.h"

#include "dsc/zero.h"

#define MAX_ITEMS 80
#define MAX_RANKS 9

static int64_t largest_load(const int64_t *costs, int64_t n_items, const int32_t *rank_of, int32_t n_ranks)
{
    int64_t loads[MAX_RANKS] = {0};
    int64_t largest = 0;

    for (int64_t i = 0; i < n_items; i++)
        loads[rank_of[i]] += costs[i];
    for (int32_t r = 0; r < n_ranks; r++)
        largest = loads[r] > largest ? loads[r] : largest;
    return largest;
}

static void literal_lpt(const int64_t *costs, int64_t n_items, int32_t n_ranks, int32_t *rank_of)
{
    int64_t loads[MAX_RANKS] = {0};

    for (int64_t i = 0; i < n_items; i++)
        rank_of[i] = -1;
    for (int64_t round = 0; round < n_items; round++) {
        int64_t item = -1;
        int32_t least = 0;

        for (int64_t i = 0; i < n_items; i++)
            if (rank_of[i] < 0 && (item < 0 || costs[i] > costs[item]))
                item = i;
        for (int32_t r = 1; r < n_ranks; r++)
            if (loads[r] < loads[least])
                least = r;
        rank_of[item] = least;
        loads[least] += costs[item];
    }
}

static int64_t optimum(const int64_t *costs, int64_t n_items, int32_t n_ranks)
{
    int32_t rank_of[MAX_ITEMS] = {0};
    int64_t best = INT64_MAX;

    for (;;) { /* counts in base n_ranks */
        int64_t i = 0;
        int64_t load = largest_load(costs, n_items, rank_of, n_ranks);

        best = load < best ? load : best;
        while (i < n_items && ++rank_of[i] == n_ranks)
            rank_of[i++] = 0;
        if (i == n_items)
            return best;
    }
}

static void check_assign(const int64_t *costs, int64_t n_items, int32_t n_ranks, bool has_optimum)
{
    int64_t scratch[MAX_ITEMS + MAX_RANKS + 1];
    int32_t got[MAX_ITEMS + 1];
    int32_t wanted[MAX_ITEMS];

    scratch[n_items + n_ranks] = -77;
    got[n_items] = -77;
    CHECK_STATUS(dsc_balance_assign(costs, n_items, n_ranks, scratch, got), DSC_OK);
    CHECK_EQ(scratch[n_items + n_ranks], -77);
    CHECK_EQ(got[n_items], -77);
    literal_lpt(costs, n_items, n_ranks, wanted);
    for (int64_t i = 0; i < n_items; i++)
        CHECK_EQ(got[i], wanted[i]);
    if (has_optimum) /* load <= (4/3 - 1/(3 m)) optimum, in integers */
        CHECK(3 * n_ranks * largest_load(costs, n_items, got, n_ranks) <= (4 * n_ranks - 1) * optimum(costs, n_items, n_ranks));
}

int main(void)
{
    uint64_t random = 11;

    for (int round = 0; round < 600; round++) {
        int64_t costs[MAX_ITEMS];
        bool is_small = round % 2 == 0;
        int64_t n_items = 1 + test_below(&random, is_small ? 8 : MAX_ITEMS);
        int32_t n_ranks = (int32_t)(1 + test_below(&random, is_small ? 3 : MAX_RANKS));
        int64_t limit = round % 5 == 0 ? 3 : 1000; /* many equal costs, some zero */

        for (int64_t i = 0; i < n_items; i++)
            costs[i] = test_below(&random, limit);
        TEST_CASE("round %d: %d items, %d ranks", round, (int)n_items, (int)n_ranks);
        check_assign(costs, n_items, n_ranks, is_small);
    }

    int64_t scratch[8];
    int32_t rank_of[3] = {-7, -7, -7};
    const int64_t negative[] = {1, -1, 2};
    const int64_t huge[] = {INT64_MAX, 1, 1};

    TEST_CASE("errors");
    CHECK_STATUS(dsc_balance_assign(NULL, 0, 3, NULL, NULL), DSC_OK);
    CHECK_ERROR(dsc_balance_assign(negative, 3, 2, scratch, rank_of), DSC_EINVAL, "costs[1]");
    CHECK_ERROR(dsc_balance_assign(huge, 3, 2, scratch, rank_of), DSC_EOVERFLOW, "2 costs");
    CHECK_ERROR(dsc_balance_assign(huge, -1, 2, scratch, rank_of), DSC_EINVAL, "n_items");
    CHECK_ERROR(dsc_balance_assign(huge, 1, 0, scratch, rank_of), DSC_EINVAL, "n_ranks");
    CHECK_ERROR(dsc_balance_assign(NULL, 1, 1, scratch, rank_of), DSC_EINVAL, "costs");
    CHECK_ERROR(dsc_balance_assign(huge, 1, 1, NULL, rank_of), DSC_EINVAL, "scratch");
    CHECK_ERROR(dsc_balance_assign(huge, 1, 1, scratch, NULL), DSC_EINVAL, "out_rank_of");
    CHECK_EQ(rank_of[0], -7);
    return test_finish(__FILE__);
}
