/*
 * zero/fetch.c: a pass may use any subsequence of a plan. The gathers equal those of a walk over the whole plan, a used
 * unit is live, and no unit stays live at the end. The test records the actions and compares its record with the
 * runner's after each call.
 */
#include "test.h"

#include "zero/brute_plan.h"

#define MAX_STEPS 40
#define MAX_UNITS 9
#define MAX_EXTRA 200 /* unexpected steps in a pass */
#define LONG_STEPS 100000

/* A plan with its storage, and a runner with all the memory that it borrows. */
struct bench {
    int32_t steps[MAX_STEPS];
    int64_t unit_elems[MAX_UNITS];
    int64_t until[MAX_STEPS];
    int64_t next[MAX_STEPS];
    uint8_t keep[MAX_STEPS];
    struct brute_plan plan;
    struct dsc_fetch fetch;
    struct dsc_fetch_unit units[MAX_UNITS];
    int32_t record_units[MAX_STEPS + MAX_EXTRA];
    uint8_t record_is_used[MAX_STEPS + MAX_EXTRA];
    struct dsc_trace record;
    struct dsc_fetch_action actions[3 * MAX_STEPS + MAX_UNITS];
    int32_t gathers[3 * MAX_STEPS + MAX_EXTRA];
    struct brute_book book;
    int64_t n_actions; /* number of actions of the last call */
};

static void report(const char *wrong, int line)
{
    test_report(wrong == NULL, __FILE__, line, "%s", wrong);
}

static struct dsc_fetch_plan view_of(const struct bench *b)
{
    return (struct dsc_fetch_plan){b->steps, b->until, b->next, b->keep, b->plan.n_steps};
}

static void make_plan(struct bench *b, int64_t n_steps, int32_t n_units, int64_t max_live_elems, int64_t ahead_elems, int64_t max_reuse_elems)
{
    int64_t scratch[4 * MAX_STEPS + 2 * MAX_UNITS];
    struct dsc_prefetch_limits limits = DSC_PREFETCH_LIMITS_INIT;

    limits.max_live_elems = max_live_elems;
    limits.ahead_elems = ahead_elems;
    limits.max_reuse_elems = max_reuse_elems;
    b->plan = (struct brute_plan){b->steps, n_steps, b->unit_elems, n_units, limits, b->until, b->next, b->keep, 0};
    CHECK_STATUS(dsc_prefetch_plan(b->steps, n_steps, b->unit_elems, n_units, &limits, scratch, b->until, b->next, b->keep,
                                   &b->plan.peak_elems),
                 DSC_OK);
}

static void init(struct bench *b)
{
    CHECK_STATUS(dsc_fetch_init(&b->fetch, b->unit_elems, b->plan.n_units, b->units), DSC_OK);
    CHECK_STATUS(dsc_trace_init(&b->record, b->record_units, b->record_is_used, MAX_STEPS + MAX_EXTRA), DSC_OK);
}

static void begin(struct bench *b, const uint8_t *is_live)
{
    const struct dsc_fetch_plan view = view_of(b);

    CHECK_STATUS(dsc_fetch_begin(&b->fetch, &view, is_live, &b->record), DSC_OK);
    brute_book_begin(&b->book, is_live, b->plan.n_units, b->gathers, 3 * MAX_STEPS + MAX_EXTRA);
    report(brute_book_take(&b->book, &b->fetch, NULL, 0), __LINE__);
}

static int64_t capacity_of(const struct bench *b)
{
    return 3 * b->plan.n_steps + b->plan.n_units;
}

static void use(struct bench *b, int32_t unit)
{
    b->n_actions = -7;
    CHECK_STATUS(dsc_fetch_use(&b->fetch, unit, capacity_of(b), b->actions, &b->n_actions), DSC_OK);
    report(brute_book_take(&b->book, &b->fetch, b->actions, b->n_actions), __LINE__);
    CHECK(b->book.is_live[unit]);

    int64_t n = -7;

    CHECK_STATUS(dsc_fetch_use(&b->fetch, unit, capacity_of(b), NULL, &n), DSC_OK); /* again: nothing to do, so no room is needed */
    CHECK_EQ(n, 0);
}

