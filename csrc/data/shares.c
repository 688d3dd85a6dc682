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
    if (shares->run < 1 || shares->batch % shares->run != 0)
        return dsc_fail(DSC_EINVAL, "runs of %lld positions in batches of %lld: a run must divide the batch",
                        (long long)shares->run, (long long)shares->batch);
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

/* a / b, rounded up. a >= 1, b >= 1 */
static int64_t quotient_above(int64_t a, int64_t b)
{
    return (a - 1) / b + 1;
}

dsc_status dsc_shares_round(const struct dsc_shares *shares, int64_t position, int64_t rank, int64_t *out_positions,
                            int64_t *out_n, int64_t *out_next)
{
    int64_t run = shares->run;
    int64_t round = 0;
    int64_t left;
    int64_t n_runs;

    DSC_TRY(check(shares, position, &round));
    if (rank < 0 || rank >= shares->n_ranks)
        return dsc_fail(DSC_EINVAL, "rank is %lld of %lld", (long long)rank, (long long)shares->n_ranks);
    left = position < shares->n_samples ? shares->n_samples - position : 0;
    if (left == 0 || (left < round && shares->drop_last)) {
        *out_n = 0;
        *out_next = shares->n_samples;
        return DSC_OK;
    }
    n_runs = left >= round ? shares->batch / run : quotient_above(quotient_above(left, run), shares->n_ranks);
    for (int64_t k = 0; k < n_runs; k++)
        for (int64_t i = 0; i < run; i++) {
            uint64_t at = (uint64_t)position + (uint64_t)((k * shares->n_ranks + rank) * run + i);

            out_positions[k * run + i] = (int64_t)(at % (uint64_t)shares->n_samples);
        }
    *out_n = n_runs * run;
    *out_next = left >= round ? position + round : shares->n_samples;
    return DSC_OK;
}
