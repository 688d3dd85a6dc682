/* The samples of a training step, from pools of samples that are each in an order of its own. */
#include "dsc/data.h"

#include "base/fail.h"
#include "data/mixed.h"

static dsc_status check(int64_t n_pools, const int64_t *sizes, const int64_t *cursors, int64_t n, uint64_t *out_total)
{
    uint64_t total = 0;

    if (n_pools < 1 || n < 0)
        return dsc_fail(DSC_EINVAL, "%lld pools, %lld samples: pools are at least 1, samples not negative",
                        (long long)n_pools, (long long)n);
    for (int64_t i = 0; i < n_pools; i++) {
        if (sizes[i] < 1 || cursors[i] < 0 || cursors[i] > INT64_MAX - n)
            return dsc_fail(DSC_EINVAL, "pool %lld has %lld samples, of which %lld were drawn: none may be empty",
                            (long long)i, (long long)sizes[i], (long long)cursors[i]);
        total += (uint64_t)sizes[i];
        if (total > (uint64_t)INT64_MAX)
            return dsc_fail(DSC_EOVERFLOW, "the pools have more samples together than int64_t counts");
    }
    *out_total = total;
    return DSC_OK;
}

/* The pool of sample r of all pools, one after the other. */
static int64_t pool_of(const int64_t *sizes, uint64_t r)
{
    int64_t pool = 0;

    while (r >= (uint64_t)sizes[pool])
        r -= (uint64_t)sizes[pool++];
    return pool;
}

static uint64_t below(uint64_t bits, uint64_t n)
{
    return (uint64_t)((unsigned __int128)bits * n >> 64);
}

dsc_status dsc_draw(int64_t n_pools, const int64_t *sizes, int64_t *cursors, uint64_t seed, uint64_t step, int64_t n,
                    int64_t *out_pools, int64_t *out_indices)
{
    uint64_t key = dsc_mixed(dsc_mixed(seed ^ DSC_GOLDEN) + step);
    uint64_t total = 0;

    DSC_TRY(check(n_pools, sizes, cursors, n, &total));
    for (int64_t i = 0; i < n; i++) {
        int64_t pool = pool_of(sizes, below(dsc_mixed(key += DSC_GOLDEN), total));
        int64_t position = cursors[pool] % sizes[pool];
        struct dsc_order order;

        DSC_TRY(dsc_order_init(&order, sizes[pool], dsc_mixed(seed + (uint64_t)pool),
                               (uint64_t)(cursors[pool] / sizes[pool])));
        DSC_TRY(dsc_order_at(&order, 1, &position, &out_indices[i]));
        out_pools[i] = pool;
        cursors[pool]++;
    }
    return DSC_OK;
}
