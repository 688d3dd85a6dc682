/* Finds the bucket that may be reduced next, for gradients that become ready in any order. */
#include "dsc/zero.h"

#include "base/fail.h"

/* How far a bucket is: flags of states[bucket]. */
enum { WAITS = 1, PASSED = 2 /* its turn has come */, LAUNCHED = 4 };

/* In marks[param], beside enum dsc_bucket_seen: marked since the last reset. */
enum { MARKED = 128 };

dsc_status dsc_bucket_tracker_init(struct dsc_bucket_tracker *tracker, const int64_t *bucket_of, int64_t n_params,
                                   int64_t n_buckets, int64_t *pending, uint8_t *marks, uint8_t *states)
{
    if (tracker == NULL)
        return dsc_fail(DSC_EINVAL, "tracker is NULL");
    if (n_params < 0 || n_buckets < 0)
        return dsc_fail(DSC_EINVAL, "n_params is %lld and n_buckets is %lld, neither may be negative",
                        (long long)n_params, (long long)n_buckets);
    if (n_params > 0 && (bucket_of == NULL || marks == NULL))
        return dsc_fail(DSC_EINVAL, "%s is NULL for %lld parameters", bucket_of == NULL ? "bucket_of" : "marks",
                        (long long)n_params);
    if (n_buckets > 0 && (pending == NULL || states == NULL))
        return dsc_fail(DSC_EINVAL, "%s is NULL for %lld buckets", pending == NULL ? "pending" : "states",
                        (long long)n_buckets);
    for (int64_t i = 0; i < n_params; i++)
        if (bucket_of[i] < 0 || bucket_of[i] >= n_buckets)
            return dsc_fail(DSC_EINVAL, "bucket_of[%lld] is %lld, must be 0 to %lld", (long long)i,
                            (long long)bucket_of[i], (long long)n_buckets - 1);
    *tracker = (struct dsc_bucket_tracker){
        .bucket_of = bucket_of,
        .n_params = n_params,
        .n_buckets = n_buckets,
        .pending = pending,
        .marks = marks,
        .states = states,
    };
    for (int64_t b = 0; b < n_buckets; b++)
        states[b] = 0;
    dsc_bucket_tracker_begin_window(tracker);
    return DSC_OK;
}

void dsc_bucket_tracker_begin_window(struct dsc_bucket_tracker *tracker)
{
    for (int64_t i = 0; i < tracker->n_params; i++)
        tracker->marks[i] = 0;
    dsc_bucket_tracker_reset(tracker);
}

void dsc_bucket_tracker_reset(struct dsc_bucket_tracker *tracker)
{
    for (int64_t b = 0; b < tracker->n_buckets; b++) {
        tracker->pending[b] = 0;
        tracker->states[b] &= WAITS;
    }
    for (int64_t i = 0; i < tracker->n_params; i++) {
        tracker->pending[tracker->bucket_of[i]]++;
        tracker->marks[i] &= (uint8_t)~MARKED;
    }
    tracker->next_turn = 0;
    tracker->next_waiting = 0;
}

static dsc_status check_bucket(const struct dsc_bucket_tracker *tracker, int64_t bucket)
{
    if (tracker == NULL)
        return dsc_fail(DSC_EINVAL, "tracker is NULL");
    if (bucket < 0 || bucket >= tracker->n_buckets)
        return dsc_fail(DSC_EINVAL, "bucket is %lld, must be 0 to %lld", (long long)bucket,
                        (long long)tracker->n_buckets - 1);
    return DSC_OK;
}

dsc_status dsc_bucket_tracker_set_waiting(struct dsc_bucket_tracker *tracker, int64_t bucket, bool waits)
{
    DSC_TRY(check_bucket(tracker, bucket));
    tracker->states[bucket] = (uint8_t)((tracker->states[bucket] & ~WAITS) | (waits ? WAITS : 0));
    return DSC_OK;
}

static dsc_status check_param(const struct dsc_bucket_tracker *tracker, int64_t param)
{
    if (tracker == NULL)
        return dsc_fail(DSC_EINVAL, "tracker is NULL");
    if (param < 0 || param >= tracker->n_params)
        return dsc_fail(DSC_EINVAL, "param is %lld, must be 0 to %lld", (long long)param,
                        (long long)tracker->n_params - 1);
    return DSC_OK;
}

