/* Turns a list of sizes into a padded flat layout, cut into buckets of equal slices. */
#include "dsc/zero.h"

#include "base/fail.h"

/* Walks the parameters in order. Positions are elements within the flat buffer. */
struct planner {
    int64_t n_ranks;
    int64_t bucket_elems;
    int64_t align_elems;
    int64_t begin;  /* the open bucket's */
    int64_t end;    /* of its last parameter; begin as long as it holds no element */
    int64_t bucket; /* index of the open bucket */
};

/* These two return true if the result does not fit int64_t. align is a power of two. */
static bool align_up_overflows(int64_t value, int64_t align, int64_t *out_aligned)
{
    int64_t sum;

    if (__builtin_add_overflow(value, align - 1, &sum))
        return true;
    *out_aligned = sum & ~(align - 1);
    return false;
}

/* Computes the slice of the open bucket, and the beginning of the next bucket. */
static bool close_overflows(const struct planner *planner, int64_t *out_slice, int64_t *out_next_begin)
{
    int64_t n_used = planner->end - planner->begin;
    int64_t slice = n_used / planner->n_ranks + (n_used % planner->n_ranks != 0);
    int64_t padded;

    if (align_up_overflows(slice, planner->align_elems, &slice))
        return true;
    if (__builtin_mul_overflow(slice, planner->n_ranks, &padded))
        return true;
    *out_slice = slice;
    return __builtin_add_overflow(planner->begin, padded, out_next_begin);
}

/*
 * Places the next parameter. *out_is_closing: the open bucket was closed before this parameter, with slice *out_slice.
 * Returns false if the flat buffer would not fit int64_t.
 */
static bool place(struct planner *planner, int64_t n_elems, int64_t *out_offset, bool *out_is_closing,
                  int64_t *out_slice)
{
    int64_t offset;
    int64_t end;

    *out_is_closing = false;
    if (align_up_overflows(planner->end, planner->align_elems, &offset))
        return false;
    if (n_elems > 0) {
        bool does_fit = !__builtin_add_overflow(offset, n_elems, &end) && end - planner->begin <= planner->bucket_elems;

        if (!does_fit && planner->end > planner->begin) {
            if (close_overflows(planner, out_slice, &offset))
                return false;
            *out_is_closing = true;
            planner->bucket++;
            planner->begin = offset;
        }
        if (__builtin_add_overflow(offset, n_elems, &planner->end))
            return false;
    }
    *out_offset = offset;
    return true;
}

static dsc_status check_layout_args(const int64_t *sizes, int64_t n_params, int32_t n_ranks, int64_t bucket_elems,
                                    int64_t align_elems)
{
    if (n_params < 0)
        return dsc_fail(DSC_EINVAL, "n_params is %lld, must not be negative", (long long)n_params);
    if (sizes == NULL && n_params > 0)
        return dsc_fail(DSC_EINVAL, "sizes is NULL for %lld parameters", (long long)n_params);
    if (n_ranks < 1)
        return dsc_fail(DSC_EINVAL, "n_ranks is %d, must be at least 1", (int)n_ranks);
    if (bucket_elems < 1)
        return dsc_fail(DSC_EINVAL, "bucket_elems is %lld, must be at least 1", (long long)bucket_elems);
    if (align_elems < 1 || (align_elems & (align_elems - 1)) != 0)
        return dsc_fail(DSC_EINVAL, "align_elems is %lld, must be a power of two", (long long)align_elems);
    for (int64_t i = 0; i < n_params; i++)
        if (sizes[i] < 0)
            return dsc_fail(DSC_EINVAL, "sizes[%lld] is %lld, must not be negative", (long long)i, (long long)sizes[i]);
    return DSC_OK;
}

dsc_status dsc_layout_plan(const int64_t *sizes, int64_t n_params, int32_t n_ranks, int64_t bucket_elems,
                           int64_t align_elems, int64_t bucket_capacity, int64_t *out_bucket_of,
                           int64_t *out_offset_elems, int64_t *out_bucket_begin_elems, int64_t *out_slice_elems,
                           int64_t *out_n_buckets, int64_t *out_flat_elems)
{
    DSC_TRY(check_layout_args(sizes, n_params, n_ranks, bucket_elems, align_elems));
    if (out_n_buckets == NULL || out_flat_elems == NULL)
        return dsc_fail(DSC_EINVAL, "%s is NULL", out_n_buckets == NULL ? "out_n_buckets" : "out_flat_elems");
    if (n_params > 0 && (out_bucket_of == NULL || out_offset_elems == NULL || out_bucket_begin_elems == NULL ||
                         out_slice_elems == NULL))
        return dsc_fail(DSC_EINVAL, "an output array is NULL for %lld parameters", (long long)n_params);

    const struct planner start = {.n_ranks = n_ranks, .bucket_elems = bucket_elems, .align_elems = align_elems};
    struct planner planner = start;
    int64_t offset;
    int64_t slice = 0;
    int64_t flat_elems = 0;
    bool is_closing;

    /* First walks without writing, so that nothing has been written on failure. */
    for (int64_t i = 0; i < n_params; i++)
        if (!place(&planner, sizes[i], &offset, &is_closing, &slice))
            return dsc_fail(DSC_EOVERFLOW, "the flat buffer up to parameter %lld (%lld elements) does not fit int64_t",
                            (long long)i, (long long)sizes[i]);
    if (close_overflows(&planner, &slice, &flat_elems))
        return dsc_fail(DSC_EOVERFLOW, "the flat buffer, padded to %d ranks, does not fit int64_t", (int)n_ranks);

    int64_t n_buckets = n_params > 0 ? planner.bucket + 1 : 0;

    if (n_buckets > bucket_capacity)
        return dsc_fail(DSC_EINVAL, "bucket_capacity is %lld, the plan has %lld buckets", (long long)bucket_capacity,
                        (long long)n_buckets);
    if (n_buckets > 0) {
        out_bucket_begin_elems[n_buckets - 1] = planner.begin;
        out_slice_elems[n_buckets - 1] = slice;
    }
    planner = start;
    for (int64_t i = 0; i < n_params; i++) {
        int64_t begin = planner.begin;

        place(&planner, sizes[i], &offset, &is_closing, &slice);
        if (is_closing) {
            out_bucket_begin_elems[planner.bucket - 1] = begin;
            out_slice_elems[planner.bucket - 1] = slice;
        }
        out_bucket_of[i] = planner.bucket;
        out_offset_elems[i] = offset;
    }
    *out_n_buckets = n_buckets;
    *out_flat_elems = flat_elems;
    return DSC_OK;
}