static void end(struct bench *b, int32_t keep_unit)
{
    int32_t n_live = 0;
    bool is_kept;

    CHECK_STATUS(dsc_fetch_end(&b->fetch, keep_unit, capacity_of(b), b->actions, &b->n_actions), DSC_OK);
    report(brute_book_take(&b->book, &b->fetch, b->actions, b->n_actions), __LINE__);
    is_kept = keep_unit >= 0 && b->book.is_live[keep_unit];
    for (int32_t u = 0; u < b->plan.n_units; u++)
        n_live += b->book.is_live[u];
    CHECK_EQ(n_live, is_kept);
    CHECK_EQ(b->fetch.n_live, is_kept);
    CHECK(!b->fetch.is_active);
    CHECK_EQ(b->fetch.cursor, b->plan.n_steps);
    CHECK_EQ(b->fetch.issued, b->plan.n_steps);
}

static void random_plan(struct bench *b, uint64_t *random)
{
    static const int64_t limits[] = {0, 1, 50, 100, 200, 300, INT64_MAX};
    int32_t n_units = 1 + (int32_t)test_below(random, MAX_UNITS);
    int64_t n_steps = test_below(random, MAX_STEPS + 1);
    bool is_there_and_back = test_below(random, 2) == 0;

    for (int32_t u = 0; u < n_units; u++)
        b->unit_elems[u] = test_below(random, 5) == 0 ? 0 : test_below(random, 120);
    for (int64_t i = 0; i < n_steps; i++) {
        int64_t place = 2 * i < n_steps ? i : n_steps - 1 - i;

        b->steps[i] = (int32_t)(is_there_and_back && test_below(random, 8) > 0 ? place % n_units : test_below(random, n_units));
    }
    if (test_below(random, 2) == 0) { /* like a pruned trace: no unit twice in a row */
        int64_t n_left = 0;

        for (int64_t i = 0; i < n_steps; i++)
            if (n_left == 0 || b->steps[i] != b->steps[n_left - 1])
                b->steps[n_left++] = b->steps[i];
        n_steps = n_left;
    }
    make_plan(b, n_steps, n_units, limits[test_below(random, 7)], limits[test_below(random, 7)], limits[test_below(random, 7)]);
    init(b);
}

static bool has_repeats(const struct bench *b)
{
    for (int64_t i = 1; i < b->plan.n_steps; i++)
        if (b->steps[i] == b->steps[i - 1])
            return true;
    return false;
}

/*
 * The main property: all subsequences of a plan lead to the same gathers. Each plan is run by several ranks with a
 * subsequence each.
 */
static void test_subsequences(void)
{
    static struct bench b;
    uint64_t random = 23;

    for (int round = 0; round < 3000; round++) {
        int32_t wanted[2 * MAX_STEPS];
        uint8_t is_live[MAX_UNITS];
        bool is_first_live = test_below(&random, 3) == 0;
        int64_t n_wanted;

        random_plan(&b, &random);
        TEST_CASE("round %d: %d steps of %d units", round, (int)b.plan.n_steps, (int)b.plan.n_units);
        for (int32_t u = 0; u < b.plan.n_units; u++)
            is_live[u] = (uint8_t)(is_first_live && test_below(&random, 3) == 0);
        n_wanted = brute_gathers(&b.plan, is_live, wanted);
        for (int rank = 0; rank < 6; rank++) {
            int64_t out_of_four = rank == 0 ? 4 : rank == 1 ? 0 : 1 + test_below(&random, 3);
            int32_t keep_unit = (int32_t)test_below(&random, b.plan.n_units + 1) - 1;
            bool is_used[MAX_UNITS] = {false};

            begin(&b, is_live);
            for (int64_t i = 0; i < b.plan.n_steps; i++)
                if (test_below(&random, 4) < out_of_four) {
                    TEST_AT(i);
                    use(&b, b.steps[i]);
                    is_used[b.steps[i]] = true;
                    if (rank == 0 && !has_repeats(&b)) {
                        CHECK_EQ(b.fetch.cursor, i + 1);
                        CHECK_EQ(b.fetch.issued, b.until[i]);
                    }
                }
            end(&b, keep_unit);
            CHECK_EQ(b.fetch.n_unexpected, 0);
            CHECK_EQ(b.book.n_gathers, n_wanted);
            for (int64_t i = 0; i < n_wanted && i < b.book.n_gathers; i++) {
                TEST_AT(i);
                CHECK_EQ(b.gathers[i], wanted[i]);
            }
            if (!is_first_live)
                CHECK_EQ(b.fetch.peak_elems, b.plan.peak_elems);

            /* The record equals the plan, and marks a use for each used unit and for no other unit. */
            bool is_recorded[MAX_UNITS] = {false};

            CHECK_EQ(b.record.n_steps, b.plan.n_steps);
            for (int64_t i = 0; i < b.record.n_steps; i++) {
                CHECK_EQ(b.record.units[i], b.steps[i]);
                is_recorded[b.record.units[i]] |= b.record.is_used[i];
            }
            for (int32_t u = 0; u < b.plan.n_units; u++) {
                bool is_in_steps = false;

                for (int64_t i = 0; i < b.plan.n_steps; i++)
                    is_in_steps = is_in_steps || b.steps[i] == u;
                CHECK_EQ(is_recorded[u], is_used[u] && is_in_steps);
            }
        }
    }
}

