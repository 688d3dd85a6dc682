/*
 * zero/tier.c against the header's definition: tries every placement of a short list, and compares the goals in their
 * order.
 */
#include "test.h"

#include "dsc/tier.h"

#define MAX_KINDS 6

struct outcome {
    int64_t goals[5]; /* missing, disk, link, in NVMe, in host */
    int64_t held[DSC_N_TIERS];
    int64_t missing[DSC_N_TIERS];
};

static bool is_allowed(const struct dsc_tier_kind *kinds, int32_t n, const int32_t *tiers)
{
    for (int32_t i = 0; i < n; i++) {
        if (tiers[i] > kinds[i].lowest)
            return false;
        if (kinds[i].follows >= 0) {
            int32_t leader = tiers[kinds[i].follows];

            if (tiers[i] != (leader < kinds[i].lowest ? leader : kinds[i].lowest))
                return false;
        }
    }
    return true;
}

static struct outcome judge(const struct dsc_tier_kind *kinds, int32_t n, const int64_t *budget, const int32_t *tiers)
{
    struct outcome o = {0};

    for (int32_t i = 0; i < n; i++) {
        for (int m = 0; m < DSC_N_TIERS; m++)
            o.held[m] += kinds[i].held_bytes[tiers[i]][m];
        o.goals[1] += tiers[i] == DSC_TIER_NVME ? kinds[i].disk_bytes : 0;
        o.goals[2] += tiers[i] != DSC_TIER_DEVICE ? kinds[i].link_bytes : 0;
    }
    for (int m = 0; m < DSC_N_TIERS; m++) {
        o.missing[m] = o.held[m] > budget[m] ? o.held[m] - budget[m] : 0;
        o.goals[0] += o.missing[m];
    }
    o.goals[3] = o.held[DSC_TIER_NVME];
    o.goals[4] = o.held[DSC_TIER_HOST];
    return o;
}

static void check_against_all(const struct dsc_tier_kind *kinds, int32_t n, const int64_t *budget)
{
    int32_t tiers[MAX_KINDS] = {0};
    int32_t best_tiers[MAX_KINDS] = {0};
    struct outcome best = {{INT64_MAX}, {0}, {0}};

    for (bool is_done = false; !is_done;) { /* counts in base 3 with the first kind as the highest digit */
        if (is_allowed(kinds, n, tiers)) {
            struct outcome o = judge(kinds, n, budget, tiers);

            for (int g = 0; g < 5; g++) {
                if (o.goals[g] > best.goals[g])
                    break;
                if (o.goals[g] < best.goals[g]) {
                    best = o;
                    memcpy(best_tiers, tiers, sizeof tiers);
                    break;
                }
            }
        }

        int32_t i = n - 1;

        while (i >= 0 && ++tiers[i] == DSC_N_TIERS)
            tiers[i--] = 0;
        is_done = i < 0;
    }

    struct dsc_tier_plan plan;
    bool fits = best.goals[0] == 0;

    CHECK_STATUS(dsc_tier_plan(kinds, n, budget, &plan), fits ? DSC_OK : DSC_ENOSPC);
    for (int32_t i = 0; i < n; i++)
        CHECK_EQ(plan.tiers[i], best_tiers[i]);
    for (int m = 0; m < DSC_N_TIERS; m++) {
        CHECK_EQ(plan.held_bytes[m], best.held[m]);
        CHECK_EQ(plan.missing_bytes[m], best.missing[m]);
        if (best.missing[m] > 0) { /* the message names the number of missing bytes */
            char number[64];

            snprintf(number, sizeof number, "lacks %" PRId64 " bytes", best.missing[m]);
            CHECK(strstr(dsc_last_error(), number) != NULL);
        }
    }
    CHECK_EQ(plan.disk_bytes, best.goals[1]);
    CHECK_EQ(plan.link_bytes, best.goals[2]);
}

static struct dsc_tier_kind simple(int64_t n_bytes, int64_t link_bytes, int64_t disk_bytes, int32_t lowest)
{
    struct dsc_tier_kind kind = {.link_bytes = link_bytes, .disk_bytes = disk_bytes, .lowest = lowest, .follows = -1};

    for (int t = 0; t < DSC_N_TIERS; t++)
        kind.held_bytes[t][t] = n_bytes;
    return kind;
}

