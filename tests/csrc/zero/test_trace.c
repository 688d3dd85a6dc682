/* zero/trace.c: appended steps are stored; pruning is compared with a separate search for each step. */
#include "test.h"

#include "dsc/fetch.h"

#define MAX_STEPS 24
#define MAX_UNITS 6

static void test_append(void)
{
    int32_t units[2] = {-7, -7};
    uint8_t is_used[2] = {77, 77};
    struct dsc_trace trace;

    TEST_CASE("append");
    CHECK_STATUS(dsc_trace_init(&trace, units, is_used, 2), DSC_OK);
    CHECK_EQ(trace.n_steps, 0);
    CHECK_STATUS(dsc_trace_append(&trace, 5, false), DSC_OK);
    CHECK_ERROR(dsc_trace_append(&trace, -1, true), DSC_EINVAL, "-1");
    CHECK_STATUS(dsc_trace_append(&trace, INT32_MAX, true), DSC_OK);
    CHECK_ERROR(dsc_trace_append(&trace, 1, true), DSC_EOVERFLOW, "2 steps");
    CHECK_EQ(trace.n_steps, 2);
    CHECK_EQ(units[0], 5);
    CHECK_EQ(is_used[0], 0);
    CHECK_EQ(units[1], INT32_MAX);
    CHECK_EQ(is_used[1], 1);
    dsc_trace_clear(&trace);
    CHECK_EQ(trace.n_steps, 0);
    CHECK_STATUS(dsc_trace_append(&trace, 1, true), DSC_OK);

    CHECK_STATUS(dsc_trace_init(&trace, NULL, NULL, 0), DSC_OK);
    CHECK_ERROR(dsc_trace_append(&trace, 0, true), DSC_EOVERFLOW, "0 steps");
}

static bool is_used_elsewhere(const int32_t *units, const uint8_t *is_used, int64_t n_steps, int64_t step)
{
    for (int64_t i = 0; i < n_steps; i++)
        if (i != step && units[i] == units[step] && is_used[i])
            return true;
    return false;
}

static void test_prune(void)
{
    uint64_t random = 5;

    for (int round = 0; round < 3000; round++) {
        int32_t units[MAX_STEPS];
        uint8_t is_used[MAX_STEPS];
        int32_t wanted[MAX_STEPS];
        bool is_wanted_used[MAX_STEPS];
        uint8_t may_drop[MAX_UNITS];
        uint8_t scratch[MAX_UNITS];
        int32_t n_units = 1 + (int32_t)test_below(&random, MAX_UNITS);
        int64_t n_steps = test_below(&random, MAX_STEPS + 1);
        int64_t n_wanted = 0;
        struct dsc_trace trace;

        TEST_CASE("round %d: %d steps of %d units", round, (int)n_steps, (int)n_units);
        memset(scratch, 0x5a, sizeof scratch);
        for (int32_t u = 0; u < n_units; u++)
            may_drop[u] = (uint8_t)test_below(&random, 2) * 0x80; /* any value but 0 is a yes */
        for (int64_t i = 0; i < n_steps; i++) {
            units[i] = (int32_t)test_below(&random, n_units);
            is_used[i] = (uint8_t)test_below(&random, 2);
        }
        for (int64_t i = 0; i < n_steps; i++) {
            if (!is_used[i] && (may_drop[units[i]] || is_used_elsewhere(units, is_used, n_steps, i)))
                continue;
            if (n_wanted > 0 && wanted[n_wanted - 1] == units[i]) {
                is_wanted_used[n_wanted - 1] |= is_used[i] != 0;
                continue;
            }
            is_wanted_used[n_wanted] = is_used[i] != 0;
            wanted[n_wanted++] = units[i];
        }
        CHECK_STATUS(dsc_trace_init(&trace, units, is_used, MAX_STEPS), DSC_OK);
        trace.n_steps = n_steps;
        CHECK_STATUS(dsc_trace_prune(&trace, may_drop, n_units, scratch), DSC_OK);
        CHECK_EQ(trace.n_steps, n_wanted);
        for (int64_t i = 0; i < n_wanted && i < trace.n_steps; i++) {
            TEST_AT(i);
            CHECK_EQ(trace.units[i], wanted[i]);
            CHECK_EQ(trace.is_used[i] != 0, is_wanted_used[i]);
        }
        CHECK_STATUS(dsc_trace_prune(&trace, may_drop, n_units, scratch), DSC_OK); /* once is enough */
        CHECK_EQ(trace.n_steps, n_wanted);
    }
}

static void test_errors(void)
{
    int32_t units[] = {0, 2, 1};
    uint8_t is_used[] = {0, 0, 0};
    const uint8_t may_drop[] = {1, 1, 1};
    uint8_t scratch[3];
    struct dsc_trace trace = {.n_steps = -7};

    TEST_CASE("errors");
    CHECK_ERROR(dsc_trace_init(NULL, units, is_used, 3), DSC_EINVAL, "trace");
    CHECK_ERROR(dsc_trace_init(&trace, units, is_used, -1), DSC_EINVAL, "capacity");
    CHECK_ERROR(dsc_trace_init(&trace, NULL, is_used, 3), DSC_EINVAL, "units");
    CHECK_ERROR(dsc_trace_init(&trace, units, NULL, 3), DSC_EINVAL, "is_used");
    CHECK_EQ(trace.n_steps, -7);
    CHECK_ERROR(dsc_trace_append(NULL, 0, true), DSC_EINVAL, "trace");

    CHECK_STATUS(dsc_trace_init(&trace, units, is_used, 3), DSC_OK);
    CHECK_STATUS(dsc_trace_prune(&trace, NULL, 0, NULL), DSC_OK);
    trace.n_steps = 3;
    CHECK_ERROR(dsc_trace_prune(NULL, may_drop, 3, scratch), DSC_EINVAL, "trace");
    CHECK_ERROR(dsc_trace_prune(&trace, may_drop, -1, scratch), DSC_EINVAL, "n_units");
    CHECK_ERROR(dsc_trace_prune(&trace, NULL, 3, scratch), DSC_EINVAL, "may_drop");
    CHECK_ERROR(dsc_trace_prune(&trace, may_drop, 3, NULL), DSC_EINVAL, "scratch");
    CHECK_ERROR(dsc_trace_prune(&trace, may_drop, 2, scratch), DSC_EINVAL, "step 1 is 2");
    CHECK_EQ(trace.n_steps, 3);
    CHECK_STATUS(dsc_trace_prune(&trace, may_drop, 3, scratch), DSC_OK);
    CHECK_EQ(trace.n_steps, 0);
}

int main(void)
{
    test_append();
    test_prune();
    test_errors();
    return test_finish(__FILE__);
}
