/*
 * Where the gradients of a backward pass gather: each parameter has its place in the buffer of its bucket.
 *
 * A bucket is *open* while it has a buffer. The first gradient of a parameter that comes to an open bucket is copied to
 * its place, and any further one is added there, in f32 and rounded once. A place without a gradient keeps its earlier
 * contents until dsc_intake_clear_rest.
 *
 * Nothing allocates. Calls for one intake must not overlap. Offsets and sizes are elements.
 */
#ifndef DSC_INTAKE_H
#define DSC_INTAKE_H

#include "dsc/flat.h"
#include "dsc/status.h"
#include "dsc/types.h"

#ifdef __cplusplus
extern "C" {
#endif

struct dsc_intake_place {
    int64_t bucket;
    int64_t begin_elems; /* within the buffer of the bucket */
    int64_t n_elems;
};

struct dsc_intake_bucket {
    int64_t first_param; /* its members are first_param <= i < end_param */
    int64_t end_param;
    int64_t n_written; /* members that a gradient has come to since it was opened */
    int64_t n_elems;   /* of the buffer */
    void *data;        /* NULL where the cores cannot write to the buffer, as on a device */
    dsc_dtype dtype;
    bool is_open;
};

struct dsc_intake {
    const struct dsc_intake_place *places; /* kept */
    int64_t n_params;
    struct dsc_intake_bucket *buckets; /* kept */
    int64_t n_buckets;
    uint8_t *is_written; /* kept: n_params entries */
};

/*
 * All buckets are closed. Parameters must be numbered in the order of their buckets and of their places within these,
 * which do not overlap: DSC_EINVAL names the first place that is out of order.
 */
DSC_API dsc_status dsc_intake_init(struct dsc_intake *intake, const struct dsc_intake_place *places, int64_t n_params,
                                   struct dsc_intake_bucket *buckets, int64_t n_buckets, uint8_t *is_written);

/*
 * From now on the gradients of bucket gather at data, n_elems of dtype, which stay the caller's; NULL: the caller
 * writes them. Nothing has come to it. DSC_EINVAL where a place reaches beyond n_elems.
 */
DSC_API dsc_status dsc_intake_open(struct dsc_intake *intake, int64_t bucket, void *data, int64_t n_elems,
                                   dsc_dtype dtype);

/* The bucket has no buffer any more. Closing one twice is fine. */
DSC_API dsc_status dsc_intake_close(struct dsc_intake *intake, int64_t bucket);

/* All members of an open bucket count as written: further gradients are added. */
DSC_API dsc_status dsc_intake_fill(struct dsc_intake *intake, int64_t bucket);

/*
 * The next member of an open bucket, from param on, that no gradient has come to; -1 when there is none.
 */
DSC_API dsc_status dsc_intake_next_missing(const struct dsc_intake *intake, int64_t bucket, int64_t param,
                                           int64_t *out_param);

/*
 * Sets to zero all elements without a gradient, between the places too. DSC_ESTATE where the bucket is closed, or has
 * elements and no memory that can be written here.
 */
DSC_API dsc_status dsc_intake_clear_rest(struct dsc_intake *intake, int64_t bucket);

/* The caller writes a gradient of param itself: *out_is_first says whether nothing has come to its place before. */
DSC_API dsc_status dsc_intake_note(struct dsc_intake *intake, int64_t param, bool *out_is_first);

/*
 * Copies a gradient to its place, or adds it. It counts as come. DSC_EINVAL where its length differs from its place's,
 * DSC_ESTATE where the bucket is closed or has no memory that can be written here; nothing has changed then.
 */
DSC_API dsc_status dsc_intake_add(struct dsc_intake *intake, int64_t param, const struct dsc_span *grad,
                                  const struct dsc_par *par);

#ifdef __cplusplus
}
#endif
#endif
