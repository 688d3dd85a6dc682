/*
 * Collects the gradients of a backward pass: each parameter has a place in the buffer of its bucket.
 *
 * A bucket is *open* while it has a buffer. The first gradient of a parameter in an open bucket is copied to the
 * parameter's place. Any further gradient is added there, in f32 and rounded once. A place without a gradient keeps its
 * earlier contents until dsc_intake_clear_rest.
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
    int64_t first_param; /* the bucket's members are first_param <= i < end_param */
    int64_t end_param;
    int64_t n_written; /* members that have received a gradient since the bucket was opened */
    int64_t n_elems;   /* of the buffer */
    void *data;        /* NULL if the cores cannot write to the buffer, for example on a device */
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
 * Starts with all buckets closed. Parameters must be numbered in the order of their buckets, and within a bucket in the
 * order of their places. Places must not overlap. DSC_EINVAL names the first place that is out of order.
 */
DSC_API dsc_status dsc_intake_init(struct dsc_intake *intake, const struct dsc_intake_place *places, int64_t n_params,
                                   struct dsc_intake_bucket *buckets, int64_t n_buckets, uint8_t *is_written);

/*
 * Opens bucket: from now on its gradients are collected at data, n_elems elements of dtype, which the caller owns. data
 * NULL: the caller writes the gradients itself. No member counts as written. DSC_EINVAL if a place reaches beyond
 * n_elems.
 */
DSC_API dsc_status dsc_intake_open(struct dsc_intake *intake, int64_t bucket, void *data, int64_t n_elems,
                                   dsc_dtype dtype);

/* Takes the buffer away from the bucket. Closing a closed bucket does nothing. */
DSC_API dsc_status dsc_intake_close(struct dsc_intake *intake, int64_t bucket);

/* All members of an open bucket count as written: further gradients are added. */
DSC_API dsc_status dsc_intake_fill(struct dsc_intake *intake, int64_t bucket);

/*
 * The next member of an open bucket, from param on, that has received no gradient; -1 if there is none.
 */
DSC_API dsc_status dsc_intake_next_missing(const struct dsc_intake *intake, int64_t bucket, int64_t param,
                                           int64_t *out_param);

/*
 * Sets to zero all elements without a gradient, also the elements between places. DSC_ESTATE if the bucket is closed,
 * or if it has elements but the cores cannot write to its memory.
 */
DSC_API dsc_status dsc_intake_clear_rest(struct dsc_intake *intake, int64_t bucket);

/* Notes that the caller itself writes a gradient of param. *out_is_first: the place has received no gradient before. */
DSC_API dsc_status dsc_intake_note(struct dsc_intake *intake, int64_t param, bool *out_is_first);

/*
 * Copies a gradient to its place, or adds it there, and counts it as received. Nothing has changed after a failure:
 * DSC_EINVAL if the length of the gradient differs from the length of its place, DSC_ESTATE if the bucket is closed or
 * the cores cannot write to its memory.
 */
DSC_API dsc_status dsc_intake_add(struct dsc_intake *intake, int64_t param, const struct dsc_span *grad,
                                  const struct dsc_par *par);

#ifdef __cplusplus
}
#endif
#endif
