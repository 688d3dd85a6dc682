/*
 * zero/prefetch.c: the test walks each plan step by step with sets, and recomputes each decision to keep a unit by
 * searching all earlier steps. Tiny plans are compared with the fewest gathers of all choices.
 */
#include "test.h"

#include "zero/brute_plan.h"

#define MAX_STEPS 40
#define MAX_UNITS 9
#define MAX_TINY_STEPS 16
#define MAX_TINY_UNITS 5
#define LONG_STEPS 100000

/* Guards on both sides of each array reveal a write outside. */
struct answer {
    int64_t until[MAX_STEPS + 1];
    int64_t next[MAX_STEPS + 1];
    uint8_t keep[MAX_STEPS + 1];
    int64_t peak_elems;
};

static struct brute_plan plan_of(struct answer *answer, const int32_t *steps, int64_t n_steps, const int64_t *unit_elems, int32_t n_units,
                                 struct dsc_prefetch_limits limits)
{
    int64_t n_scratch = 4 * n_steps + 2 * n_units;
    int64_t *scratch = test_alloc((size_t)n_scratch * sizeof *scratch); /* of exactly that size, for the address sanitizer */

    memset(scratch, 0x5a, (size_t)n_scratch * sizeof *scratch);
    memset(answer, 0x5a, sizeof *answer);
    CHECK_STATUS(dsc_prefetch_plan(steps, n_steps, unit_elems, n_units, &limits, scratch, answer->until, answer->next, answer->keep,
                                   &answer->peak_elems),
                 DSC_OK);
    CHECK_EQ(answer->until[n_steps], 0x5a5a5a5a5a5a5a5a);
    CHECK_EQ(answer->next[n_steps], 0x5a5a5a5a5a5a5a5a);
    CHECK_EQ(answer->keep[n_steps], 0x5a);
    free(scratch);
    return (struct brute_plan){steps, n_steps, unit_elems, n_units, limits, answer->until, answer->next, answer->keep, answer->peak_elems};
}

static void check_rules(const struct brute_plan *plan)
{
    const char *wrong = brute_walk(plan);

    if (wrong == NULL)
        wrong = brute_reuse(plan);
    test_report(wrong == NULL, __FILE__, __LINE__, "%s", wrong);
}

static struct dsc_prefetch_limits limits_of(int64_t max_live_elems, int64_t ahead_elems, int64_t max_reuse_elems)
{
    struct dsc_prefetch_limits limits = DSC_PREFETCH_LIMITS_INIT;

    limits.max_live_elems = max_live_elems;
    limits.ahead_elems = ahead_elems;
    limits.max_reuse_elems = max_reuse_elems;
    return limits;
}

static int64_t random_limit(uint64_t *random)
{
    switch (test_below(random, 8)) {
    case 0:
        return 0;
    case 1:
        return INT64_MAX;
    case 2:
        return 1;
    default:
        return test_below(random, 300);
    }
}

/* Random steps, or a forward and a backward pass over all units, some of which are tied. */
static void random_steps(uint64_t *random, int32_t *steps, int64_t n_steps, int32_t n_units)
{
    bool is_there_and_back = test_below(random, 2) == 0;

    for (int64_t i = 0; i < n_steps; i++) {
        int64_t place = 2 * i < n_steps ? i : n_steps - 1 - i;

        steps[i] = (int32_t)(is_there_and_back && test_below(random, 8) > 0 ? place % n_units : test_below(random, n_units));
    }
}

static void test_random_cases(void)
{
    uint64_t random = 11;

    for (int round = 0; round < 6000; round++) {
        int32_t steps[MAX_STEPS];
        int64_t unit_elems[MAX_UNITS];
        int32_t n_units = 1 + (int32_t)test_below(&random, MAX_UNITS);
        int64_t n_steps = test_below(&random, MAX_STEPS + 1);
        struct dsc_prefetch_limits limits = limits_of(random_limit(&random), random_limit(&random), random_limit(&random));
        struct answer answer;
        struct brute_plan plan;

        for (int32_t u = 0; u < n_units; u++)
            unit_elems[u] = test_below(&random, 5) == 0 ? 0 : test_below(&random, 120);
        if (test_below(&random, 10) == 0)
            unit_elems[0] = INT64_MAX - 120 * MAX_UNITS; /* every sum is at the end of the type */
        random_steps(&random, steps, n_steps, n_units);
        TEST_CASE("round %d: %d steps of %d units, limits %lld live, %lld ahead, %lld reuse", round, (int)n_steps, (int)n_units,
                  (long long)limits.max_live_elems, (long long)limits.ahead_elems, (long long)limits.max_reuse_elems);
        plan = plan_of(&answer, steps, n_steps, unit_elems, n_units, limits);
        check_rules(&plan);
    }
}