/*
 * Uses in any order keep the rules. A use that is not in the plan is counted as unexpected, and the record holds it in
 * its place.
 */
static void test_any_uses(void)
{
    static struct bench b;
    uint64_t random = 29;

    for (int round = 0; round < 3000; round++) {
        int64_t n_uses = test_below(&random, MAX_EXTRA / 2);
        int64_t at = 0;
        int64_t n_extra = 0;

        random_plan(&b, &random);
        TEST_CASE("round %d: %d steps of %d units", round, (int)b.plan.n_steps, (int)b.plan.n_units);
        begin(&b, NULL);
        for (int64_t i = 0; i < n_uses; i++) {
            TEST_AT(i);
            use(&b, (int32_t)test_below(&random, b.plan.n_units));
        }
        if (test_below(&random, 4) == 0) {
            CHECK_STATUS(dsc_fetch_abort(&b.fetch, capacity_of(&b), b.actions, &b.n_actions), DSC_OK);
            for (int64_t i = 0; i < b.n_actions; i++)
                CHECK_EQ(b.actions[i].kind, DSC_FETCH_RELEASE);
            report(brute_book_take(&b.book, &b.fetch, b.actions, b.n_actions), __LINE__);
            CHECK_EQ(b.fetch.n_live, 0);
            CHECK_EQ(b.record.n_steps, 0);
            CHECK(!b.fetch.is_active);
            continue;
        }
        end(&b, -1);
        for (int64_t i = 0; i < b.record.n_steps; i++) {
            if (at < b.plan.n_steps && b.record.units[i] == b.steps[at])
                at++; /* an unexpected unit has no step left, so this unit is in the plan */
            else
                n_extra += b.record.is_used[i] ? 1 : 1000;
        }
        CHECK_EQ(at, b.plan.n_steps);
        CHECK_EQ(n_extra, b.fetch.n_unexpected);
        CHECK_EQ(b.record.n_steps, b.plan.n_steps + b.fetch.n_unexpected);
    }
}