static void test_random_lists(void)
{
    uint64_t random = 5;
    int n_full = 0;
    int n_kept[DSC_N_TIERS] = {0};

    for (int round = 0; round < 3000; round++) {
        struct dsc_tier_kind kinds[MAX_KINDS];
        int64_t budget[DSC_N_TIERS];
        int32_t n = (int32_t)(1 + test_below(&random, MAX_KINDS));
        int64_t limit = round % 4 == 0 ? 3 : 40; /* many ties, many zeros */

        for (int32_t i = 0; i < n; i++) {
            kinds[i] = simple(test_below(&random, limit), test_below(&random, limit), test_below(&random, limit),
                              (int32_t)test_below(&random, DSC_N_TIERS));
            if (round % 3 == 0) /* buffers, and bytes left behind */
                for (int t = 0; t < DSC_N_TIERS; t++)
                    kinds[i].held_bytes[t][test_below(&random, DSC_N_TIERS)] += test_below(&random, 4);
            if (i > 0 && test_below(&random, 3) == 0)
                kinds[i].follows = (int32_t)test_below(&random, i);
        }
        for (int m = 0; m < DSC_N_TIERS; m++)
            budget[m] = test_below(&random, 9) == 0 ? INT64_MAX : test_below(&random, m == DSC_TIER_NVME ? 2 * limit * n : limit * n / 3 + 1);
        TEST_CASE("round %d: %d kinds, budgets %lld %lld %lld", round, (int)n, (long long)budget[0], (long long)budget[1],
                  (long long)budget[2]);
        check_against_all(kinds, n, budget);

        struct dsc_tier_plan plan;

        n_full += dsc_tier_plan(kinds, n, budget, &plan) == DSC_ENOSPC;
        for (int32_t i = 0; i < n; i++)
            n_kept[plan.tiers[i]]++;
    }
    TEST_CASE("the lists are of all sorts");
    CHECK(n_full > 300 && n_full < 2700);
    for (int t = 0; t < DSC_N_TIERS; t++)
        test_report(n_kept[t] > 300, __FILE__, __LINE__, "%d kinds live in tier %d", n_kept[t], t);
}

/* The states of a training run, in bytes an element: weights 2, master weights 4, moments 8, gradients 2. */
static void test_a_run(void)
{
    const int64_t n = 1000;
    const int64_t many = INT64_MAX;
    struct dsc_tier_kind kinds[] = {
        simple(2 * n, 4 * n, 0, DSC_TIER_HOST),
        simple(4 * n, 2 * n, 8 * n, DSC_TIER_NVME),
        simple(8 * n, 0, 16 * n, DSC_TIER_NVME),
        simple(2 * n, 2 * n, 0, DSC_TIER_HOST),
    };

    kinds[2].follows = kinds[3].follows = 1;
    kinds[1].held_bytes[DSC_TIER_NVME][DSC_TIER_HOST] = 50; /* buffers */

    const struct {
        int64_t budget[DSC_N_TIERS];
        int32_t tiers[4];
    } cases[] = {
        {{16 * n, 0, 0}, {0, 0, 0, 0}},
        {{16 * n - 1, many, many}, {1, 0, 0, 0}}, /* equal load on the link, but the least host memory */
        {{14 * n - 1, many, many}, {0, 1, 1, 1}},
        {{2 * n - 1, many, many}, {1, 1, 1, 1}},
        {{2 * n, 14 * n, many}, {0, 1, 1, 1}},
        {{2 * n, 14 * n - 1, many}, {0, 2, 2, 1}},
        {{2 * n, 2 * n + 50, many}, {0, 2, 2, 1}},
        {{0, 4 * n + 50, 12 * n}, {1, 2, 2, 1}},
    };
    struct dsc_tier_plan plan;

    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        TEST_CASE("run %d", (int)i);
        CHECK_STATUS(dsc_tier_plan(kinds, 4, cases[i].budget, &plan), DSC_OK);
        for (int k = 0; k < 4; k++)
            CHECK_EQ(plan.tiers[k], cases[i].tiers[k]);
    }
    TEST_CASE("a run that fits nowhere");

    const int64_t little[] = {0, 4 * n + 49, 12 * n - 3};

    CHECK_ERROR(dsc_tier_plan(kinds, 4, little, &plan), DSC_ENOSPC, "host lacks 1 bytes (4050 of 4049), NVMe lacks 3 bytes (12000 of 11997)");
    CHECK_EQ(plan.missing_bytes[0], 0);
    CHECK_EQ(plan.missing_bytes[1], 1);
    CHECK_EQ(plan.missing_bytes[2], 3);
}

