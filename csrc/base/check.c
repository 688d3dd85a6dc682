/* Checks of arguments that several cores take. */
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
