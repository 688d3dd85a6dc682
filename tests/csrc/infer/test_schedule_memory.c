/* infer/schedule.c without memory: a call that finds none leaves the schedule as it was. */
#include "test.h"

static int n_until_failure; /* allocations that succeed before one fails; -1: all do */

static bool fails(void)
{
    return n_until_failure >= 0 && n_until_failure-- == 0;
}

static void *allocate(size_t n, size_t size)
{
    return fails() ? NULL : calloc(n, size);
}

static void *allocate_again(void *memory, size_t n_bytes)
{
    return fails() ? NULL : realloc(memory, n_bytes);
}

/* The core itself, with other functions of memory: the library's copy is not linked then. */
#define calloc allocate
#define realloc allocate_again
#include "infer/schedule.c"
#undef calloc
#undef realloc

static void test_each_allocation_fails_once(void)
{
    struct dsc_schedule *schedule = NULL;
    struct dsc_schedule_step step;
    struct dsc_schedule_counts counts;
    const int32_t *ready;
    int32_t n_ready;
    int32_t n = 0;
    int32_t n_failed = 0;

    n_until_failure = 0;
    CHECK_ERROR(dsc_schedule_open(100, 70, &schedule), DSC_ENOMEM, "no memory");
    CHECK(schedule == NULL);
    n_until_failure = -1;
    CHECK_STATUS(dsc_schedule_open(100, 70, &schedule), DSC_OK);
    while (n < 100) {
        int32_t number = -7;

        for (int failing = 0; number == -7; failing++) {
            TEST_CASE("request %d, allocation %d fails", (int)n, failing);
            n_until_failure = failing;
            if (dsc_schedule_add(schedule, 2, 10, 0, &number) == DSC_OK)
                break;
            CHECK_EQ(number, -7);
            CHECK(strstr(dsc_last_error(), "no memory for") != NULL);
            n_failed++;
            n_until_failure = -1;
            CHECK_STATUS(dsc_schedule_plan(schedule, 1000, &step), DSC_OK);
            CHECK_EQ(step.n_rows, n < 70 ? n : 70);
            CHECK_STATUS(dsc_schedule_abort(schedule), DSC_OK);
        }
        CHECK_EQ(number, n++);
        dsc_schedule_count(schedule, &counts);
        CHECK_EQ(counts.n_running + counts.n_waiting, n);
    }
    TEST_CASE("end");
    CHECK_EQ(n_failed, 4 * 5); /* for 8, 16, 32, 64 and 128 requests */
    n_until_failure = 0;       /* only adding a request needs memory */
    CHECK_STATUS(dsc_schedule_plan(schedule, 1000, &step), DSC_OK);
    CHECK_EQ(step.n_rows, 70);
    CHECK_STATUS(dsc_schedule_commit(schedule, &n_ready, &ready), DSC_OK);
    CHECK_EQ(n_ready, 70);
    while (n > 0)
        CHECK_STATUS(dsc_schedule_end(schedule, --n), DSC_OK);
    CHECK_STATUS(dsc_schedule_add(schedule, 2, 10, 0, &n), DSC_OK);
    CHECK_EQ(n_until_failure, 0);
    dsc_schedule_close(schedule);
}

int main(void)
{
    test_each_allocation_fails_once();
    return test_finish(__FILE__);
}