/* Plans small enough to check by hand. */
static void test_known_plans(void)
{
    const int32_t steps[] = {0, 1, 2, 1, 0};
    const int64_t unit_elems[] = {10, 20, 30};
    struct answer answer;

    TEST_CASE("no limit: all at once");
    plan_of(&answer, steps, 5, unit_elems, 3, limits_of(INT64_MAX, INT64_MAX, INT64_MAX));
    for (int64_t i = 0; i < 5; i++) {
        CHECK_EQ(answer.until[i], 5);
        CHECK_EQ(answer.keep[i], i < 2);
    }
    CHECK_EQ(answer.peak_elems, 60);

    TEST_CASE("nothing ahead, nothing kept");
    plan_of(&answer, steps, 5, unit_elems, 3, limits_of(INT64_MAX, 0, 0));
    for (int64_t i = 0; i < 5; i++) {
        CHECK_EQ(answer.until[i], i + 1);
        CHECK_EQ(answer.keep[i], 0);
    }
    CHECK_EQ(answer.peak_elems, 30);

    TEST_CASE("nothing ahead, the inner pair is kept");
    plan_of(&answer, steps, 5, unit_elems, 3, limits_of(INT64_MAX, 0, 30));
    CHECK_EQ(answer.keep[0], 0);
    CHECK_EQ(answer.keep[1], 1);
    CHECK_EQ(answer.until[2], 4); /* unit 1 is live: its gather costs nothing */
    CHECK_EQ(answer.peak_elems, 50);

    TEST_CASE("distance 50 is units 1 and 2, each once");
    plan_of(&answer, steps, 5, unit_elems, 3, limits_of(INT64_MAX, 0, 50));
    CHECK_EQ(answer.keep[0], 1);
    CHECK_EQ(answer.keep[1], 1);
    CHECK_EQ(answer.peak_elems, 60);

    TEST_CASE("59 elements hold one of the two: unit 0 is used last");
    plan_of(&answer, steps, 5, unit_elems, 3, limits_of(59, 0, 50));
    CHECK_EQ(answer.keep[0], 0);
    CHECK_EQ(answer.keep[1], 1);
    CHECK_EQ(answer.peak_elems, 50);

    TEST_CASE("unit 1 makes room for unit 2, and there is room for unit 0 beside it after all");
    plan_of(&answer, (const int32_t[]){1, 0, 2, 1, 0}, 5, unit_elems, 3, limits_of(45, 0, INT64_MAX));
    CHECK_EQ(answer.keep[0], 0);
    CHECK_EQ(answer.keep[1], 1);
    CHECK_EQ(answer.peak_elems, 40);

    TEST_CASE("one step ahead");
    plan_of(&answer, steps, 5, unit_elems, 3, limits_of(INT64_MAX, 30, 0));
    CHECK_EQ(answer.until[0], 2);
    CHECK_EQ(answer.until[1], 4); /* unit 2 fills the limit ahead; unit 1 is live, and stays */
    CHECK_EQ(answer.keep[1], 1);
    CHECK_EQ(answer.until[2], 5);
}

static void test_ends(void)
{
    const int32_t same[] = {0, 0, 0, 0};
    const int64_t one[] = {7};
    const int64_t none[] = {0, 0};
    const int32_t swap[] = {0, 1, 0, 1};
    struct answer answer;
    struct brute_plan plan;

    TEST_CASE("no steps");
    plan = plan_of(&answer, NULL, 0, one, 1, limits_of(0, 0, 0));
    CHECK_EQ(plan.peak_elems, 0);
    plan = plan_of(&answer, NULL, 0, NULL, 0, limits_of(0, 0, 0));
    CHECK_EQ(plan.peak_elems, 0);

    for (int64_t limit = 0; limit < 2; limit++) {
        TEST_CASE("one unit again and again, limits %d", (int)limit);
        plan = plan_of(&answer, same, 4, one, 1, limits_of(limit, limit, limit));
        check_rules(&plan);
        for (int64_t i = 0; i < 4; i++) {
            CHECK_EQ(answer.until[i], 4); /* the unit is live: its other steps need no gather, even above the limit */
            CHECK_EQ(answer.keep[i], i < 3);
        }
        CHECK_EQ(plan.peak_elems, 7);
        plan = plan_of(&answer, same, 1, one, 1, limits_of(limit, limit, limit));
        check_rules(&plan);

        TEST_CASE("units without elements, limits %d", (int)limit);
        plan = plan_of(&answer, swap, 4, none, 2, limits_of(limit, limit, limit));
        check_rules(&plan);
        for (int64_t i = 0; i < 4; i++) {
            CHECK_EQ(answer.until[i], 4);
            CHECK_EQ(answer.keep[i], i < 2);
        }
        CHECK_EQ(plan.peak_elems, 0);
    }
}