/* The runner learns a constant order of uses, starting without a plan or with the plan of another order. */
static void test_learning(void)
{
    static struct bench b;
    uint64_t random = 31;

    for (int round = 0; round < 1500; round++) {
        int32_t uses[MAX_STEPS / 2];
        int64_t n_uses = 1 + test_below(&random, MAX_STEPS / 2);
        uint8_t may_drop[MAX_UNITS];
        uint8_t scratch[MAX_UNITS];
        int n_passes = 0;
        bool is_learned = false;

        random_plan(&b, &random);
        if (round % 2 == 0)
            make_plan(&b, 0, b.plan.n_units, b.plan.limits.max_live_elems, b.plan.limits.ahead_elems, b.plan.limits.max_reuse_elems);
        TEST_CASE("round %d: %d uses of %d units after a plan of %d steps", round, (int)n_uses, (int)b.plan.n_units, (int)b.plan.n_steps);
        for (int64_t i = 0; i < n_uses; i++)
            uses[i] = (int32_t)test_below(&random, b.plan.n_units);
        memset(may_drop, 1, sizeof may_drop);
        while (!is_learned && n_passes < 20) {
            begin(&b, NULL);
            for (int64_t i = 0; i < n_uses; i++)
                use(&b, uses[i]);
            end(&b, -1);
            n_passes++;
            CHECK_STATUS(dsc_trace_prune(&b.record, may_drop, b.plan.n_units, scratch), DSC_OK);
            is_learned = b.fetch.n_unexpected == 0 && b.record.n_steps == b.plan.n_steps;
            if (!test_report(b.record.n_steps <= MAX_STEPS, __FILE__, __LINE__, "the plan has grown to %d steps", (int)b.record.n_steps))
                return;
            memcpy(b.steps, b.record.units, (size_t)b.record.n_steps * sizeof *b.steps);
            make_plan(&b, b.record.n_steps, b.plan.n_units, b.plan.limits.max_live_elems, b.plan.limits.ahead_elems,
                      b.plan.limits.max_reuse_elems);
        }
        CHECK(is_learned);
        if (round % 2 == 0)
            CHECK(n_passes <= 2); /* the record of the first pass is the order */
    }
}

static void check_actions(const struct bench *b, const char *wanted)
{
    char text[256] = "";
    size_t n = 0;

    for (int64_t i = 0; i < b->n_actions && n + 8 < sizeof text; i++)
        if (b->actions[i].kind != DSC_FETCH_STEP) /* the places of STEP actions are checked against brute_gathers */
            n += (size_t)snprintf(text + n, sizeof text - n, "%s%c%d", n > 0 ? " " : "", b->actions[i].kind == DSC_FETCH_GATHER ? '+' : '-',
                              (int)b->actions[i].unit);
    CHECK_STR(text, wanted);
}

static void check_record(const struct bench *b, const char *wanted)
{
    char text[256] = "";
    size_t n = 0;

    for (int64_t i = 0; i < b->record.n_steps && n + 8 < sizeof text; i++)
        n += (size_t)snprintf(text + n, sizeof text - n, "%s%d%s", i > 0 ? " " : "", (int)b->record.units[i],
                              b->record.is_used[i] ? "" : "?");
    CHECK_STR(text, wanted);
}

static void plan_steps(struct bench *b, const char *steps, int64_t ahead_elems, int64_t max_reuse_elems)
{
    int64_t n_steps = (int64_t)strlen(steps);

    for (int32_t u = 0; u < 4; u++)
        b->unit_elems[u] = 10;
    for (int64_t i = 0; i < n_steps; i++)
        b->steps[i] = steps[i] - '0';
    make_plan(b, n_steps, 4, INT64_MAX, ahead_elems, max_reuse_elems);
    init(b);
}

