/* A part of a tensor (dsc/ckpt.h, dsc_reshape_plan) under names, and its check. */
#ifndef DSC_CKPT_PART_H
#define DSC_CKPT_PART_H

#include "dsc/status.h"

/* The numbers of the ABI under their names. */
struct dsc_part {
    const int64_t *start;
    const int64_t *size;
    int64_t begin;
    int64_t end; /* begin + n_elems */
};

static inline struct dsc_part dsc_part_at(const int64_t *numbers, int32_t n_dims)
{
    return (struct dsc_part){numbers, numbers + n_dims, numbers[2 * n_dims],
                             numbers[2 * n_dims] + numbers[2 * n_dims + 1]};
}

/*
 * DSC_EINVAL if n_dims or a size is out of range or shape is NULL; DSC_EOVERFLOW if the elements do not fit int64_t.
 * *out_n_elems: the elements.
 */
dsc_status dsc_shape_check(const int64_t *shape, int32_t n_dims, int64_t *out_n_elems);

/*
 * DSC_EINVAL if the part does not lie in the shape, which has been checked. index names the part in the sentence:
 * pieces[index], or the wanted part if it is below 0.
 */
dsc_status dsc_part_check(const int64_t *shape, int32_t n_dims, const int64_t *numbers, int64_t index);

#endif
