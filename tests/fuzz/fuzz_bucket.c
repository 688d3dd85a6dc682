/*
 * dsc_bucket_tracker: for marks, launches, forcing, waiting and resets in any order, buckets leave in order (waiting
 * buckets after the others), each once a window, and none early.
 */
#include "fuzz.h"

#include "dsc/zero.h"

#define MAX_PARAMS 24
#define MAX_BUCKETS 8

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes)
{
    struct input input = {data, n_bytes};
    int64_t bucket_of[MAX_PARAMS];
    int64_t pending[MAX_BUCKETS];
    uint8_t marks[MAX_PARAMS];
    uint8_t states[MAX_BUCKETS];
    bool is_seen[MAX_PARAMS] = {false};
    bool waits[MAX_BUCKETS] = {false};
    bool is_launched[MAX_BUCKETS] = {false};
    struct dsc_bucket_tracker tracker;
    int64_t n_params = take_below(&input, MAX_PARAMS + 1);
    int64_t n_buckets = 1 + take_below(&input, MAX_BUCKETS);
    int64_t n_passed = 0;

    for (int64_t i = 0; i < n_params; i++)
        bucket_of[i] = take_below(&input, n_buckets);
    REQUIRE(dsc_bucket_tracker_init(&tracker, bucket_of, n_params, n_buckets, pending, marks, states) == DSC_OK);
    while (input.n_left > 0) {
        uint8_t action = take_byte(&input);

        if (action < 190) {
            int64_t param = (int64_t)(action % (MAX_PARAMS + 1)) - 1; /* now and then none of them */
            int32_t time = DSC_BUCKET_IN_TIME;
            bool is_good = param >= 0 && param < n_params;

            REQUIRE((dsc_bucket_tracker_mark(&tracker, param, &time) == DSC_OK) == is_good);
            if (is_good) {
                is_seen[param] = true;
                REQUIRE((time == DSC_BUCKET_LATE) == is_launched[bucket_of[param]]);
                REQUIRE((time != DSC_BUCKET_IN_TIME) == (is_launched[bucket_of[param]] || bucket_of[param] < n_passed));
            }
        } else if (action < 240) {
            int32_t due = action >= 235 ? DSC_BUCKET_ALL : action >= 230 ? DSC_BUCKET_PROMPT : DSC_BUCKET_READY;
            int64_t want = -1;

            for (bool is_due = true; is_due && n_passed < n_buckets && want < 0;) {
                for (int64_t i = 0; i < n_params && due == DSC_BUCKET_READY; i++)
                    is_due = is_due && (bucket_of[i] != n_passed || is_seen[i]);
                if (is_due && !waits[n_passed++])
                    want = n_passed - 1;
            }
            for (int64_t b = 0; b < n_buckets && due == DSC_BUCKET_ALL && want < 0; b++)
                if (!is_launched[b])
                    want = b;
            REQUIRE(dsc_bucket_tracker_next(&tracker, due) == want);
            if (want >= 0)
                is_launched[want] = true;
        } else {
            int64_t bucket = (int64_t)(action % (MAX_BUCKETS + 1)) - 1; /* now and then none of them */
            bool is_good = bucket >= 0 && bucket < n_buckets;

            dsc_bucket_tracker_reset(&tracker);
            memset(is_seen, 0, sizeof is_seen);
            memset(is_launched, 0, sizeof is_launched);
            n_passed = 0;
            if (is_good)
                waits[bucket] = !waits[bucket];
            REQUIRE((dsc_bucket_tracker_set_waiting(&tracker, bucket, is_good && waits[bucket]) == DSC_OK) == is_good);
        }
    }
    return 0;
}
