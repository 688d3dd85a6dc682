/*
 * zero/bucket.c against marks and turns kept by the test. In any order of marking, buckets leave in order, once, and
 * only after all their members are marked. Waiting buckets leave after the others.
 */
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

/* The tracker's expected state, computed from scratch. */
struct model {
    const int64_t *bucket_of;
    bool waits[MAX_BUCKETS];
    bool is_marked[MAX_PARAMS];
    bool is_passed[MAX_BUCKETS];
    bool is_launched[MAX_BUCKETS];
};

static int64_t expected_next(struct model *model, int64_t n_params, int64_t n_buckets, int32_t due)
{
    for (int64_t b = 0; b < n_buckets; b++) {
        if (due == DSC_BUCKET_READY && !is_complete(model->bucket_of, n_params, model->is_marked, b))
            return -1; /* no bucket behind it may leave */
        model->is_passed[b] = true;
        if (!model->waits[b] && !model->is_launched[b]) {
            model->is_launched[b] = true;
            return b;
        }
    }
    for (int64_t b = 0; due == DSC_BUCKET_ALL && b < n_buckets; b++)
        if (!model->is_launched[b]) {
            model->is_launched[b] = true;
            return b;
        }
    return -1;
}

static void check_next(struct dsc_bucket_tracker *tracker, struct model *model, int32_t due)
{
    int64_t want;

    do {
        want = expected_next(model, tracker->n_params, tracker->n_buckets, due);
        CHECK_EQ(dsc_bucket_tracker_next(tracker, due), want);
    } while (want >= 0);
}

static void check_window(struct dsc_bucket_tracker *tracker, struct model *model, uint64_t *random)
{
    memset(model->is_marked, 0, sizeof model->is_marked);
    memset(model->is_passed, 0, sizeof model->is_passed);
    memset(model->is_launched, 0, sizeof model->is_launched);
    for (int64_t step = 0; step < 3 * tracker->n_params; step++) {
        int64_t param = test_below(random, tracker->n_params); /* some twice, some never */
        int64_t bucket = model->bucket_of[param];
        int32_t time = -7;

        CHECK_STATUS(dsc_bucket_tracker_mark(tracker, param, &time), DSC_OK);
        CHECK_EQ(time, model->is_launched[bucket] ? DSC_BUCKET_LATE : model->is_passed[bucket] ? DSC_BUCKET_WAITED : DSC_BUCKET_IN_TIME);
        model->is_marked[param] = true;
        if (test_below(random, 3) > 0)
            check_next(tracker, model, DSC_BUCKET_READY);
    }
    if (test_below(random, 2) > 0)
        check_next(tracker, model, DSC_BUCKET_PROMPT);
    check_next(tracker, model, DSC_BUCKET_ALL);
    for (int64_t b = 0; b < tracker->n_buckets; b++)
        CHECK(model->is_launched[b]);
    CHECK_EQ(dsc_bucket_tracker_next(tracker, DSC_BUCKET_READY), -1);
}

static void test_random_cases(void)
{
    uint64_t random = 17;

    for (int round = 0; round < 500; round++) {
        int64_t bucket_of[MAX_PARAMS];
        int64_t pending[MAX_BUCKETS];
        uint8_t marks[MAX_PARAMS];
        uint8_t states[MAX_BUCKETS];
        int64_t n_params = 1 + test_below(&random, MAX_PARAMS);
        int64_t n_buckets = 1 + test_below(&random, MAX_BUCKETS);
        struct model model = {.bucket_of = bucket_of};
        struct dsc_bucket_tracker tracker;

        for (int64_t i = 0; i < n_params; i++)
            bucket_of[i] = test_below(&random, n_buckets); /* some buckets have no members */
        memset(pending, 0x5a, sizeof pending);
        memset(marks, 0x5a, sizeof marks);
        memset(states, 0x5a, sizeof states);
        TEST_CASE("round %d: %d parameters, %d buckets", round, (int)n_params, (int)n_buckets);
        CHECK_STATUS(dsc_bucket_tracker_init(&tracker, bucket_of, n_params, n_buckets, pending, marks, states), DSC_OK);
        check_window(&tracker, &model, &random);
        for (int window = 0; window < 4; window++) {
            int64_t bucket = test_below(&random, n_buckets);

            dsc_bucket_tracker_reset(&tracker); /* only the waiting flags outlast a window */
            model.waits[bucket] = !model.waits[bucket];
            CHECK_STATUS(dsc_bucket_tracker_set_waiting(&tracker, bucket, model.waits[bucket]), DSC_OK);
            check_window(&tracker, &model, &random);
        }
    }
}