/*
 * The fewest gathers of all ways to run the steps with at most n_held live units of equal size. Tries each set of units
 * after each step. A step's own unit is live even if n_held is 0.
 */
static int64_t fewest_gathers(const int32_t *steps, int64_t n_steps, int32_t n_units, int64_t n_held)
{
    enum { N_SETS = 1 << MAX_TINY_UNITS, MANY = 1000 };
    int64_t fewest[N_SETS];
    int64_t best = MANY;

    for (uint32_t set = 0; set < N_SETS; set++)
        fewest[set] = set == 0 ? 0 : MANY;
    for (int64_t i = 0; i < n_steps; i++) {
        int64_t after[N_SETS];
        uint32_t own = 1u << steps[i];

        for (uint32_t set = 0; set < N_SETS; set++)
            after[set] = MANY;
        for (uint32_t set = 0; set < 1u << n_units; set++)
            for (uint32_t live = set; fewest[set] < MANY; live = (live - 1) & set) { /* all subsets */
                uint32_t with_own = live | own;
                int64_t n = fewest[set] + ((live & own) == 0);

                if ((__builtin_popcount(with_own) <= n_held || with_own == own) && n < after[with_own])
                    after[with_own] = n;
                if (live == 0)
                    break;
            }
        memcpy(fewest, after, sizeof fewest);
    }
    for (uint32_t set = 0; set < N_SETS; set++)
        best = fewest[set] < best ? fewest[set] : best;
    return best;
}

/* Farthest next use: with units equal in size no choice gathers fewer, however much is gathered ahead. */
static void test_fewest_gathers(void)
{
    uint64_t random = 17;

    for (int round = 0; round < 4000; round++) {
        int32_t steps[MAX_TINY_STEPS];
        int64_t unit_elems[MAX_TINY_UNITS];
        int32_t gathers[2 * MAX_TINY_STEPS];
        int32_t n_units = 1 + (int32_t)test_below(&random, MAX_TINY_UNITS);
        int64_t n_steps = test_below(&random, MAX_TINY_STEPS + 1);
        int64_t elems = 1 + test_below(&random, 9);
        int64_t n_held = test_below(&random, n_units + 1);
        int64_t ahead_elems = test_below(&random, 3) * elems;
        int64_t max_live_elems = n_held * elems + test_below(&random, elems);
        struct answer answer;
        struct brute_plan plan;
        int64_t n_gathers = 0;

        for (int32_t u = 0; u < n_units; u++)
            unit_elems[u] = elems;
        random_steps(&random, steps, n_steps, n_units);
        TEST_CASE("round %d: %d steps of %d units, %d held, %lld ahead", round, (int)n_steps, (int)n_units, (int)n_held,
                  (long long)ahead_elems);
        plan = plan_of(&answer, steps, n_steps, unit_elems, n_units, limits_of(max_live_elems, ahead_elems, INT64_MAX));
        for (int64_t i = brute_gathers(&plan, NULL, gathers) - 1; i >= 0; i--)
            n_gathers += gathers[i] >= 0;
        CHECK_EQ(n_gathers, fewest_gathers(steps, n_steps, n_units, n_held));
    }
}

/* Forward and backward through a model of many small layers: quadratic time would show. */
static void test_long_pass(void)
{
    enum { N_UNITS = 500 };
    int32_t *steps = test_alloc(LONG_STEPS * sizeof *steps);
    int64_t *scratch = test_alloc((4 * LONG_STEPS + 2 * N_UNITS) * sizeof *scratch);
    int64_t *until = test_alloc(LONG_STEPS * sizeof *until);
    int64_t *next = test_alloc(LONG_STEPS * sizeof *next);
    uint8_t *keep = test_alloc(LONG_STEPS);
    int64_t unit_elems[N_UNITS];
    uint64_t random = 3;

    for (int32_t u = 0; u < N_UNITS; u++)
        unit_elems[u] = test_below(&random, 1000);
    random_steps(&random, steps, LONG_STEPS, N_UNITS);
    for (int round = 0; round < 3; round++) {
        struct dsc_prefetch_limits limits = limits_of(20000, round == 0 ? 0 : 4000, round == 1 ? INT64_MAX : 8000);
        struct brute_plan plan = {steps, LONG_STEPS, unit_elems, N_UNITS, limits, until, next, keep, 0};
        const char *wrong;

        TEST_CASE("%d steps, round %d", LONG_STEPS, round);
        CHECK_STATUS(dsc_prefetch_plan(steps, LONG_STEPS, unit_elems, N_UNITS, &limits, scratch, until, next, keep, &plan.peak_elems), DSC_OK);
        wrong = brute_walk(&plan);
        test_report(wrong == NULL, __FILE__, __LINE__, "%s", wrong);
    }
    free(keep);
    free(next);
    free(until);
    free(scratch);
    free(steps);
}

