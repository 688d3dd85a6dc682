/* Argument checks that several cores share. */
#ifndef DSC_BASE_CHECK_H
#define DSC_BASE_CHECK_H

#include "dsc/status.h"

#include <stdint.h>

/* Checks that 0 <= rank < n_ranks. */
dsc_status dsc_check_rank(int32_t n_ranks, int32_t rank);

/* Checks rank as above, that key heads divide the query heads, and that each rank gets a query head. */
dsc_status dsc_check_shared_heads(int64_t n_heads, int64_t n_key_heads, int32_t n_ranks, int32_t rank);

/*
 * Checks the sizes of a product of n_rows rows with n_outputs others, all of n_cols elements: none is negative, and the
 * bytes of each operand and of the result, in f32, can be counted. `outputs` names the others for the error.
 */
dsc_status dsc_check_product(int64_t n_rows, int64_t n_cols, int64_t n_outputs, const char *outputs);

#endif
