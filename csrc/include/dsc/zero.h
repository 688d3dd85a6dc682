/*
 * The owner of each element: flat layouts, buckets and shards, as plain integers.
 *
 * Nothing here touches a tensor and nothing allocates. A *layout* places the parameters of one unit (one optimizer
 * group, one dtype) one after another in a flat buffer. The buffer is cut into *buckets*; a collective carries one
 * bucket. Every bucket is padded to n_ranks equal slices; a rank's *shard* is the concatenation of its slice of each
 * bucket.
 *
 *   flat    | p0 | p1 |..pad | p2      |..pad | ...          bucket b = flat[begin[b] .. begin[b] + n_ranks * slice[b])
 *   bucket 0: rank 0 | rank 1 | ...    rank r owns            flat[begin[b] + r * slice[b] .. + slice[b])
 *   shard of rank r: slice of bucket 0, slice of bucket 1, ... shard offset of bucket b = sum of slice[0..b)
 *
 * Element counts and offsets are int64_t, ranks int32_t. Planners fill the caller's arrays. (ZeRO: arXiv 1910.02054,
 * section 5.)
 */
#ifndef DSC_ZERO_H
#define DSC_ZERO_H

#include "dsc/status.h"
#include "dsc/types.h"

#ifdef __cplusplus
extern "C" {
#endif

/*
 * Places n_params parameters, in the order given, and cuts the buffer into buckets.
 *
 * sizes[i] >= 0 elements. A bucket takes parameters until the next parameter would push it over bucket_elems (> 0); a
 * parameter with more than bucket_elems elements gets a bucket of its own and is never cut. Each parameter starts at a
 * multiple of align_elems (a power of two) within the flat buffer, and every slice is a multiple of align_elems. A
 * zero-size parameter takes no room and belongs to the bucket that is being filled at its turn. n_params == 0 gives
 * zero buckets. A unit of zero-size parameters only gives one bucket of slice 0.
 *
 * Fills out_bucket_of[n_params] and out_offset_elems[n_params] (offset within the flat buffer), and up to
 * bucket_capacity entries of out_bucket_begin_elems and out_slice_elems; n_params entries are always enough.
 * *out_n_buckets and *out_flat_elems (length of the flat buffer, padding included) are written too. DSC_EINVAL names
 * the first bad entry; DSC_EOVERFLOW when the flat buffer would not fit int64_t. On failure nothing is written.
 */
DSC_API dsc_status dsc_layout_plan(const int64_t *sizes, int64_t n_params, int32_t n_ranks, int64_t bucket_elems,
                                   int64_t align_elems, int64_t bucket_capacity, int64_t *out_bucket_of,
                                   int64_t *out_offset_elems, int64_t *out_bucket_begin_elems, int64_t *out_slice_elems,
                                   int64_t *out_n_buckets, int64_t *out_flat_elems);

/* One piece of a parameter that lies in one rank's slice. */
struct dsc_fragment {
    int64_t param;             /* index of the parameter */
    int64_t param_begin_elems; /* first element within the parameter */
    int64_t flat_begin_elems;  /* first element within the flat buffer */
    int64_t shard_begin_elems; /* first element within the rank's shard */
    int64_t n_elems;           /* > 0 */
};

/*
 * Lists the fragments that rank owns, by bucket and then by position. Call with out_fragments NULL for the count; then
 * with an array of capacity entries. A parameter gives a rank at most one fragment, so n_params entries are always
 * enough. The arrays come from dsc_layout_plan.
 */
DSC_API dsc_status dsc_shard_fragments(const int64_t *sizes, int64_t n_params, const int64_t *bucket_of,
                                       const int64_t *offset_elems, const int64_t *bucket_begin_elems,
                                       const int64_t *slice_elems, int64_t n_buckets, int32_t n_ranks, int32_t rank,
                                       int64_t capacity, struct dsc_fragment *out_fragments, int64_t *out_n_fragments);

/*
 * The range of rank in an even split of n_elems over n_ranks, without padding: each of the first n_elems % n_ranks
 * ranks gets one element more.
 */
DSC_API dsc_status dsc_shard_range_of(int64_t n_elems, int32_t n_ranks, int32_t rank, int64_t *out_begin_elems,
                                      int64_t *out_end_elems);

/*
 * Tracks which parameters of a pass are ready, and says which bucket may be reduced next.
 *
 * Collectives must start in the same order on every rank, although gradients come in any order. A bucket's *turn* comes
 * when all its members have been marked and the turns of all lower buckets have come. The bucket is due at its turn. A
 * bucket that *waits* lets its turn pass, and is due after all others. All ranks must let the same buckets wait. The
 * caller owns the storage.
 */
struct dsc_bucket_tracker {
    const int64_t *bucket_of; /* kept */
    int64_t n_params;
    int64_t n_buckets;
    int64_t *pending;     /* kept: n_buckets entries, members still missing */
    uint8_t *marks;       /* kept: n_params entries, the contributions seen of each parameter */
    uint8_t *states;      /* kept: n_buckets entries, the progress of each bucket */
    int64_t next_turn;    /* lowest bucket whose turn has not come by its members */
    int64_t next_waiting; /* where the search for the next waiting bucket begins */
};

/* Starts without marks. No bucket waits until dsc_bucket_tracker_set_waiting says so. */
DSC_API dsc_status dsc_bucket_tracker_init(struct dsc_bucket_tracker *tracker, const int64_t *bucket_of,
                                           int64_t n_params, int64_t n_buckets, int64_t *pending, uint8_t *marks,
                                           uint8_t *states);

/*
 * Begins a backward pass: nothing marked, nothing launched. Waiting buckets go on waiting, and contributions seen stay
 * seen.
 */
DSC_API void dsc_bucket_tracker_reset(struct dsc_bucket_tracker *tracker);

/* Begins a window: as dsc_bucket_tracker_reset, and nothing has been seen. */
DSC_API void dsc_bucket_tracker_begin_window(struct dsc_bucket_tracker *tracker);

/* Sets whether bucket waits from now on. Launched buckets stay launched. */
DSC_API dsc_status dsc_bucket_tracker_set_waiting(struct dsc_bucket_tracker *tracker, int64_t bucket, bool waits);

enum dsc_bucket_time {
    DSC_BUCKET_IN_TIME = 0,
    DSC_BUCKET_WAITED = 1, /* the bucket's turn had passed, but the bucket waits, so the gradient is in time */
    DSC_BUCKET_LATE = 2, /* the bucket has been launched, with an earlier contribution or by force without: this one has
                            to be reduced by itself */
};

/*
 * Marks a parameter; *out_time: enum dsc_bucket_time. A parameter may be marked several times before its bucket's turn
 * (contributions add up).
 */
DSC_API dsc_status dsc_bucket_tracker_mark(struct dsc_bucket_tracker *tracker, int64_t param, int32_t *out_time);

/* The contributions seen of a parameter in this window: a sum of these bits. */
enum dsc_bucket_seen {
    DSC_BUCKET_SEEN = 1,       /* a gradient */
    DSC_BUCKET_SEEN_AFTER = 2, /* a gradient that was not in time */
    DSC_BUCKET_SEEN_LATE = 4,  /* a gradient that must be reduced separately, and has not been reduced yet */
};

/* Fills n_params entries: enum dsc_bucket_seen. */
DSC_API dsc_status dsc_bucket_tracker_seen(const struct dsc_bucket_tracker *tracker, uint8_t *out_seen);

/* Notes that the caller has set the sum of param itself: a contribution counts as seen, and in time. */
DSC_API dsc_status dsc_bucket_tracker_see(struct dsc_bucket_tracker *tracker, int64_t param);

/* Notes that the caller has dropped the gradient of param: nothing counts as seen until param is marked again. */
DSC_API dsc_status dsc_bucket_tracker_forget(struct dsc_bucket_tracker *tracker, int64_t param);

/* Notes that all gradients that had to be reduced separately have been reduced. */
DSC_API void dsc_bucket_tracker_take_late(struct dsc_bucket_tracker *tracker);

enum dsc_bucket_due {
    DSC_BUCKET_READY = 0,  /* buckets in turn */
    DSC_BUCKET_PROMPT = 1, /* all buckets that do not wait; missing members do not matter */
    DSC_BUCKET_ALL = 2,    /* the waiting buckets as well, after the others */
};

/*
 * Returns the next bucket that the argument due (enum dsc_bucket_due) admits, and counts it as launched; -1 if there is
 * none.
 */
DSC_API int64_t dsc_bucket_tracker_next(struct dsc_bucket_tracker *tracker, int32_t due);

/*
 * Declares that the bucket's turn has come, regardless of its members and of lower buckets. For callers that know the
 * turns, which must be the same on all ranks. *out_is_due: the caller must launch the bucket, which now counts as
 * launched; false if the bucket waits or has been launched before.
 */
DSC_API dsc_status dsc_bucket_tracker_pass(struct dsc_bucket_tracker *tracker, int64_t bucket, bool *out_is_due);

#ifdef __cplusplus
}
#endif
#endif
