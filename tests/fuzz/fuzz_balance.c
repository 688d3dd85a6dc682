/* dsc_balance_assign: every item gets a rank, no load is more than the mean and the largest item together, and nothing outside the arrays is touched. */
#include "fuzz.h"

#include "dsc/zero.h"

#define MAX_ITEMS 64
#define MAX_RANKS 16

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes)
{
    struct input input = {data, n_bytes};
    bool is_wild = take_byte(&input) % 2 == 1;
    int64_t n_items = take_below(&input, MAX_ITEMS + 1);
    int32_t n_ranks = (int32_t)take_below(&input, MAX_RANKS + 1);
    int64_t costs[MAX_ITEMS] = {0};
    int32_t rank_of[MAX_ITEMS];
    int64_t loads[MAX_RANKS] = {0};
    int64_t *scratch = malloc((size_t)(n_items + n_ranks + 1) * sizeof *scratch);
    int64_t total = 0;
    int64_t largest = 0;

    REQUIRE(scratch != NULL);
    for (int64_t i = 0; i < n_items; i++)
        costs[i] = is_wild ? take_wild(&input) : take_below(&input, 1000);
    memset(rank_of, -1, sizeof rank_of);
    if (dsc_balance_assign(costs, n_items, n_ranks, scratch, rank_of) != DSC_OK) {
        REQUIRE(is_wild || n_ranks == 0);
        REQUIRE(n_items == 0 || rank_of[0] == -1);
        free(scratch);
        return 0;
    }
    for (int64_t i = 0; i < n_items; i++) {
        REQUIRE(rank_of[i] >= 0 && rank_of[i] < n_ranks);
        loads[rank_of[i]] += costs[i];
        total += costs[i];
        largest = costs[i] > largest ? costs[i] : largest;
    }
    for (int32_t rank = 0; rank < n_ranks; rank++) /* a rank got its last item when it was the least loaded */
        REQUIRE(loads[rank] - largest <= total / n_ranks);
    free(scratch);
    return 0;
}