/* Each rule of the header in a case small enough to check by hand. */
static void test_known_passes(void)
{
    static struct bench b;
    const uint8_t last_is_live[] = {0, 0, 1, 0};

    TEST_CASE("one ahead, one skipped");
    plan_steps(&b, "0123", 10, 0);
    begin(&b, NULL);
    use(&b, 0);
    check_actions(&b, "+0 +1");
    use(&b, 2);
    check_actions(&b, "-0 +2 -1 +3");
    end(&b, -1);
    check_actions(&b, "-2 -3");
    check_record(&b, "0 1? 2 3?");

    TEST_CASE("an unexpected unit leaves the running one alone, and goes with the next step");
    plan_steps(&b, "012", 0, 0);
    begin(&b, NULL);
    use(&b, 0);
    use(&b, 3);
    check_actions(&b, "+3");
    use(&b, 0);
    check_actions(&b, "");
    use(&b, 1);
    check_actions(&b, "-0 -3 +1");
    use(&b, 0); /* no step of it is left */
    check_actions(&b, "+0");
    use(&b, 3);
    check_actions(&b, "-0 +3");
    CHECK_EQ(b.fetch.n_unexpected, 3);
    end(&b, -1);
    check_actions(&b, "-1 -3 +2 -2");
    check_record(&b, "0 3 1 0 3 2?");

    TEST_CASE("live at begin: its first step is passed, and starts the prefetching");
    plan_steps(&b, "2103", 20, 0);
    begin(&b, last_is_live);
    use(&b, 2);
    check_actions(&b, "+1 +0");
    CHECK_EQ(b.fetch.cursor, 1);
    use(&b, 1);
    check_actions(&b, "-2 +3");
    end(&b, 0);
    check_actions(&b, "-1 -0 -3");
    check_record(&b, "2 1 0? 3?");

    TEST_CASE("live at begin, used nowhere: until the end");
    plan_steps(&b, "01", 0, 0);
    begin(&b, last_is_live);
    use(&b, 1);
    check_actions(&b, "+0 -0 +1");
    use(&b, 2);
    check_actions(&b, "");
    end(&b, 1);
    check_actions(&b, "-2");
    CHECK_EQ(b.units[1].is_live, 1);

    TEST_CASE("live, but its step is far: the steps in between are not given up");
    plan_steps(&b, "0120", 0, 20);
    begin(&b, NULL);
    use(&b, 0);
    use(&b, 1);
    use(&b, 0);
    check_actions(&b, "");
    CHECK_EQ(b.fetch.cursor, 2);
    end(&b, -1);
    check_actions(&b, "-1 +2 -2 -0");
    check_record(&b, "0 1 2? 0"); /* the use counts for the step for which the unit was live */

    TEST_CASE("the next step counts as used, and not the one after it");
    plan_steps(&b, "01020", 0, 10);
    begin(&b, NULL);
    use(&b, 0);
    use(&b, 1);
    use(&b, 3);
    use(&b, 0); /* at the cursor */
    end(&b, -1);
    check_record(&b, "0 1 3 0 2? 0?");
    plan_steps(&b, "012030", 0, 20);
    begin(&b, NULL);
    use(&b, 0);
    use(&b, 1);
    use(&b, 0); /* step 3 is further away */
    end(&b, -1);
    check_record(&b, "0 1 2? 0 3? 0?");

    TEST_CASE("skipped within what is issued ahead: the steps in between go");
    plan_steps(&b, "0123", INT64_MAX, 0);
    begin(&b, NULL);
    use(&b, 0);
    use(&b, 2);
    check_actions(&b, "-0 -1");
    CHECK_EQ(b.fetch.cursor, 3);
    end(&b, -1);
    check_record(&b, "0 1? 2 3?");

    TEST_CASE("what counted as used in a pass that was given up does not in the next one");
    plan_steps(&b, "0120", 0, 20);
    begin(&b, NULL);
    use(&b, 0);
    use(&b, 1);
    use(&b, 0);
    CHECK_STATUS(dsc_fetch_abort(&b.fetch, capacity_of(&b), b.actions, &b.n_actions), DSC_OK);
    begin(&b, NULL);
    use(&b, 1);
    end(&b, -1);
    check_record(&b, "0? 1 2? 0?");

    TEST_CASE("live and at the cursor, not issued yet");
    plan_steps(&b, "0120", 0, 20);
    begin(&b, NULL);
    use(&b, 0);
    use(&b, 2);
    use(&b, 0);
    CHECK_EQ(b.fetch.cursor, 4);
    end(&b, -1);
    check_record(&b, "0 1? 2 0");

    TEST_CASE("no plan: each use is gathered on the spot");
    plan_steps(&b, "", 0, 0);
    begin(&b, NULL);
    for (int32_t u = 0; u < 3; u++)
        use(&b, u);
    check_actions(&b, "-1 +2");
    end(&b, 2);
    check_actions(&b, "");
    check_record(&b, "0 1 2");

    TEST_CASE("abort in the middle");
    plan_steps(&b, "0123", INT64_MAX, 0);
    begin(&b, NULL);
    use(&b, 0);
    CHECK_STATUS(dsc_fetch_abort(&b.fetch, capacity_of(&b), b.actions, &b.n_actions), DSC_OK);
    check_actions(&b, "-0 -1 -2 -3");
    CHECK_STATUS(dsc_fetch_abort(&b.fetch, 0, NULL, &b.n_actions), DSC_OK);
    CHECK_EQ(b.n_actions, 0);
    begin(&b, NULL); /* as new */
    use(&b, 0);
    check_actions(&b, "+0 +1 +2 +3");
    end(&b, -1);
    check_record(&b, "0 1? 2? 3?");
}