/* The tracker remembers marks for the whole window, over all passes that begin within the window. */
static void test_what_is_seen(void)
{
    const int64_t bucket_of[] = {0, 0, 1, 1};
    int64_t pending[2];
    uint8_t marks[4];
    uint8_t states[2];
    uint8_t seen[4];
    struct dsc_bucket_tracker tracker;
    int32_t time = -7;

    TEST_CASE("what is seen");
    CHECK_STATUS(dsc_bucket_tracker_init(&tracker, bucket_of, 4, 2, pending, marks, states), DSC_OK);
    CHECK_STATUS(dsc_bucket_tracker_mark(&tracker, 0, &time), DSC_OK);
    CHECK_EQ(dsc_bucket_tracker_next(&tracker, DSC_BUCKET_ALL), 0);
    CHECK_STATUS(dsc_bucket_tracker_mark(&tracker, 1, &time), DSC_OK);
    CHECK_EQ(time, DSC_BUCKET_LATE);
    CHECK_STATUS(dsc_bucket_tracker_set_waiting(&tracker, 1, true), DSC_OK);
    dsc_bucket_tracker_reset(&tracker);
    CHECK_STATUS(dsc_bucket_tracker_mark(&tracker, 2, &time), DSC_OK);
    CHECK_EQ(dsc_bucket_tracker_next(&tracker, DSC_BUCKET_PROMPT), 0);
    CHECK_EQ(dsc_bucket_tracker_next(&tracker, DSC_BUCKET_PROMPT), -1);
    CHECK_STATUS(dsc_bucket_tracker_mark(&tracker, 2, &time), DSC_OK);
    CHECK_EQ(time, DSC_BUCKET_WAITED);
    CHECK_STATUS(dsc_bucket_tracker_seen(&tracker, seen), DSC_OK);
    CHECK_EQ(seen[0], DSC_BUCKET_SEEN);
    CHECK_EQ(seen[1], DSC_BUCKET_SEEN | DSC_BUCKET_SEEN_AFTER | DSC_BUCKET_SEEN_LATE);
    CHECK_EQ(seen[2], DSC_BUCKET_SEEN | DSC_BUCKET_SEEN_AFTER);
    CHECK_EQ(seen[3], 0);

    dsc_bucket_tracker_take_late(&tracker);
    CHECK_STATUS(dsc_bucket_tracker_see(&tracker, 2), DSC_OK);
    CHECK_STATUS(dsc_bucket_tracker_see(&tracker, 3), DSC_OK);
    CHECK_STATUS(dsc_bucket_tracker_see(&tracker, 4), DSC_EINVAL);
    CHECK_STATUS(dsc_bucket_tracker_see(NULL, 0), DSC_EINVAL);
    CHECK_STATUS(dsc_bucket_tracker_seen(&tracker, NULL), DSC_EINVAL);
    CHECK_STATUS(dsc_bucket_tracker_seen(&tracker, seen), DSC_OK);
    CHECK_EQ(seen[1], DSC_BUCKET_SEEN | DSC_BUCKET_SEEN_AFTER);
    CHECK_EQ(seen[2], DSC_BUCKET_SEEN);
    CHECK_EQ(seen[3], DSC_BUCKET_SEEN);

    /*
     * A dropped mark counts as never seen, even if it came late. The marks beside it stay, and the dropped mark may
     * come again.
     */
    CHECK_STATUS(dsc_bucket_tracker_forget(&tracker, 1), DSC_OK);
    CHECK_STATUS(dsc_bucket_tracker_forget(&tracker, 3), DSC_OK);
    CHECK_STATUS(dsc_bucket_tracker_forget(&tracker, 4), DSC_EINVAL);
    CHECK_STATUS(dsc_bucket_tracker_forget(&tracker, -1), DSC_EINVAL);
    CHECK_STATUS(dsc_bucket_tracker_forget(NULL, 0), DSC_EINVAL);
    CHECK_STATUS(dsc_bucket_tracker_mark(&tracker, 3, &time), DSC_OK);
    CHECK_STATUS(dsc_bucket_tracker_seen(&tracker, seen), DSC_OK);
    CHECK_EQ(seen[0], DSC_BUCKET_SEEN);
    CHECK_EQ(seen[1], 0);
    CHECK_EQ(seen[2], DSC_BUCKET_SEEN);
    CHECK_EQ(seen[3] & DSC_BUCKET_SEEN, DSC_BUCKET_SEEN);

    dsc_bucket_tracker_begin_window(&tracker);
    CHECK_STATUS(dsc_bucket_tracker_seen(&tracker, seen), DSC_OK);
    for (int i = 0; i < 4; i++)
        CHECK_EQ(seen[i], 0);
}

