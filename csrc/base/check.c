/* Argument checks that several cores share. */
#include "base/check.h"

#include "base/fail.h"

dsc_status dsc_check_rank(int32_t n_ranks, int32_t rank)
{
    if (n_ranks < 1)
        return dsc_fail(DSC_EINVAL, "n_ranks is %d, must be at least 1", (int)n_ranks);
    if (rank < 0 || rank >= n_ranks)
        return dsc_fail(DSC_EINVAL, "rank is %d, must be 0 to %d", (int)rank, (int)n_ranks - 1);
    return DSC_OK;
}

dsc_status dsc_check_shared_heads(int64_t n_heads, int64_t n_key_heads, int32_t n_ranks, int32_t rank)
{
    DSC_TRY(dsc_check_rank(n_ranks, rank));
    if (n_key_heads < 1 || n_heads < 1 || n_heads % n_key_heads != 0)
        return dsc_fail(DSC_EINVAL, "%lld query heads do not divide among %lld key heads", (long long)n_heads,
                        (long long)n_key_heads);
    if (n_heads < n_ranks)
        return dsc_fail(DSC_EINVAL, "%lld query heads for %d ranks: each needs one", (long long)n_heads, (int)n_ranks);
    return DSC_OK;
}

dsc_status dsc_check_product(int64_t n_rows, int64_t n_cols, int64_t n_outputs, const char *outputs)
{
    const int64_t most = INT64_MAX / (int64_t)sizeof(float);
    int64_t n_elems;

    if (n_rows < 0 || n_cols < 0 || n_outputs < 0)
        return dsc_fail(DSC_EINVAL, "%lld rows of %lld elements, %lld %s: none may be negative", (long long)n_rows,
                        (long long)n_cols, (long long)n_outputs, outputs);
    if (__builtin_mul_overflow(n_rows, n_cols, &n_elems) || n_elems > most ||
        __builtin_mul_overflow(n_outputs, n_cols, &n_elems) || n_elems > most ||
        __builtin_mul_overflow(n_rows, n_outputs, &n_elems) || n_elems > most)
        return dsc_fail(DSC_EOVERFLOW, "%lld rows of %lld elements, %lld %s: more bytes than int64_t counts",
                        (long long)n_rows, (long long)n_cols, (long long)n_outputs, outputs);
    return DSC_OK;
}
