/* Checks shapes, and parts of tensors against them. */
#include "ckpt/part.h"

#include "base/fail.h"
#include "dsc/ckpt.h"

#include <inttypes.h>
#include <stdio.h>

/* Elements of a box; 0 when a dimension is, however large the others are. */
static bool elems_overflow(const int64_t *size, int32_t n_dims, int64_t *out_n_elems)
{
    int64_t n_elems = 1;

    for (int32_t d = 0; d < n_dims; d++) {
        if (size[d] == 0) {
            *out_n_elems = 0;
            return false;
        }
    }
    for (int32_t d = 0; d < n_dims; d++)
        if (__builtin_mul_overflow(n_elems, size[d], &n_elems))
            return true;
    *out_n_elems = n_elems;
    return false;
}

dsc_status dsc_shape_check(const int64_t *shape, int32_t n_dims, int64_t *out_n_elems)
{
    if (n_dims < 0 || n_dims > DSC_RESHAPE_MAX_DIMS)
        return dsc_fail(DSC_EINVAL, "n_dims is %d, must be 0 to %d", (int)n_dims, DSC_RESHAPE_MAX_DIMS);
    if (shape == NULL && n_dims > 0)
        return dsc_fail(DSC_EINVAL, "shape is NULL");
    for (int32_t d = 0; d < n_dims; d++)
        if (shape[d] < 0)
            return dsc_fail(DSC_EINVAL, "shape[%d] is %" PRId64 ", must not be negative", (int)d, shape[d]);
    if (elems_overflow(shape, n_dims, out_n_elems))
        return dsc_fail(DSC_EOVERFLOW, "the elements of the shape do not fit int64_t");
    return DSC_OK;
}

dsc_status dsc_part_check(const int64_t *shape, int32_t n_dims, const int64_t *numbers, int64_t index)
{
    const int64_t *start = numbers;
    const int64_t *size = numbers + n_dims;
    int64_t begin = numbers[2 * n_dims];
    int64_t n_elems = numbers[2 * n_dims + 1];
    int64_t box_elems = 0;
    char name[40];

    if (index < 0)
        snprintf(name, sizeof name, "wanted");
    else
        snprintf(name, sizeof name, "pieces[%" PRId64 "]", index);
    for (int32_t d = 0; d < n_dims; d++)
        if (start[d] < 0 || size[d] < 0 || start[d] > shape[d] || size[d] > shape[d] - start[d])
            return dsc_fail(DSC_EINVAL,
                            "%s starts at %" PRId64 " with size %" PRId64
                            " along dimension %d, the tensor's size there is %" PRId64,
                            name, start[d], size[d], (int)d, shape[d]);
    if (elems_overflow(size, n_dims, &box_elems)) /* cannot be: the shape's do not, and it is at least as large */
        return dsc_fail(DSC_EOVERFLOW, "the elements of %s do not fit int64_t", name);
    if (begin < 0 || n_elems < 0 || begin > box_elems || n_elems > box_elems - begin)
        return dsc_fail(DSC_EINVAL, "%s is %" PRId64 " elements from %" PRId64 " of a box of %" PRId64, name, n_elems,
                        begin, box_elems);
    return DSC_OK;
}
