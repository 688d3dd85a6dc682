/* dsc_tier_plan against every placement of up to four kinds, and dsc_twin_flow_ratio on any numbers: a part between 0 and 1 whose rest fits the device. */
#include "fuzz.h"

#include "dsc/tier.h"

#include <math.h>

#define MAX_KINDS 4
#define N_GOALS 5

/* The goals that compare two placements, in order of priority (dsc/tier.h). False for a forbidden placement. */
static bool judge(const struct dsc_tier_kind *kinds, int32_t n_kinds, const int64_t *budget, const int32_t *tiers, int64_t *goals)
{
    int64_t held[DSC_N_TIERS] = {0};

    memset(goals, 0, N_GOALS * sizeof *goals);
    for (int32_t i = 0; i < n_kinds; i++) {
        if (tiers[i] > kinds[i].lowest)
            return false;
        if (kinds[i].follows >= 0) {
            int32_t followed = tiers[kinds[i].follows];

            if (tiers[i] != (followed < kinds[i].lowest ? followed : kinds[i].lowest))
                return false;
        }
        for (int m = 0; m < DSC_N_TIERS; m++)
            held[m] += kinds[i].held_bytes[tiers[i]][m];
        goals[1] += tiers[i] == DSC_TIER_NVME ? kinds[i].disk_bytes : 0;
        goals[2] += tiers[i] != DSC_TIER_DEVICE ? kinds[i].link_bytes : 0;
    }
    for (int m = 0; m < DSC_N_TIERS; m++)
        goals[0] += held[m] > budget[m] ? held[m] - budget[m] : 0;
    goals[3] = held[DSC_TIER_NVME];
    goals[4] = held[DSC_TIER_HOST];
    return true;
}

/* Below 0 when a is the better one. */
static int compare(const int64_t *a, const int32_t *a_tiers, const int64_t *b, const int32_t *b_tiers, int32_t n_kinds)
{
    for (int g = 0; g < N_GOALS; g++)
        if (a[g] != b[g])
            return a[g] < b[g] ? -1 : 1;
    for (int32_t i = 0; i < n_kinds; i++)
        if (a_tiers[i] != b_tiers[i])
            return a_tiers[i] < b_tiers[i] ? -1 : 1;
    return 0;
}

static void fuzz_plan(struct input *input, bool is_wild)
{
    struct dsc_tier_kind kinds[MAX_KINDS];
    int64_t budget[DSC_N_TIERS];
    int32_t n_kinds = (int32_t)take_below(input, MAX_KINDS + 1);
    struct dsc_tier_plan plan;
    struct dsc_tier_plan before;
    dsc_status status;

    for (int32_t i = 0; i < n_kinds; i++) {
        for (int t = 0; t < DSC_N_TIERS; t++)
            for (int m = 0; m < DSC_N_TIERS; m++)
                kinds[i].held_bytes[t][m] = is_wild ? take_wild(input) : take_below(input, t == m ? 9 : 3);
        kinds[i].link_bytes = is_wild ? take_wild(input) : take_below(input, 5);
        kinds[i].disk_bytes = is_wild ? take_wild(input) : take_below(input, 5);
        kinds[i].lowest = is_wild ? (int32_t)take_wild(input) : (int32_t)take_below(input, DSC_N_TIERS);
        kinds[i].follows = is_wild ? (int32_t)take_wild(input) : (int32_t)take_below(input, i + 1) - 1;
    }
    for (int m = 0; m < DSC_N_TIERS; m++)
        budget[m] = is_wild ? take_wild(input) : take_below(input, 20);
    memset(&plan, 0x5a, sizeof plan);
    before = plan;
    status = dsc_tier_plan(kinds, n_kinds, budget, &plan);
    if (status != DSC_OK && status != DSC_ENOSPC) {
        REQUIRE(is_wild && memcmp(&plan, &before, sizeof plan) == 0);
        return;
    }

    int64_t goals[N_GOALS];
    int64_t other_goals[N_GOALS];
    int32_t tiers[MAX_KINDS] = {0};
    int64_t held[DSC_N_TIERS] = {0};

    REQUIRE(judge(kinds, n_kinds, budget, plan.tiers, goals));
    REQUIRE((goals[0] == 0) == (status == DSC_OK));
    REQUIRE(plan.disk_bytes == goals[1] && plan.link_bytes == goals[2]);
    for (int m = 0; m < DSC_N_TIERS; m++) {
        for (int32_t i = 0; i < n_kinds; i++)
            held[m] += kinds[i].held_bytes[plan.tiers[i]][m];
        REQUIRE(plan.held_bytes[m] == held[m]);
        REQUIRE(plan.missing_bytes[m] == (held[m] > budget[m] ? held[m] - budget[m] : 0));
    }
    for (;;) { /* counts in base 3 */
        int32_t i = 0;

        if (judge(kinds, n_kinds, budget, tiers, other_goals))
            REQUIRE(compare(goals, plan.tiers, other_goals, tiers, n_kinds) <= 0);
        while (i < n_kinds && ++tiers[i] == DSC_N_TIERS)
            tiers[i++] = 0;
        if (i == n_kinds)
            return;
    }
}

/* Any bits, or a rate that is likely to be good. */
static double take_rate(struct input *input)
{
    uint8_t kind = take_byte(input);
    int64_t bits = take_wild(input);
    double value;

    if (kind % 4 != 0)
        return ldexp(1.0 + (double)(bits & 1023) / 1024, kind % 64 - 16);
    memcpy(&value, &bits, sizeof value);
    return value;
}

static void fuzz_ratio(struct input *input)
{
    struct dsc_twin_flow flow = {
        .n_elems = take_byte(input) % 2 == 0 ? take_below(input, 60000) : take_wild(input),
        .device_elems_per_s = take_rate(input),
        .host_elems_per_s = take_rate(input),
        .link_bytes_per_s = take_rate(input),
        .link_bytes_per_elem = take_rate(input),
        .state_bytes_per_elem = 1 + take_below(input, 20),
        .device_bytes = take_byte(input) % 2 == 0 ? take_below(input, 60000) : take_wild(input),
    };
    double ratio = -7;
    double step_s = -7;

    if (dsc_twin_flow_ratio(&flow, &ratio, &step_s) != DSC_OK) {
        REQUIRE(ratio == -7 && step_s == -7);
        return;
    }
    REQUIRE(ratio >= 0 && ratio <= 1 && step_s >= 0 && isfinite(step_s));
    /* The rest of at most 2^50 elements is exact in f64, up to the last place of 1 - ratio. */
    REQUIRE(floor((1 - ratio) * (double)flow.n_elems) * (double)flow.state_bytes_per_elem <= (double)flow.device_bytes);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes)
{
    struct input input = {data, n_bytes};

    switch (take_byte(&input) % 4) {
    case 0:
    case 1:
        fuzz_plan(&input, false);
        break;
    case 2:
        fuzz_plan(&input, true);
        break;
    default:
        fuzz_ratio(&input);
    }
    return 0;
}