/*
 * keep affects memory only. With keep set nowhere or everywhere, a used unit is still live, and all ranks gather the
 * same units.
 */
static void test_other_keeps(void)
{
    static struct bench b;
    uint64_t random = 37;

    for (int round = 0; round < 600; round++) {
        int32_t first[2 * MAX_STEPS];
        int64_t n_first = 0;

        random_plan(&b, &random);
        TEST_CASE("round %d: %d steps of %d units", round, (int)b.plan.n_steps, (int)b.plan.n_units);
        for (int64_t i = 0; i < b.plan.n_steps; i++)
            b.keep[i] = (uint8_t)(round % 3 == 0 ? 0 : round % 3 == 1 ? 1 : test_below(&random, 2));
        for (int rank = 0; rank < 4; rank++) {
            begin(&b, NULL);
            for (int64_t i = 0; i < b.plan.n_steps; i++)
                if (rank == 0 || test_below(&random, 2) == 0)
                    use(&b, b.steps[i]);
            end(&b, -1);
            CHECK_EQ(b.fetch.n_unexpected, 0);
            if (rank == 0) {
                n_first = b.book.n_gathers;
                memcpy(first, b.gathers, (size_t)n_first * sizeof *first);
            }
            CHECK_EQ(b.book.n_gathers, n_first);
            CHECK_BYTES(b.gathers, first, (size_t)n_first * sizeof *first);
        }
    }
}

