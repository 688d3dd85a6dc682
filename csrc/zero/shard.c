/* Finds the elements that a rank owns: the fragments of a planned layout, and the even split without padding. */
#include "dsc/zero.h"

#include "base/check.h"
#include "base/fail.h"

struct layout {
    const int64_t *sizes;
    int64_t n_params;
    const int64_t *bucket_of;
    const int64_t *offset_elems;
    const int64_t *bucket_begin_elems;
    const int64_t *slice_elems;
    int64_t n_buckets;
    int32_t n_ranks;
};

/* Checks that each bucket begins where the previous one ends, and that every sum below fits int64_t. */
static dsc_status check_buckets(const struct layout *layout)
{
    int64_t end = 0;

    for (int64_t b = 0; b < layout->n_buckets; b++) {
        int64_t n_elems;

        if (layout->bucket_begin_elems[b] < end)
            return dsc_fail(DSC_EINVAL, "bucket_begin_elems[%lld] is %lld, the bucket before it ends at %lld",
                            (long long)b, (long long)layout->bucket_begin_elems[b], (long long)end);
        if (layout->slice_elems[b] < 0)
            return dsc_fail(DSC_EINVAL, "slice_elems[%lld] is %lld, must not be negative", (long long)b,
                            (long long)layout->slice_elems[b]);
        if (__builtin_mul_overflow(layout->slice_elems[b], (int64_t)layout->n_ranks, &n_elems) ||
            __builtin_add_overflow(layout->bucket_begin_elems[b], n_elems, &end))
            return dsc_fail(DSC_EOVERFLOW, "bucket %lld (begin %lld, slice %lld) does not fit int64_t over %d ranks",
                            (long long)b, (long long)layout->bucket_begin_elems[b], (long long)layout->slice_elems[b],
                            (int)layout->n_ranks);
    }
    return DSC_OK;
}

/* Checks that parameters do not overlap, and that each lies inside its bucket. */
static dsc_status check_params(const struct layout *layout)
{
    int64_t end = 0;
    int64_t bucket = 0;

    for (int64_t i = 0; i < layout->n_params; i++) {
        int64_t b = layout->bucket_of[i];
        int64_t offset = layout->offset_elems[i];

        if (layout->sizes[i] < 0)
            return dsc_fail(DSC_EINVAL, "sizes[%lld] is %lld, must not be negative", (long long)i,
                            (long long)layout->sizes[i]);
        if (b < bucket || b >= layout->n_buckets)
            return dsc_fail(DSC_EINVAL, "bucket_of[%lld] is %lld, must be %lld to %lld", (long long)i, (long long)b,
                            (long long)bucket, (long long)layout->n_buckets - 1);

        int64_t bucket_begin = layout->bucket_begin_elems[b];
        int64_t bucket_end = bucket_begin + layout->n_ranks * layout->slice_elems[b];

        if (offset < end || offset < bucket_begin || offset > bucket_end || layout->sizes[i] > bucket_end - offset)
            return dsc_fail(
                DSC_EINVAL,
                "parameter %lld (offset %lld, %lld elements) does not lie behind %lld and inside bucket %lld [%lld, %lld)",
                (long long)i, (long long)offset, (long long)layout->sizes[i], (long long)end, (long long)b,
                (long long)bucket_begin, (long long)bucket_end);
        end = offset + layout->sizes[i];
        bucket = b;
    }
    return DSC_OK;
}