static void test_limits(void)
{
    const int64_t none[DSC_N_TIERS] = {0, 0, 0};
    const int64_t all[DSC_N_TIERS] = {INT64_MAX, INT64_MAX, INT64_MAX};
    const int64_t negative[DSC_N_TIERS] = {0, -1, 0};
    struct dsc_tier_kind kinds[DSC_TIER_MAX_KINDS + 1];
    struct dsc_tier_plan plan = {.link_bytes = -7};

    TEST_CASE("limits");
    CHECK_STATUS(dsc_tier_plan(NULL, 0, none, &plan), DSC_OK);
    CHECK_EQ(plan.link_bytes, 0);
    for (int i = 0; i <= DSC_TIER_MAX_KINDS; i++)
        kinds[i] = simple(0, 0, 0, DSC_TIER_NVME);
    CHECK_STATUS(dsc_tier_plan(kinds, DSC_TIER_MAX_KINDS, none, &plan), DSC_OK); /* nothing fits nowhere */
    CHECK_EQ(plan.tiers[DSC_TIER_MAX_KINDS - 1], DSC_TIER_DEVICE);
    for (int i = 0; i < DSC_TIER_MAX_KINDS; i++)
        kinds[i] = simple(1 + i, 1, 2, DSC_TIER_NVME);
    CHECK_STATUS(dsc_tier_plan(kinds, DSC_TIER_MAX_KINDS, (const int64_t[]){50, 40, 46}, &plan), DSC_OK); /* 1 + ... + 16 = 136: packed */
    CHECK_EQ(plan.held_bytes[0] + plan.held_bytes[1] + plan.held_bytes[2], 136);

    plan.link_bytes = -7;
    CHECK_ERROR(dsc_tier_plan(kinds, -1, all, &plan), DSC_EINVAL, "n_kinds is -1");
    CHECK_ERROR(dsc_tier_plan(kinds, DSC_TIER_MAX_KINDS + 1, all, &plan), DSC_EINVAL, "n_kinds is 17");
    CHECK_ERROR(dsc_tier_plan(NULL, 1, all, &plan), DSC_EINVAL, "kinds is NULL");
    CHECK_ERROR(dsc_tier_plan(kinds, 1, NULL, &plan), DSC_EINVAL, "budget_bytes is NULL");
    CHECK_ERROR(dsc_tier_plan(kinds, 1, all, NULL), DSC_EINVAL, "out is NULL");
    CHECK_ERROR(dsc_tier_plan(kinds, 1, negative, &plan), DSC_EINVAL, "budget_bytes[1] is -1");

    const struct {
        struct dsc_tier_kind kind;
        dsc_status status;
        const char *word;
    } bad[] = {
        {simple(-1, 0, 0, 0), DSC_EINVAL, "kinds[1].held_bytes[0][0] is -1"},
        {simple(0, -2, 0, 0), DSC_EINVAL, "kinds[1].link_bytes is -2"},
        {simple(0, 0, -3, 0), DSC_EINVAL, "kinds[1].disk_bytes is -3"},
        {simple(0, 0, 0, -1), DSC_EINVAL, "kinds[1].lowest is -1"},
        {simple(0, 0, 0, 3), DSC_EINVAL, "kinds[1].lowest is 3"},
        {simple(INT64_MAX, 0, 0, 0), DSC_EOVERFLOW, "first 2 kinds"},
        {simple(0, INT64_MAX, 0, 0), DSC_EOVERFLOW, "first 2 kinds"},
        {simple(0, 0, INT64_MAX, 0), DSC_EOVERFLOW, "first 2 kinds"},
    };

    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        TEST_CASE("bad kind %d", (int)i);
        kinds[1] = bad[i].kind;
        CHECK_ERROR(dsc_tier_plan(kinds, 3, all, &plan), bad[i].status, bad[i].word);
    }
    kinds[1] = simple(1, 1, 1, 0);
    for (int32_t follows = -2; follows <= 2; follows++) {
        kinds[1].follows = follows;
        TEST_CASE("follows %d", (int)follows);
        if (follows == -1 || follows == 0)
            continue;
        CHECK_ERROR(dsc_tier_plan(kinds, 3, all, &plan), DSC_EINVAL, "kinds[1].follows");
    }
    CHECK_EQ(plan.link_bytes, -7); /* untouched */
    kinds[0] = simple((INT64_MAX - 9) / 3, 0, 0, DSC_TIER_NVME);
    CHECK_STATUS(dsc_tier_plan(kinds, 1, all, &plan), DSC_OK); /* the largest size that does not overflow */
}

int main(void)
{
    test_random_lists();
    test_a_run();
    test_limits();
    return test_finish(__FILE__);
}