static void test_call_errors(void)
{
    static struct bench b;
    struct dsc_fetch_plan view;
    int64_t n = -7;

    TEST_CASE("errors of calls");
    plan_steps(&b, "0123", INT64_MAX, 0);
    view = view_of(&b);
    CHECK_ERROR(dsc_fetch_use(&b.fetch, 0, 12, b.actions, &n), DSC_ESTATE, "begin");
    CHECK_ERROR(dsc_fetch_end(&b.fetch, -1, 12, b.actions, &n), DSC_ESTATE, "begin");
    CHECK_ERROR(dsc_fetch_begin(NULL, &view, NULL, &b.record), DSC_EINVAL, "fetch");
    CHECK_ERROR(dsc_fetch_begin(&b.fetch, NULL, NULL, &b.record), DSC_EINVAL, "plan");
    CHECK_ERROR(dsc_fetch_begin(&b.fetch, &view, NULL, NULL), DSC_EINVAL, "record");
    begin(&b, NULL);
    CHECK_ERROR(dsc_fetch_begin(&b.fetch, &view, NULL, &b.record), DSC_ESTATE, "end or abort");
    for (int32_t unit = -1; unit <= 4; unit += 5) {
        CHECK_ERROR(dsc_fetch_use(&b.fetch, unit, 12, b.actions, &n), DSC_EINVAL, "must be 0 to 3");
        if (unit != -1)
            CHECK_ERROR(dsc_fetch_end(&b.fetch, unit, 12, b.actions, &n), DSC_EINVAL, "must be -1 to 3");
    }
    CHECK_ERROR(dsc_fetch_end(&b.fetch, -2, 12, b.actions, &n), DSC_EINVAL, "must be -1 to 3");
    CHECK_ERROR(dsc_fetch_use(NULL, 0, 12, b.actions, &n), DSC_EINVAL, "fetch");
    CHECK_ERROR(dsc_fetch_use(&b.fetch, 0, 12, b.actions, NULL), DSC_EINVAL, "out_n");
    CHECK_ERROR(dsc_fetch_use(&b.fetch, 0, -1, b.actions, &n), DSC_EINVAL, "capacity");
    CHECK_ERROR(dsc_fetch_use(&b.fetch, 0, 7, b.actions, &n), DSC_EINVAL, "may need 9; 3 * n_steps + n_units = 16");
    CHECK_ERROR(dsc_fetch_use(&b.fetch, 0, 12, NULL, &n), DSC_EINVAL, "may need 9");
    b.record.capacity = 1;
    CHECK_ERROR(dsc_fetch_use(&b.fetch, 1, 12, b.actions, &n), DSC_EOVERFLOW, "at most 1 steps, 2 more");
    CHECK_EQ(b.fetch.cursor, 0);
    CHECK_EQ(n, -7);
    use(&b, 0); /* the refused calls have changed nothing */
    check_actions(&b, "+0 +1 +2 +3");
    CHECK_ERROR(dsc_fetch_end(&b.fetch, -1, 12, b.actions, &n), DSC_EOVERFLOW, "3 more");
    CHECK_ERROR(dsc_fetch_abort(&b.fetch, 3, b.actions, &n), DSC_EINVAL, "may need 4");
    CHECK_EQ(b.record.n_steps, 1);
    b.record.capacity = 4;
    end(&b, -1);
    check_actions(&b, "-0 -1 -2 -3");

    TEST_CASE("no room for an unexpected unit");
    plan_steps(&b, "", 0, 0);
    b.record.capacity = 1;
    begin(&b, NULL);
    CHECK_ERROR(dsc_fetch_use(&b.fetch, 2, 0, b.actions, &n), DSC_EINVAL, "may need 1");
    use(&b, 2);
    CHECK_ERROR(dsc_fetch_use(&b.fetch, 3, 1, b.actions, &n), DSC_EINVAL, "may need 2");
    CHECK_ERROR(dsc_fetch_use(&b.fetch, 3, 4, b.actions, &n), DSC_EOVERFLOW, "1 more");
    CHECK_EQ(b.fetch.unexpected_unit, 2);
    CHECK_EQ(b.fetch.n_unexpected, 1);
    end(&b, -1);
    check_actions(&b, "-2");
}

/* Impossible plans are refused, and leave the runner unchanged. */
static void test_damaged_plans(void)
{
    static struct bench b;
    const int64_t bad_elems[] = {1, -1};
    const int64_t huge_elems[] = {INT64_MAX, 1};
    struct dsc_fetch untouched = {.n_units = -7};
    struct dsc_fetch_plan view;

    TEST_CASE("errors of init");
    CHECK_ERROR(dsc_fetch_init(NULL, b.unit_elems, 1, b.units), DSC_EINVAL, "fetch");
    CHECK_ERROR(dsc_fetch_init(&untouched, b.unit_elems, -1, b.units), DSC_EINVAL, "n_units");
    CHECK_ERROR(dsc_fetch_init(&untouched, NULL, 1, b.units), DSC_EINVAL, "unit_elems");
    CHECK_ERROR(dsc_fetch_init(&untouched, b.unit_elems, 1, NULL), DSC_EINVAL, "units");
    CHECK_ERROR(dsc_fetch_init(&untouched, bad_elems, 2, b.units), DSC_EINVAL, "unit_elems[1] is -1");
    CHECK_ERROR(dsc_fetch_init(&untouched, huge_elems, 2, b.units), DSC_EOVERFLOW, "units 0 to 1");
    CHECK_EQ(untouched.n_units, -7);
    CHECK_STATUS(dsc_fetch_init(&untouched, NULL, 0, NULL), DSC_OK);

    TEST_CASE("damaged plans");
    for (int damage = 0; damage < 9; damage++) {
        static const char *const words[] = {"steps[1] is 4",    "steps[1] is -1",      "until[2] is 2", "until[3] is 5", "until[1] is 4",
                                            "next[0] is 3, the next step of unit 0 is 2", "next[3]",       "n_steps is -1", "NULL"};

        plan_steps(&b, "0102", 0, 0);
        CHECK_EQ(b.until[0], 1);
        b.until[2] = 3;
        view = view_of(&b);
        switch (damage) {
        case 0: b.steps[1] = 4; break;
        case 1: b.steps[1] = -1; break;
        case 2: b.until[2] = 2; break;
        case 3: b.until[3] = 5; break;
        case 4: b.until[1] = 4; break; /* more than until[2] */
        case 5: b.next[0] = 3; break;
        case 6: b.next[3] = INT64_MAX; break;
        case 7: view.n_steps = -1; break;
        default: view.next = NULL;
        }
        CHECK_ERROR(dsc_fetch_begin(&b.fetch, &view, NULL, &b.record), DSC_EINVAL, words[damage]);
        CHECK(!b.fetch.is_active);
    }
}