dsc_status dsc_bucket_tracker_mark(struct dsc_bucket_tracker *tracker, int64_t param, int32_t *out_time)
{
    int64_t bucket;
    uint8_t seen = DSC_BUCKET_SEEN;

    DSC_TRY(check_param(tracker, param));
    if (out_time == NULL)
        return dsc_fail(DSC_EINVAL, "out_time is NULL");
    bucket = tracker->bucket_of[param];
    if (!(tracker->marks[param] & MARKED))
        tracker->pending[bucket]--;
    /*
     * An earlier mark does not matter: a bucket that was launched early has left without this contribution in any case.
     */
    if (tracker->states[bucket] & LAUNCHED) {
        *out_time = DSC_BUCKET_LATE;
        seen |= DSC_BUCKET_SEEN_AFTER | DSC_BUCKET_SEEN_LATE;
    } else if (tracker->states[bucket] & PASSED) {
        *out_time = DSC_BUCKET_WAITED;
        seen |= DSC_BUCKET_SEEN_AFTER;
    } else {
        *out_time = DSC_BUCKET_IN_TIME;
    }
    tracker->marks[param] |= MARKED | seen;
    return DSC_OK;
}

dsc_status dsc_bucket_tracker_see(struct dsc_bucket_tracker *tracker, int64_t param)
{
    DSC_TRY(check_param(tracker, param));
    tracker->marks[param] = (uint8_t)((tracker->marks[param] & ~DSC_BUCKET_SEEN_AFTER) | DSC_BUCKET_SEEN);
    return DSC_OK;
}

dsc_status dsc_bucket_tracker_forget(struct dsc_bucket_tracker *tracker, int64_t param)
{
    DSC_TRY(check_param(tracker, param));
    tracker->marks[param] &= MARKED;
    return DSC_OK;
}

void dsc_bucket_tracker_take_late(struct dsc_bucket_tracker *tracker)
{
    for (int64_t i = 0; i < tracker->n_params; i++)
        tracker->marks[i] &= (uint8_t)~DSC_BUCKET_SEEN_LATE;
}

dsc_status dsc_bucket_tracker_seen(const struct dsc_bucket_tracker *tracker, uint8_t *out_seen)
{
    if (tracker == NULL || (out_seen == NULL && tracker->n_params > 0))
        return dsc_fail(DSC_EINVAL, "%s is NULL", tracker == NULL ? "tracker" : "out_seen");
    for (int64_t i = 0; i < tracker->n_params; i++)
        out_seen[i] = tracker->marks[i] & (uint8_t)~MARKED;
    return DSC_OK;
}

/* Called when the bucket's turn has come. True if it is launched now. */
static bool pass(struct dsc_bucket_tracker *tracker, int64_t bucket)
{
    uint8_t before = tracker->states[bucket];
    bool is_due = !(before & (WAITS | LAUNCHED));

    tracker->states[bucket] = (uint8_t)(before | PASSED | (is_due ? LAUNCHED : 0));
    return is_due;
}

int64_t dsc_bucket_tracker_next(struct dsc_bucket_tracker *tracker, int32_t due)
{
    while (tracker->next_turn < tracker->n_buckets) {
        if (due == DSC_BUCKET_READY && tracker->pending[tracker->next_turn] > 0)
            return -1;
        if (pass(tracker, tracker->next_turn++))
            return tracker->next_turn - 1;
    }
    for (; due == DSC_BUCKET_ALL && tracker->next_waiting < tracker->n_buckets; tracker->next_waiting++)
        if (!(tracker->states[tracker->next_waiting] & LAUNCHED)) {
            tracker->states[tracker->next_waiting] |= LAUNCHED;
            return tracker->next_waiting;
        }
    return -1;
}

dsc_status dsc_bucket_tracker_pass(struct dsc_bucket_tracker *tracker, int64_t bucket, bool *out_is_due)
{
    DSC_TRY(check_bucket(tracker, bucket));
    if (out_is_due == NULL)
        return dsc_fail(DSC_EINVAL, "out_is_due is NULL");
    *out_is_due = pass(tracker, bucket);
    return DSC_OK;
}
