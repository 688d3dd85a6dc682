/* Whole items to ranks: longest processing time first (Graham 1969). */
#include "dsc/zero.h"

#include "base/fail.h"

/* The order in which items are given out: larger cost first, then lower index. Total, so that every sort gives the same result. */
static bool is_before(const int64_t *costs, int64_t a, int64_t b)
{
    return costs[a] != costs[b] ? costs[a] > costs[b] : a < b;
}

static void swap(int64_t *a, int64_t *b)
{
    int64_t saved = *a;

    *a = *b;
    *b = saved;
}

/* Restores the heap below root, whose top is the item that comes last. */
static void sift_down(const int64_t *costs, int64_t *order, int64_t root, int64_t n)
{
    for (int64_t child = 2 * root + 1; child < n; child = 2 * root + 1) {
        if (child + 1 < n && is_before(costs, order[child], order[child + 1]))
            child++;
        if (!is_before(costs, order[root], order[child]))
            return;
        swap(&order[root], &order[child]);
        root = child;
    }
}

/* Heap sort: no allocation, and no input makes it slow. */
static void sort_order(const int64_t *costs, int64_t *order, int64_t n)
{
    for (int64_t root = n / 2 - 1; root >= 0; root--)
        sift_down(costs, order, root, n);
    for (int64_t n_left = n - 1; n_left > 0; n_left--) {
        swap(&order[0], &order[n_left]);
        sift_down(costs, order, 0, n_left);
    }
}

static dsc_status check_costs(const int64_t *costs, int64_t n_items)
{
    int64_t total = 0;

    for (int64_t i = 0; i < n_items; i++) {
        if (costs[i] < 0)
            return dsc_fail(DSC_EINVAL, "costs[%lld] is %lld, must not be negative", (long long)i, (long long)costs[i]);
        if (__builtin_add_overflow(total, costs[i], &total))
            return dsc_fail(DSC_EOVERFLOW, "the first %lld costs do not add up in int64_t", (long long)(i + 1));
    }
    return DSC_OK;
}

dsc_status dsc_balance_assign(const int64_t *costs, int64_t n_items, int32_t n_ranks, int64_t *scratch, int32_t *out_rank_of)
{
    if (n_items < 0)
        return dsc_fail(DSC_EINVAL, "n_items is %lld, must not be negative", (long long)n_items);
    if (n_ranks < 1)
        return dsc_fail(DSC_EINVAL, "n_ranks is %d, must be at least 1", (int)n_ranks);
    if (n_items == 0)
        return DSC_OK;
    if (costs == NULL || scratch == NULL || out_rank_of == NULL)
        return dsc_fail(DSC_EINVAL, "%s is NULL for %lld items", costs == NULL ? "costs" : scratch == NULL ? "scratch" : "out_rank_of",
                        (long long)n_items);
    DSC_TRY(check_costs(costs, n_items));

    int64_t *order = scratch;
    int64_t *loads = scratch + n_items;

    for (int64_t i = 0; i < n_items; i++)
        order[i] = i;
    for (int32_t rank = 0; rank < n_ranks; rank++)
        loads[rank] = 0;
    sort_order(costs, order, n_items);
    for (int64_t i = 0; i < n_items; i++) {
        int32_t least = 0;

        for (int32_t rank = 1; rank < n_ranks; rank++) /* a plan is made once a run; a heap of ranks would need more scratch */
            if (loads[rank] < loads[least])
                least = rank;
        loads[least] += costs[order[i]];
        out_rank_of[order[i]] = least;
    }
    return DSC_OK;
}
