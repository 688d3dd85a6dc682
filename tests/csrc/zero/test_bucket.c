/* zero/bucket.c against a set of marks kept by the test: buckets leave in order, once, and not before their members, in any order of marking. */
#include "test.h"

#include "dsc/zero.h"

#define MAX_PARAMS 40
#define MAX_BUCKETS 12

static bool is_complete(const int64_t *bucket_of, int64_t n_params, const bool *is_marked, int64_t bucket)
{
    for (int64_t i = 0; i < n_params; i++)
        if (bucket_of[i] == bucket && !is_marked[i])
            return false;
    return true;
}

static void check_window(struct dsc_bucket_tracker *tracker, const int64_t *bucket_of, uint64_t *random)
{
    bool is_marked[MAX_PARAMS] = {false};
    int64_t n_launched = 0;

    for (int64_t step = 0; step < 3 * tracker->n_params; step++) {
        int64_t param = test_below(random, tracker->n_params); /* some twice, some never */
        bool is_late = false;
        int64_t due;

        CHECK_STATUS(dsc_bucket_tracker_mark(tracker, param, &is_late), DSC_OK);
        CHECK_EQ(is_late, bucket_of[param] < n_launched);
        is_marked[param] = true;
        while ((due = dsc_bucket_tracker_next(tracker, false)) >= 0) {
            CHECK_EQ(due, n_launched);
            CHECK(is_complete(bucket_of, tracker->n_params, is_marked, due));
            n_launched++;
        }
        CHECK(n_launched == tracker->n_buckets || !is_complete(bucket_of, tracker->n_params, is_marked, n_launched));
    }
    for (; n_launched < tracker->n_buckets; n_launched++)
        CHECK_EQ(dsc_bucket_tracker_next(tracker, true), n_launched);
    CHECK_EQ(dsc_bucket_tracker_next(tracker, true), -1);
    CHECK_EQ(dsc_bucket_tracker_next(tracker, false), -1);
}

static void test_random_cases(void)
{
    uint64_t random = 17;

    for (int round = 0; round < 500; round++) {
        int64_t bucket_of[MAX_PARAMS];
        int64_t pending[MAX_BUCKETS];
        uint8_t is_marked[MAX_PARAMS];
        int64_t n_params = 1 + test_below(&random, MAX_PARAMS);
        int64_t n_buckets = 1 + test_below(&random, MAX_BUCKETS);
        struct dsc_bucket_tracker tracker;

        for (int64_t i = 0; i < n_params; i++)
            bucket_of[i] = test_below(&random, n_buckets); /* some buckets have no members */
        memset(pending, 0x5a, sizeof pending);
        memset(is_marked, 0x5a, sizeof is_marked);
        TEST_CASE("round %d: %d parameters, %d buckets", round, (int)n_params, (int)n_buckets);
        CHECK_STATUS(dsc_bucket_tracker_init(&tracker, bucket_of, n_params, n_buckets, pending, is_marked), DSC_OK);
        check_window(&tracker, bucket_of, &random);
        dsc_bucket_tracker_reset(&tracker); /* nothing of the last window is left */
        check_window(&tracker, bucket_of, &random);
    }
}

/* A contribution to a bucket that was forced out without it must not be lost. */
static void test_forced_out(void)
{
    const int64_t bucket_of[] = {0, 0};
    int64_t pending[1];
    uint8_t is_marked[2];
    struct dsc_bucket_tracker tracker;
    bool is_late = true;

    TEST_CASE("forced out");
    CHECK_STATUS(dsc_bucket_tracker_init(&tracker, bucket_of, 2, 1, pending, is_marked), DSC_OK);
    CHECK_STATUS(dsc_bucket_tracker_mark(&tracker, 0, &is_late), DSC_OK);
    CHECK(!is_late);
    CHECK_STATUS(dsc_bucket_tracker_mark(&tracker, 0, &is_late), DSC_OK);
    CHECK(!is_late);
    CHECK_EQ(dsc_bucket_tracker_next(&tracker, false), -1);
    CHECK_EQ(dsc_bucket_tracker_next(&tracker, true), 0);
    CHECK_STATUS(dsc_bucket_tracker_mark(&tracker, 1, &is_late), DSC_OK);
    CHECK(is_late);
}

static void test_errors(void)
{
    const int64_t bucket_of[] = {0, 2};
    int64_t pending[2] = {-7, -7};
    uint8_t is_marked[2] = {77, 77};
    struct dsc_bucket_tracker tracker = {.n_params = -7};
    bool is_late = true;

    TEST_CASE("errors");
    CHECK_ERROR(dsc_bucket_tracker_init(NULL, bucket_of, 1, 1, pending, is_marked), DSC_EINVAL, "tracker");
    CHECK_ERROR(dsc_bucket_tracker_init(&tracker, bucket_of, 2, 2, pending, is_marked), DSC_EINVAL, "bucket_of[1]");
    CHECK_ERROR(dsc_bucket_tracker_init(&tracker, bucket_of, -1, 2, pending, is_marked), DSC_EINVAL, "n_params");
    CHECK_ERROR(dsc_bucket_tracker_init(&tracker, NULL, 1, 2, pending, is_marked), DSC_EINVAL, "bucket_of");
    CHECK_ERROR(dsc_bucket_tracker_init(&tracker, bucket_of, 1, 2, NULL, is_marked), DSC_EINVAL, "pending");
    CHECK_ERROR(dsc_bucket_tracker_init(&tracker, bucket_of, 1, 2, pending, NULL), DSC_EINVAL, "is_marked");
    CHECK_EQ(tracker.n_params, -7);
    CHECK_EQ(pending[0], -7);
    CHECK_EQ(is_marked[0], 77);
    CHECK_STATUS(dsc_bucket_tracker_init(&tracker, NULL, 0, 0, NULL, NULL), DSC_OK);
    CHECK_EQ(dsc_bucket_tracker_next(&tracker, true), -1);
    CHECK_ERROR(dsc_bucket_tracker_mark(&tracker, 0, &is_late), DSC_EINVAL, "param");
    CHECK_STATUS(dsc_bucket_tracker_init(&tracker, bucket_of, 1, 1, pending, is_marked), DSC_OK);
    CHECK_ERROR(dsc_bucket_tracker_mark(&tracker, 1, &is_late), DSC_EINVAL, "param");
    CHECK_ERROR(dsc_bucket_tracker_mark(&tracker, -1, &is_late), DSC_EINVAL, "param");
    CHECK_ERROR(dsc_bucket_tracker_mark(&tracker, 0, NULL), DSC_EINVAL, "out_is_late");
    CHECK(is_late);
}

int main(void)
{
    test_random_cases();
    test_forced_out();
    test_errors();
    return test_finish(__FILE__);
}
