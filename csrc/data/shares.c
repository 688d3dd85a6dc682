/* The positions of an epoch that each rank reads in each round. */
#include "dsc/data.h"

#include "base/fail.h"

static dsc_status check(const struct dsc_shares *shares, int64_t position, int64_t *out_round)
{
    if (shares->n_samples < 0 || shares->n_ranks < 1 || shares->batch < 1)
        return dsc_fail(DSC_EINVAL,
                        "%lld samples, %lld ranks, batches of %lld: samples may not be negative, the others are at "
                        "least 1",
                        (long long)shares->n_samples, (long long)shares->n_ranks, (long long)shares->batch);
    if (position < 0)
        return dsc_fail(DSC_EINVAL, "position is %lld, must not be negative", (long long)position);
    if (__builtin_mul_overflow(shares->n_ranks, shares->batch, out_round) || *out_round > INT64_MAX / 2)
        return dsc_fail(DSC_EOVERFLOW, "%lld ranks with batches of %lld read more samples than int64_t counts",
                        (long long)shares->n_ranks, (long long)shares->batch);
    return DSC_OK;
}

dsc_status dsc_shares_rounds(const struct dsc_shares *shares, int64_t position, int64_t *out_n_rounds)
{
    int64_t round = 0;
    int64_t left;

    DSC_TRY(check(shares, position, &round));
    left = position < shares->n_samples ? shares->n_samples - position : 0;
    *out_n_rounds = left / round + (!shares->drop_last && left % round != 0);
    return DSC_OK;
}

dsc_status dsc_shares_round(const struct dsc_shares *shares, int64_t position, int64_t rank, int64_t *out_positions,
                            int64_t *out_n, int64_t *out_next)
{
    int64_t round = 0;
    int64_t left;
    int64_t each;

    DSC_TRY(check(shares, position, &round));
    if (rank < 0 || rank >= shares->n_ranks)
        return dsc_fail(DSC_EINVAL, "rank is %lld of %lld", (long long)rank, (long long)shares->n_ranks);
    left = position < shares->n_samples ? shares->n_samples - position : 0;
    if (left == 0 || (left < round && shares->drop_last)) {
        *out_n = 0;
        *out_next = shares->n_samples;
        return DSC_OK;
    }
    each = left >= round ? shares->batch : left / shares->n_ranks + (left % shares->n_ranks != 0);
    for (int64_t i = 0; i < each; i++)
        out_positions[i] =
            (int64_t)(((uint64_t)position + (uint64_t)(i * shares->n_ranks + rank)) % (uint64_t)shares->n_samples);
    *out_n = each;
    *out_next = left >= round ? position + round : shares->n_samples;
    return DSC_OK;
}
