/* Assigns kinds of states to memories by exhaustive search. */
#include "dsc/tier.h"

#include "base/fail.h"

#include <stdio.h>
#include <string.h>

static const char *const memory_names[DSC_N_TIERS] = {"device", "host", "NVMe"};

/*
 * The goals by which placements are compared, in this order. Each goal only grows as kinds are added, so a partial
 * placement gives a lower bound for every completion.
 */
enum { MISSING, DISK, LINK, IN_NVME, IN_HOST, N_GOALS };

struct search {
    const struct dsc_tier_kind *kinds;
    const int64_t *budget_bytes;
    int32_t n_kinds;
    int32_t tiers[DSC_TIER_MAX_KINDS];
    int64_t held_bytes[DSC_N_TIERS];
    int64_t link_bytes;
    int64_t disk_bytes;
    bool has_best;
    int64_t best_goals[N_GOALS];
    struct dsc_tier_plan best;
};

static dsc_status check_kind(const struct dsc_tier_kind *kind, int32_t index)
{
    for (int t = 0; t < DSC_N_TIERS; t++)
        for (int m = 0; m < DSC_N_TIERS; m++)
            if (kind->held_bytes[t][m] < 0)
                return dsc_fail(DSC_EINVAL, "kinds[%d].held_bytes[%d][%d] is %lld, must not be negative", (int)index, t,
                                m, (long long)kind->held_bytes[t][m]);
    if (kind->link_bytes < 0)
        return dsc_fail(DSC_EINVAL, "kinds[%d].link_bytes is %lld, must not be negative", (int)index,
                        (long long)kind->link_bytes);
    if (kind->disk_bytes < 0)
        return dsc_fail(DSC_EINVAL, "kinds[%d].disk_bytes is %lld, must not be negative", (int)index,
                        (long long)kind->disk_bytes);
    if (kind->lowest < 0 || kind->lowest >= DSC_N_TIERS)
        return dsc_fail(DSC_EINVAL, "kinds[%d].lowest is %d, which is no tier", (int)index, (int)kind->lowest);
    if (kind->follows < -1 || kind->follows >= index)
        return dsc_fail(DSC_EINVAL, "kinds[%d].follows is %d, must be -1 or an earlier kind", (int)index,
                        (int)kind->follows);
    return DSC_OK;
}

/* Checks that all sums fit int64_t for every placement, so that the search need not check additions. */
static dsc_status check_sums(const struct dsc_tier_kind *kinds, int32_t n_kinds)
{
    int64_t total = 0;

    for (int32_t i = 0; i < n_kinds; i++) {
        bool is_over = __builtin_add_overflow(total, kinds[i].link_bytes, &total) ||
                       __builtin_add_overflow(total, kinds[i].disk_bytes, &total);

        for (int t = 0; t < DSC_N_TIERS && !is_over; t++)
            for (int m = 0; m < DSC_N_TIERS && !is_over; m++)
                is_over = __builtin_add_overflow(total, kinds[i].held_bytes[t][m], &total);
        if (is_over)
            return dsc_fail(DSC_EOVERFLOW, "the bytes of the first %d kinds do not add up in int64_t", (int)(i + 1));
    }
    return DSC_OK;
}

static void find_missing(const struct search *s, int64_t missing[DSC_N_TIERS])
{
    for (int m = 0; m < DSC_N_TIERS; m++)
        missing[m] = s->held_bytes[m] > s->budget_bytes[m] ? s->held_bytes[m] - s->budget_bytes[m] : 0;
}

static bool is_better(const struct search *s, const int64_t goals[N_GOALS])
{
    if (!s->has_best)
        return true;
    for (int i = 0; i < N_GOALS; i++)
        if (goals[i] != s->best_goals[i])
            return goals[i] < s->best_goals[i];
    return false;
}

/* Puts a kind into a tier (sign 1), or takes it out again (sign -1). */
static void move(struct search *s, const struct dsc_tier_kind *kind, int32_t tier, int sign)
{
    for (int m = 0; m < DSC_N_TIERS; m++)
        s->held_bytes[m] += sign * kind->held_bytes[tier][m];
    if (tier > DSC_TIER_DEVICE)
        s->link_bytes += sign * kind->link_bytes;
    if (tier == DSC_TIER_NVME)
        s->disk_bytes += sign * kind->disk_bytes;
}

