/* Which bucket may be reduced next, whatever the order in which gradients become ready. */
#include "dsc/zero.h"

#include "base/fail.h"

dsc_status dsc_bucket_tracker_init(struct dsc_bucket_tracker *tracker, const int64_t *bucket_of, int64_t n_params, int64_t n_buckets,
                                   int64_t *pending, uint8_t *is_marked)
{
    if (tracker == NULL)
        return dsc_fail(DSC_EINVAL, "tracker is NULL");
    if (n_params < 0 || n_buckets < 0)
        return dsc_fail(DSC_EINVAL, "n_params is %lld and n_buckets is %lld, neither may be negative", (long long)n_params,
                        (long long)n_buckets);
    if (n_params > 0 && (bucket_of == NULL || is_marked == NULL))
        return dsc_fail(DSC_EINVAL, "%s is NULL for %lld parameters", bucket_of == NULL ? "bucket_of" : "is_marked", (long long)n_params);
    if (n_buckets > 0 && pending == NULL)
        return dsc_fail(DSC_EINVAL, "pending is NULL for %lld buckets", (long long)n_buckets);
    for (int64_t i = 0; i < n_params; i++)
        if (bucket_of[i] < 0 || bucket_of[i] >= n_buckets)
            return dsc_fail(DSC_EINVAL, "bucket_of[%lld] is %lld, must be 0 to %lld", (long long)i, (long long)bucket_of[i],
                            (long long)n_buckets - 1);
    *tracker = (struct dsc_bucket_tracker){
        .bucket_of = bucket_of,
        .n_params = n_params,
        .n_buckets = n_buckets,
        .pending = pending,
        .is_marked = is_marked,
    };
    dsc_bucket_tracker_reset(tracker);
    return DSC_OK;
}

void dsc_bucket_tracker_reset(struct dsc_bucket_tracker *tracker)
{
    for (int64_t b = 0; b < tracker->n_buckets; b++)
        tracker->pending[b] = 0;
    for (int64_t i = 0; i < tracker->n_params; i++) {
        tracker->pending[tracker->bucket_of[i]]++;
        tracker->is_marked[i] = 0;
    }
    tracker->next_bucket = 0;
}

dsc_status dsc_bucket_tracker_mark(struct dsc_bucket_tracker *tracker, int64_t param, bool *out_is_late)
{
    if (tracker == NULL || out_is_late == NULL)
        return dsc_fail(DSC_EINVAL, "%s is NULL", tracker == NULL ? "tracker" : "out_is_late");
    if (param < 0 || param >= tracker->n_params)
        return dsc_fail(DSC_EINVAL, "param is %lld, must be 0 to %lld", (long long)param, (long long)tracker->n_params - 1);
    if (!tracker->is_marked[param]) {
        tracker->is_marked[param] = 1;
        tracker->pending[tracker->bucket_of[param]]--;
    }
    /* Whether it had been marked does not matter: a bucket that was forced out left without this contribution just the same. */
    *out_is_late = tracker->bucket_of[param] < tracker->next_bucket;
    return DSC_OK;
}

int64_t dsc_bucket_tracker_next(struct dsc_bucket_tracker *tracker, bool force)
{
    if (tracker->next_bucket >= tracker->n_buckets)
        return -1;
    if (tracker->pending[tracker->next_bucket] > 0 && !force)
        return -1;
    return tracker->next_bucket++;
}
