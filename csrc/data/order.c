/* A keyed permutation of any length: position of an epoch to sample. */
#include "dsc/data.h"

#include "base/fail.h"
#include "data/mixed.h"

/* Bits of the largest sample. */
static int32_t bits_of(int64_t n_samples)
{
    return n_samples > 1 ? 64 - __builtin_clzll((unsigned long long)n_samples - 1) : 0;
}

dsc_status dsc_order_init(struct dsc_order *order, int64_t n_samples, uint64_t seed, uint64_t epoch)
{
    /* Mixed one after the other: seed s in epoch e + 1 is not seed s + 1 in epoch e. */
    uint64_t state = dsc_mixed(dsc_mixed(seed + DSC_GOLDEN) + epoch);
    int32_t bits = bits_of(n_samples);

    if (n_samples < 0)
        return dsc_fail(DSC_EINVAL, "n_samples is %lld, must not be negative", (long long)n_samples);
    *order = (struct dsc_order){.n_samples = n_samples, .low_bits = bits - bits / 2, .high_bits = bits / 2};
    for (int32_t round = 0; round < DSC_ORDER_ROUNDS; round++)
        order->keys[round] = dsc_mixed(state += DSC_GOLDEN);
    return DSC_OK;
}

static uint64_t low_mask(int32_t bits)
{
    return ((uint64_t)1 << bits) - 1;
}

/* A permutation of the numbers of low_bits + high_bits bits: each round changes one half by a function of the other. */
static uint64_t network(const struct dsc_order *order, uint64_t x)
{
    uint64_t low = x & low_mask(order->low_bits);
    uint64_t high = x >> order->low_bits;

    for (int32_t round = 0; round < DSC_ORDER_ROUNDS; round += 2) {
        high ^= dsc_mixed(low ^ order->keys[round]) & low_mask(order->high_bits);
        low ^= dsc_mixed(high ^ order->keys[round + 1]) & low_mask(order->low_bits);
    }
    return high << order->low_bits | low;
}

dsc_status dsc_order_at(const struct dsc_order *order, int64_t n, const int64_t *positions, int64_t *samples)
{
    if (n < 0 || (n > 0 && (positions == NULL || samples == NULL)))
        return dsc_fail(DSC_EINVAL, "%lld positions, %s", (long long)n,
                        n < 0 ? "must not be negative" : "and positions or samples is NULL");
    for (int64_t i = 0; i < n; i++)
        if (positions[i] < 0 || positions[i] >= order->n_samples)
            return dsc_fail(DSC_EINVAL, "position %lld is not in an epoch of %lld samples", (long long)positions[i],
                            (long long)order->n_samples);
    for (int64_t i = 0; i < n; i++) {
        uint64_t x = (uint64_t)positions[i];

        do
            x = network(order, x);
        while (x >= (uint64_t)order->n_samples);
        samples[i] = (int64_t)x;
    }
    return DSC_OK;
}