/* The caller says which bucket has its turn, for example by a plan that all ranks share. */
static void test_turns_by_plan(void)
{
    const int64_t bucket_of[] = {0, 1, 2};
    int64_t pending[3];
    uint8_t marks[3];
    uint8_t states[3];
    struct dsc_bucket_tracker tracker;
    bool is_due = false;
    int32_t time = -7;

    TEST_CASE("turns by plan");
    CHECK_STATUS(dsc_bucket_tracker_init(&tracker, bucket_of, 3, 3, pending, marks, states), DSC_OK);
    CHECK_STATUS(dsc_bucket_tracker_set_waiting(&tracker, 2, true), DSC_OK);
    CHECK_STATUS(dsc_bucket_tracker_pass(&tracker, 1, &is_due), DSC_OK);
    CHECK(is_due);
    CHECK_STATUS(dsc_bucket_tracker_pass(&tracker, 1, &is_due), DSC_OK);
    CHECK(!is_due);
    CHECK_STATUS(dsc_bucket_tracker_mark(&tracker, 1, &time), DSC_OK);
    CHECK_EQ(time, DSC_BUCKET_LATE);
    CHECK_STATUS(dsc_bucket_tracker_mark(&tracker, 2, &time), DSC_OK);
    CHECK_EQ(time, DSC_BUCKET_IN_TIME);
    is_due = true;
    CHECK_STATUS(dsc_bucket_tracker_pass(&tracker, 2, &is_due), DSC_OK);
    CHECK(!is_due);
    CHECK_STATUS(dsc_bucket_tracker_mark(&tracker, 2, &time), DSC_OK);
    CHECK_EQ(time, DSC_BUCKET_WAITED);
    CHECK_EQ(dsc_bucket_tracker_next(&tracker, DSC_BUCKET_ALL), 0);
    CHECK_EQ(dsc_bucket_tracker_next(&tracker, DSC_BUCKET_ALL), 2);
    CHECK_EQ(dsc_bucket_tracker_next(&tracker, DSC_BUCKET_ALL), -1);

    /* A bucket that stops waiting between its turn and the end still leaves with the rest. */
    dsc_bucket_tracker_reset(&tracker);
    CHECK_STATUS(dsc_bucket_tracker_pass(&tracker, 2, &is_due), DSC_OK);
    CHECK_STATUS(dsc_bucket_tracker_set_waiting(&tracker, 2, false), DSC_OK);
    for (int64_t b = 0; b < 3; b++)
        CHECK_EQ(dsc_bucket_tracker_next(&tracker, DSC_BUCKET_ALL), b);
}