/* Fills out_fragments unless it is NULL, and returns how many there are. */
static int64_t list_fragments(const struct layout *layout, int32_t rank, struct dsc_fragment *out_fragments)
{
    int64_t n_fragments = 0;
    int64_t shard_begin = 0; /* the start of the bucket's slice within the shard */
    int64_t bucket = 0;

    for (int64_t i = 0; i < layout->n_params; i++) {
        for (; bucket < layout->bucket_of[i]; bucket++)
            shard_begin += layout->slice_elems[bucket];

        int64_t slice_begin = layout->bucket_begin_elems[bucket] + rank * layout->slice_elems[bucket];
        int64_t slice_end = slice_begin + layout->slice_elems[bucket];
        int64_t param_begin = layout->offset_elems[i];
        int64_t param_end = param_begin + layout->sizes[i];
        int64_t begin = param_begin > slice_begin ? param_begin : slice_begin;
        int64_t end = param_end < slice_end ? param_end : slice_end;

        if (begin >= end)
            continue;
        if (out_fragments != NULL)
            out_fragments[n_fragments] = (struct dsc_fragment){
                .param = i,
                .param_begin_elems = begin - param_begin,
                .flat_begin_elems = begin,
                .shard_begin_elems = shard_begin + (begin - slice_begin),
                .n_elems = end - begin,
            };
        n_fragments++;
    }
    return n_fragments;
}

dsc_status dsc_shard_fragments(const int64_t *sizes, int64_t n_params, const int64_t *bucket_of,
                               const int64_t *offset_elems, const int64_t *bucket_begin_elems,
                               const int64_t *slice_elems, int64_t n_buckets, int32_t n_ranks, int32_t rank,
                               int64_t capacity, struct dsc_fragment *out_fragments, int64_t *out_n_fragments)
{
    const struct layout layout = {sizes,       n_params,  bucket_of, offset_elems, bucket_begin_elems,
                                  slice_elems, n_buckets, n_ranks};

    if (n_params < 0 || n_buckets < 0)
        return dsc_fail(DSC_EINVAL, "n_params is %lld and n_buckets is %lld, neither may be negative",
                        (long long)n_params, (long long)n_buckets);
    if (n_params > 0 && (sizes == NULL || bucket_of == NULL || offset_elems == NULL))
        return dsc_fail(DSC_EINVAL, "sizes, bucket_of or offset_elems is NULL for %lld parameters",
                        (long long)n_params);
    if (n_buckets > 0 && (bucket_begin_elems == NULL || slice_elems == NULL))
        return dsc_fail(DSC_EINVAL, "bucket_begin_elems or slice_elems is NULL for %lld buckets", (long long)n_buckets);
    if (out_n_fragments == NULL)
        return dsc_fail(DSC_EINVAL, "out_n_fragments is NULL");
    DSC_TRY(dsc_check_rank(n_ranks, rank));
    DSC_TRY(check_buckets(&layout));
    DSC_TRY(check_params(&layout));

    int64_t n_fragments = list_fragments(&layout, rank, NULL);

    if (out_fragments != NULL) {
        if (n_fragments > capacity)
            return dsc_fail(DSC_EINVAL, "capacity is %lld, rank %d has %lld fragments", (long long)capacity, (int)rank,
                            (long long)n_fragments);
        list_fragments(&layout, rank, out_fragments);
    }
    *out_n_fragments = n_fragments;
    return DSC_OK;
}

static dsc_status check_n_elems(int64_t n_elems)
{
    if (n_elems < 0)
        return dsc_fail(DSC_EINVAL, "n_elems is %lld, must not be negative", (long long)n_elems);
    return DSC_OK;
}

dsc_status dsc_shard_range_of(int64_t n_elems, int32_t n_ranks, int32_t rank, int64_t *out_begin_elems,
                              int64_t *out_end_elems)
{
    DSC_TRY(check_n_elems(n_elems));
    DSC_TRY(dsc_check_rank(n_ranks, rank));
    if (out_begin_elems == NULL || out_end_elems == NULL)
        return dsc_fail(DSC_EINVAL, "%s is NULL", out_begin_elems == NULL ? "out_begin_elems" : "out_end_elems");

    int64_t share = n_elems / n_ranks;
    int64_t n_larger = n_elems % n_ranks; /* ranks that get one more */

    *out_begin_elems = rank * share + (rank < n_larger ? rank : n_larger);
    *out_end_elems = *out_begin_elems + share + (rank < n_larger);
    return DSC_OK;
}
