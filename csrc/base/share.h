/* Divides something evenly over ranks: tokens, heads, grains of a matrix. */
#ifndef DSC_BASE_SHARE_H
#define DSC_BASE_SHARE_H

#include <stdint.h>

struct dsc_range {
    int64_t begin;
    int64_t end;
};

/* Range of one part; the first n % n_parts parts get one more. */
static inline struct dsc_range dsc_even(int64_t n, int64_t n_parts, int64_t part)
{
    int64_t each = n / n_parts;
    int64_t more = n % n_parts;
    int64_t begin = part * each + (part < more ? part : more);

    return (struct dsc_range){begin, begin + each + (part < more)};
}

#endif