static void test_errors(void)
{
    const int32_t steps[] = {0, 2};
    const int32_t negative[] = {0, -1};
    const int64_t unit_elems[] = {1, 2, 3};
    const int64_t bad_elems[] = {1, -2, 3};
    const int64_t huge_elems[] = {INT64_MAX, 0, 1};
    const struct dsc_prefetch_limits limits = DSC_PREFETCH_LIMITS_INIT;
    const struct dsc_prefetch_limits sizeless = {.max_live_elems = 1};
    const struct dsc_prefetch_limits wrong[] = {limits_of(-1, 0, 0), limits_of(0, -1, 0), limits_of(0, 0, -1)};
    int64_t scratch[4 * 2 + 2 * 3];
    int64_t until[] = {-7, -7};
    int64_t next[] = {-7, -7};
    uint8_t keep[] = {77, 77};
    int64_t peak = -7;

    TEST_CASE("errors");
    CHECK_ERROR(dsc_prefetch_plan(steps, -1, unit_elems, 3, &limits, scratch, until, next, keep, &peak), DSC_EINVAL, "n_steps");
    CHECK_ERROR(dsc_prefetch_plan(steps, 2, unit_elems, -1, &limits, scratch, until, next, keep, &peak), DSC_EINVAL, "n_units");
    CHECK_ERROR(dsc_prefetch_plan(NULL, 2, unit_elems, 3, &limits, scratch, until, next, keep, &peak), DSC_EINVAL, "steps");
    CHECK_ERROR(dsc_prefetch_plan(steps, 2, NULL, 3, &limits, scratch, until, next, keep, &peak), DSC_EINVAL, "unit_elems");
    CHECK_ERROR(dsc_prefetch_plan(steps, 2, unit_elems, 3, NULL, scratch, until, next, keep, &peak), DSC_EINVAL, "limits");
    CHECK_ERROR(dsc_prefetch_plan(steps, 2, unit_elems, 3, &sizeless, scratch, until, next, keep, &peak), DSC_EINVAL, "size");
    for (int i = 0; i < 3; i++)
        CHECK_ERROR(dsc_prefetch_plan(steps, 2, unit_elems, 3, &wrong[i], scratch, until, next, keep, &peak), DSC_EINVAL, "-1");
    CHECK_ERROR(dsc_prefetch_plan(steps, 2, unit_elems, 3, &limits, NULL, until, next, keep, &peak), DSC_EINVAL, "scratch");
    CHECK_ERROR(dsc_prefetch_plan(steps, 2, unit_elems, 3, &limits, scratch, NULL, next, keep, &peak), DSC_EINVAL, "output");
    CHECK_ERROR(dsc_prefetch_plan(steps, 2, unit_elems, 3, &limits, scratch, until, NULL, keep, &peak), DSC_EINVAL, "output");
    CHECK_ERROR(dsc_prefetch_plan(steps, 2, unit_elems, 3, &limits, scratch, until, next, NULL, &peak), DSC_EINVAL, "output");
    CHECK_ERROR(dsc_prefetch_plan(steps, 2, unit_elems, 3, &limits, scratch, until, next, keep, NULL), DSC_EINVAL, "out_peak_elems");
    CHECK_ERROR(dsc_prefetch_plan(steps, 2, unit_elems, 2, &limits, scratch, until, next, keep, &peak), DSC_EINVAL, "steps[1] is 2");
    CHECK_ERROR(dsc_prefetch_plan(negative, 2, unit_elems, 3, &limits, scratch, until, next, keep, &peak), DSC_EINVAL, "steps[1] is -1");
    CHECK_ERROR(dsc_prefetch_plan(steps, 2, bad_elems, 3, &limits, scratch, until, next, keep, &peak), DSC_EINVAL, "unit_elems[1] is -2");
    CHECK_ERROR(dsc_prefetch_plan(steps, 2, huge_elems, 3, &limits, scratch, until, next, keep, &peak), DSC_EOVERFLOW, "units 0 to 2");
    for (int i = 0; i < 2; i++) {
        CHECK_EQ(until[i], -7);
        CHECK_EQ(next[i], -7);
        CHECK_EQ(keep[i], 77);
    }
    CHECK_EQ(peak, -7);
}

int main(void)
{
    test_random_cases();
    test_known_plans();
    test_ends();
    test_fewest_gathers();
    test_long_pass();
    test_errors();
    return test_finish(__FILE__);
}
