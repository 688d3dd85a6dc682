/* dsc_bucket_tracker: whatever is marked, launched, forced and reset in whatever order, buckets leave in order, each once a window, and none early. */
#include "fuzz.h"

#include "dsc/zero.h"

#define MAX_PARAMS 24
#define MAX_BUCKETS 8

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes)
{
    struct input input = {data, n_bytes};
    int64_t bucket_of[MAX_PARAMS];
    int64_t pending[MAX_BUCKETS];
    uint8_t is_marked[MAX_PARAMS];
    bool is_seen[MAX_PARAMS] = {false};
    struct dsc_bucket_tracker tracker;
    int64_t n_params = take_below(&input, MAX_PARAMS + 1);
    int64_t n_buckets = 1 + take_below(&input, MAX_BUCKETS);
    int64_t n_launched = 0;

    for (int64_t i = 0; i < n_params; i++)
        bucket_of[i] = take_below(&input, n_buckets);
    REQUIRE(dsc_bucket_tracker_init(&tracker, bucket_of, n_params, n_buckets, pending, is_marked) == DSC_OK);
    while (input.n_left > 0) {
        uint8_t action = take_byte(&input);

        if (action < 200) {
            int64_t param = (int64_t)(action % (MAX_PARAMS + 1)) - 1; /* now and then none of them */
            bool is_late = false;
            bool is_good = param >= 0 && param < n_params;

            REQUIRE((dsc_bucket_tracker_mark(&tracker, param, &is_late) == DSC_OK) == is_good);
            REQUIRE(is_late == (is_good && bucket_of[param] < n_launched));
            if (is_good)
                is_seen[param] = true;
        } else if (action < 250) {
            bool force = action >= 240;
            bool is_due = n_launched < n_buckets;

            for (int64_t i = 0; i < n_params && !force; i++)
                is_due = is_due && (bucket_of[i] != n_launched || is_seen[i]);
            REQUIRE(dsc_bucket_tracker_next(&tracker, force) == (is_due ? n_launched : -1));
            n_launched += is_due;
        } else {
            dsc_bucket_tracker_reset(&tracker);
            memset(is_seen, 0, sizeof is_seen);
            n_launched = 0;
        }
    }
    return 0;
}