static void keep(struct search *s, const int64_t goals[N_GOALS], const int64_t missing[DSC_N_TIERS])
{
    s->has_best = true;
    memcpy(s->best_goals, goals, sizeof s->best_goals);
    memset(&s->best, 0, sizeof s->best);
    memcpy(s->best.tiers, s->tiers, (size_t)s->n_kinds * sizeof s->tiers[0]);
    memcpy(s->best.held_bytes, s->held_bytes, sizeof s->held_bytes);
    memcpy(s->best.missing_bytes, missing, sizeof s->best.missing_bytes);
    s->best.link_bytes = s->link_bytes;
    s->best.disk_bytes = s->disk_bytes;
}

/* Places kinds index.. in all ways, fast tiers first; the recursion is as deep as there are kinds. */
static void place_from(struct search *s, int32_t index)
{
    int64_t missing[DSC_N_TIERS];

    find_missing(s, missing);

    const int64_t goals[N_GOALS] = {
        [MISSING] = missing[0] + missing[1] + missing[2],
        [DISK] = s->disk_bytes,
        [LINK] = s->link_bytes,
        [IN_NVME] = s->held_bytes[DSC_TIER_NVME],
        [IN_HOST] = s->held_bytes[DSC_TIER_HOST],
    };

    if (!is_better(s, goals)) /* nor is any other placement with the same beginning */
        return;
    if (index == s->n_kinds) {
        keep(s, goals, missing);
        return;
    }

    const struct dsc_tier_kind *kind = &s->kinds[index];
    int32_t first = DSC_TIER_DEVICE;
    int32_t last = kind->lowest;

    if (kind->follows >= 0) {
        int32_t leader = s->tiers[kind->follows];

        first = last = leader < kind->lowest ? leader : kind->lowest;
    }
    for (int32_t tier = first; tier <= last; tier++) {
        s->tiers[index] = tier;
        move(s, kind, tier, 1);
        place_from(s, index + 1);
        move(s, kind, tier, -1);
    }
}

static dsc_status fail_for_room(const struct dsc_tier_plan *plan, const int64_t *budget_bytes)
{
    char sentence[320] = "";
    size_t n = 0;

    for (int m = 0; m < DSC_N_TIERS; m++)
        if (plan->missing_bytes[m] > 0)
            n += (size_t)snprintf(sentence + n, sizeof sentence - n, "%s%s lacks %lld bytes (%lld of %lld)",
                                  n ? ", " : "", memory_names[m], (long long)plan->missing_bytes[m],
                                  (long long)plan->held_bytes[m], (long long)budget_bytes[m]);
    return dsc_fail(DSC_ENOSPC, "the states fit no placement; the nearest: %s", sentence);
}

dsc_status dsc_tier_plan(const struct dsc_tier_kind *kinds, int32_t n_kinds, const int64_t budget_bytes[DSC_N_TIERS],
                         struct dsc_tier_plan *out)
{
    if (n_kinds < 0 || n_kinds > DSC_TIER_MAX_KINDS)
        return dsc_fail(DSC_EINVAL, "n_kinds is %d, must be 0 to %d", (int)n_kinds, DSC_TIER_MAX_KINDS);
    if ((kinds == NULL && n_kinds > 0) || budget_bytes == NULL || out == NULL)
        return dsc_fail(DSC_EINVAL, "%s is NULL",
                        budget_bytes == NULL ? "budget_bytes"
                        : out == NULL        ? "out"
                                             : "kinds");
    for (int m = 0; m < DSC_N_TIERS; m++)
        if (budget_bytes[m] < 0)
            return dsc_fail(DSC_EINVAL, "budget_bytes[%d] is %lld, must not be negative", m,
                            (long long)budget_bytes[m]);
    for (int32_t i = 0; i < n_kinds; i++)
        DSC_TRY(check_kind(&kinds[i], i));
    DSC_TRY(check_sums(kinds, n_kinds));

    struct search s = {.kinds = kinds, .budget_bytes = budget_bytes, .n_kinds = n_kinds};

    place_from(&s, 0);
    *out = s.best;
    return s.best_goals[MISSING] > 0 ? fail_for_room(out, budget_bytes) : DSC_OK;
}
