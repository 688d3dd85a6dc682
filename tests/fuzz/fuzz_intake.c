/*
 * dsc_intake: for any order of opening, closing, filling, noting and adding, sums cover the gradients since the bucket
 * was opened, missing gradients are named, and wrong calls are refused.
 */
#include "fuzz.h"

#include "dsc/intake.h"

#define MAX_PARAMS 12
#define MAX_BUCKETS 4
#define MAX_ELEMS 9

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes)
{
    struct input input = {data, n_bytes};
    struct dsc_intake_place places[MAX_PARAMS];
    struct dsc_intake_bucket buckets[MAX_BUCKETS];
    uint8_t is_written[MAX_PARAMS];
    float buffers[MAX_BUCKETS][MAX_PARAMS * MAX_ELEMS] = {{0}};
    float want[MAX_PARAMS] = {0};
    bool has_come[MAX_PARAMS] = {false};
    bool is_open[MAX_BUCKETS] = {false}, has_memory[MAX_BUCKETS] = {false};
    int64_t ends[MAX_BUCKETS] = {0};
    int64_t n_params = take_below(&input, MAX_PARAMS + 1);
    int64_t n_buckets = 1 + take_below(&input, MAX_BUCKETS);
    struct dsc_intake intake;

    for (int64_t i = 0, bucket = 0; i < n_params; i++) {
        bucket += bucket + 1 < n_buckets ? take_below(&input, 2) : 0;
        places[i] = (struct dsc_intake_place){bucket, ends[bucket], take_below(&input, MAX_ELEMS + 1)};
        ends[bucket] += places[i].n_elems;
    }
    REQUIRE(dsc_intake_init(&intake, places, n_params, buckets, n_buckets, is_written) == DSC_OK);
    while (input.n_left > 0) {
        uint8_t action = take_byte(&input);
        int64_t param = take_below(&input, MAX_PARAMS + 1); /* now and then none of them */
        int64_t bucket = take_below(&input, MAX_BUCKETS + 1);
        bool is_bucket = bucket < n_buckets;
        bool is_ready = param < n_params && is_open[places[param].bucket];

        if (action < 150) {
            float elems[MAX_ELEMS];
            int64_t n_elems = action < 140 && param < n_params ? places[param].n_elems : take_below(&input, MAX_ELEMS + 1);
            struct dsc_span grad = {elems, n_elems, DSC_DTYPE_F32};
            bool is_good = is_ready && has_memory[places[param].bucket] && n_elems == places[param].n_elems;

            for (int64_t i = 0; i < MAX_ELEMS; i++)
                elems[i] = (float)(action % 5);
            REQUIRE((dsc_intake_add(&intake, param, &grad, NULL) == DSC_OK) == is_good);
            if (is_good) {
                want[param] = (has_come[param] ? want[param] : 0) + (float)(action % 5);
                has_come[param] = true;
                for (int64_t i = 0; i < n_elems; i++)
                    REQUIRE(buffers[places[param].bucket][places[param].begin_elems + i] == want[param]);
            }
        } else if (action < 200) {
            int64_t missing = -1;

            REQUIRE((dsc_intake_open(&intake, bucket, is_bucket && action < 190 ? buffers[bucket] : NULL, MAX_PARAMS * MAX_ELEMS, DSC_DTYPE_F32) == DSC_OK) == is_bucket);
            for (int64_t i = 0; is_bucket && i < n_params; i++)
                if (places[i].bucket == bucket) {
                    has_come[i] = false;
                    missing = missing < 0 ? i : missing;
                }
            if (is_bucket) {
                int64_t found = -7;

                is_open[bucket] = true;
                has_memory[bucket] = action < 190;
                REQUIRE(dsc_intake_next_missing(&intake, bucket, 0, &found) == DSC_OK && found == missing);
            }
        } else if (action < 220) {
            REQUIRE((dsc_intake_close(&intake, bucket) == DSC_OK) == is_bucket);
            if (is_bucket)
                is_open[bucket] = has_memory[bucket] = false;
        } else if (action < 235) {
            bool is_first = false;

            REQUIRE((dsc_intake_note(&intake, param, &is_first) == DSC_OK) == is_ready);
            if (is_ready) {
                REQUIRE(is_first == !has_come[param]);
                want[param] = places[param].n_elems > 0 ? buffers[places[param].bucket][places[param].begin_elems] : 0;
                has_come[param] = true;
            }
        } else {
            REQUIRE((dsc_intake_fill(&intake, bucket) == DSC_OK) == (is_bucket && is_open[bucket]));
            for (int64_t i = 0; is_bucket && is_open[bucket] && i < n_params; i++)
                if (places[i].bucket == bucket) {
                    want[i] = places[i].n_elems > 0 ? buffers[bucket][places[i].begin_elems] : 0;
                    has_come[i] = true;
                }
        }
    }
    return 0;
}
