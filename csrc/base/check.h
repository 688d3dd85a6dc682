/* Argument checks that several cores share. */
#ifndef DSC_BASE_CHECK_H
#define DSC_BASE_CHECK_H

#include "dsc/status.h"

#include <stdint.h>

/* Checks that 0 <= rank < n_ranks. */
dsc_status dsc_check_rank(int32_t n_ranks, int32_t rank);

/* Checks rank as above, that key heads divide the query heads, and that each rank gets a query head. */
dsc_status dsc_check_shared_heads(int64_t n_heads, int64_t n_key_heads, int32_t n_ranks, int32_t rank);

#endif