/* A use takes constant time, both for a unit far ahead in the plan and for units that are not in the plan. */
static void test_long_pass(void)
{
    enum { N_UNITS = 400, N_PLANNED = 300 };
    int32_t *steps = test_alloc(LONG_STEPS * sizeof *steps);
    int64_t *scratch = test_alloc((4 * LONG_STEPS + 2 * N_UNITS) * sizeof *scratch);
    int64_t *until = test_alloc(LONG_STEPS * sizeof *until);
    int64_t *next = test_alloc(LONG_STEPS * sizeof *next);
    uint8_t *keep = test_alloc(LONG_STEPS);
    int32_t *record_units = test_alloc(2 * LONG_STEPS * sizeof *record_units);
    uint8_t *record_is_used = test_alloc(2 * LONG_STEPS);
    int64_t capacity = 2 * LONG_STEPS + N_UNITS;
    struct dsc_fetch_action *actions = test_alloc((size_t)capacity * sizeof *actions);
    struct dsc_fetch_unit units[N_UNITS];
    int64_t unit_elems[N_UNITS];
    struct dsc_prefetch_limits limits = DSC_PREFETCH_LIMITS_INIT;
    struct dsc_fetch_plan plan = {steps, until, next, keep, LONG_STEPS};
    struct dsc_fetch fetch;
    struct dsc_trace record;
    int64_t peak = 0;
    int64_t n = 0;

    TEST_CASE("%d steps", LONG_STEPS);
    for (int32_t u = 0; u < N_UNITS; u++)
        unit_elems[u] = u;
    for (int64_t i = 0; i < LONG_STEPS; i++)
        steps[i] = (int32_t)(i % N_PLANNED);
    limits.ahead_elems = 2000;
    limits.max_reuse_elems = 2000;
    CHECK_STATUS(dsc_prefetch_plan(steps, LONG_STEPS, unit_elems, N_UNITS, &limits, scratch, until, next, keep, &peak), DSC_OK);
    CHECK_STATUS(dsc_fetch_init(&fetch, unit_elems, N_UNITS, units), DSC_OK);
    CHECK_STATUS(dsc_trace_init(&record, record_units, record_is_used, 2 * LONG_STEPS), DSC_OK);
    CHECK_STATUS(dsc_fetch_begin(&fetch, &plan, NULL, &record), DSC_OK);
    for (int64_t i = 0; i < LONG_STEPS; i++) { /* alternately a planned unit and a missing one */
        CHECK_STATUS(dsc_fetch_use(&fetch, i % 2 == 0 ? steps[i] : (int32_t)(N_PLANNED + i % 100), capacity, actions, &n), DSC_OK);
        CHECK(n <= 200);
    }
    CHECK_EQ(fetch.n_unexpected, LONG_STEPS / 2);
    CHECK_STATUS(dsc_fetch_end(&fetch, -1, capacity, actions, &n), DSC_OK);
    CHECK_EQ(record.n_steps, LONG_STEPS + LONG_STEPS / 2);
    free(actions);
    free(record_is_used);
    free(record_units);
    free(keep);
    free(next);
    free(until);
    free(scratch);
    free(steps);
}

int main(void)
{
    test_subsequences();
    test_any_uses();
    test_learning();
    test_known_passes();
    test_other_keeps();
    test_call_errors();
    test_damaged_plans();
    test_long_pass();
    return test_finish(__FILE__);
}