/* A contribution that arrives after its bucket was forced out must not be lost. */
static void test_forced_out(void)
{
    const int64_t bucket_of[] = {0, 0};
    int64_t pending[1];
    uint8_t marks[2];
    uint8_t states[1];
    struct dsc_bucket_tracker tracker;
    int32_t time = -7;

    TEST_CASE("forced out");
    CHECK_STATUS(dsc_bucket_tracker_init(&tracker, bucket_of, 2, 1, pending, marks, states), DSC_OK);
    CHECK_STATUS(dsc_bucket_tracker_mark(&tracker, 0, &time), DSC_OK);
    CHECK_EQ(time, DSC_BUCKET_IN_TIME);
    CHECK_STATUS(dsc_bucket_tracker_mark(&tracker, 0, &time), DSC_OK);
    CHECK_EQ(time, DSC_BUCKET_IN_TIME);
    CHECK_EQ(dsc_bucket_tracker_next(&tracker, DSC_BUCKET_READY), -1);
    CHECK_EQ(dsc_bucket_tracker_next(&tracker, DSC_BUCKET_PROMPT), 0);
    CHECK_STATUS(dsc_bucket_tracker_mark(&tracker, 1, &time), DSC_OK);
    CHECK_EQ(time, DSC_BUCKET_LATE);
}

static void test_errors(void)
{
    const int64_t bucket_of[] = {0, 2};
    int64_t pending[2] = {-7, -7};
    uint8_t marks[2] = {77, 77};
    uint8_t states[2] = {77, 77};
    struct dsc_bucket_tracker tracker = {.n_params = -7};
    int32_t time = -7;
    bool is_due = true;

    TEST_CASE("errors");
    CHECK_ERROR(dsc_bucket_tracker_init(NULL, bucket_of, 1, 1, pending, marks, states), DSC_EINVAL, "tracker");
    CHECK_ERROR(dsc_bucket_tracker_init(&tracker, bucket_of, 2, 2, pending, marks, states), DSC_EINVAL, "bucket_of[1]");
    CHECK_ERROR(dsc_bucket_tracker_init(&tracker, bucket_of, -1, 2, pending, marks, states), DSC_EINVAL, "n_params");
    CHECK_ERROR(dsc_bucket_tracker_init(&tracker, NULL, 1, 2, pending, marks, states), DSC_EINVAL, "bucket_of");
    CHECK_ERROR(dsc_bucket_tracker_init(&tracker, bucket_of, 1, 2, NULL, marks, states), DSC_EINVAL, "pending");
    CHECK_ERROR(dsc_bucket_tracker_init(&tracker, bucket_of, 1, 2, pending, NULL, states), DSC_EINVAL, "marks");
    CHECK_EQ(tracker.n_params, -7);
    CHECK_EQ(pending[0], -7);
    CHECK_EQ(marks[0], 77);
    CHECK_EQ(states[0], 77);
    CHECK_STATUS(dsc_bucket_tracker_init(&tracker, NULL, 0, 0, NULL, NULL, NULL), DSC_OK);
    CHECK_EQ(dsc_bucket_tracker_next(&tracker, DSC_BUCKET_ALL), -1);
    CHECK_ERROR(dsc_bucket_tracker_mark(&tracker, 0, &time), DSC_EINVAL, "param");
    CHECK_STATUS(dsc_bucket_tracker_init(&tracker, bucket_of, 1, 1, pending, marks, states), DSC_OK);
    CHECK_ERROR(dsc_bucket_tracker_mark(&tracker, 1, &time), DSC_EINVAL, "param");
    CHECK_ERROR(dsc_bucket_tracker_mark(&tracker, -1, &time), DSC_EINVAL, "param");
    CHECK_ERROR(dsc_bucket_tracker_mark(&tracker, 0, NULL), DSC_EINVAL, "out_time");
    CHECK_EQ(time, -7);
    CHECK_ERROR(dsc_bucket_tracker_init(&tracker, bucket_of, 1, 1, pending, marks, NULL), DSC_EINVAL, "states");
    CHECK_ERROR(dsc_bucket_tracker_set_waiting(&tracker, 1, true), DSC_EINVAL, "bucket");
    CHECK_ERROR(dsc_bucket_tracker_set_waiting(NULL, 0, true), DSC_EINVAL, "tracker");
    CHECK_ERROR(dsc_bucket_tracker_pass(&tracker, -1, &is_due), DSC_EINVAL, "bucket");
    CHECK_ERROR(dsc_bucket_tracker_pass(&tracker, 0, NULL), DSC_EINVAL, "out_is_due");
    CHECK(is_due);
}

int main(void)
{
    test_random_cases();
    test_what_is_seen();
    test_turns_by_plan();
    test_forced_out();
    test_errors();
    return test_finish(__FILE__);
}
