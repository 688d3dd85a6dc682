/*
 * A slow implementation of the rules of dsc/fetch.h, for the tests and the fuzz target. Sets are arrays of flags, and
 * sums and distances are computed anew each time. A check returns NULL, or the broken rule with the numbers.
 */
#ifndef DSC_TEST_BRUTE_PLAN_H
#define DSC_TEST_BRUTE_PLAN_H

#include "dsc/fetch.h"

#include <stdio.h>

#define BRUTE_MAX_UNITS 512
#define BRUTE_MAX_STEPS 64 /* of brute_reuse */

/* A planning problem and its answer. */
struct brute_plan {
    const int32_t *steps;
    int64_t n_steps;
    const int64_t *unit_elems;
    int32_t n_units;
    struct dsc_prefetch_limits limits;
    const int64_t *until;
    const int64_t *next;
    const uint8_t *keep;
    int64_t peak_elems;
};

static char brute_text[256];

#define BRUTE_RULE(condition, ...)                                     \
    do {                                                               \
        if (!(condition)) {                                            \
            snprintf(brute_text, sizeof brute_text, __VA_ARGS__);      \
            return brute_text;                                         \
        }                                                              \
    } while (0)

static inline int64_t brute_sum(const struct brute_plan *p, const bool *is_in)
{
    int64_t sum = 0;

    for (int32_t u = 0; u < p->n_units; u++)
        sum += is_in[u] ? p->unit_elems[u] : 0;
    return sum;
}

/* a + b <= limit, wherever the sum would lie. */
static inline bool brute_fits(int64_t a, int64_t b, int64_t limit)
{
    return (__int128)a + b <= limit;
}

/*
 * Walks the plan like a runner that uses every step. Checks the two limits at each step, that until is as large as the
 * limits allow, and the peak.
 */
static inline const char *brute_walk(const struct brute_plan *p)
{
    bool is_live[BRUTE_MAX_UNITS] = {false};
    bool is_ahead[BRUTE_MAX_UNITS] = {false};
    int64_t issued = 0;
    int64_t peak = 0;

    for (int64_t i = 0; i < p->n_steps; i++) {
        int32_t own = p->steps[i];

        if (i > 0 && !p->keep[i - 1])
            is_live[p->steps[i - 1]] = false;
        BRUTE_RULE(p->until[i] > i && p->until[i] <= p->n_steps && p->until[i] >= issued, "until[%lld] is %lld after %lld, of %lld steps",
                   (long long)i, (long long)p->until[i], (long long)issued, (long long)p->n_steps);
        for (; issued < p->until[i]; issued++) {
            int32_t unit = p->steps[issued];

            is_ahead[unit] = is_ahead[unit] || !is_live[unit];
            is_live[unit] = true;
        }
        BRUTE_RULE(is_live[own], "unit %d is not live at its step %lld", (int)own, (long long)i);
        is_ahead[own] = false;

        int64_t live = brute_sum(p, is_live);
        int64_t ahead = brute_sum(p, is_ahead);

        BRUTE_RULE(ahead <= p->limits.ahead_elems, "%lld elements are ahead of step %lld, %lld may be", (long long)ahead, (long long)i,
                   (long long)p->limits.ahead_elems);
        if (live > p->limits.max_live_elems)
            for (int32_t u = 0; u < p->n_units; u++)
                BRUTE_RULE(!is_live[u] || u == own, "%lld elements are live at step %lld, unit %d among them; %lld may be", (long long)live,
                           (long long)i, (int)u, (long long)p->limits.max_live_elems);
        if (issued < p->n_steps) {
            int32_t unit = p->steps[issued];

            BRUTE_RULE(!is_live[unit] && !(brute_fits(ahead, p->unit_elems[unit], p->limits.ahead_elems) &&
                                           brute_fits(live, p->unit_elems[unit], p->limits.max_live_elems)),
                       "until[%lld] is %lld, but unit %d has room: %lld live, %lld ahead", (long long)i, (long long)issued, (int)unit,
                       (long long)live, (long long)ahead);
        }
        peak = live > peak ? live : peak;
    }
    BRUTE_RULE(peak == p->peak_elems, "the peak is %lld, the plan says %lld", (long long)peak, (long long)p->peak_elems);
    return NULL;
}

/* Elements at step s: of the units kept across it, and its own. */
static inline __int128 brute_needed(const struct brute_plan *p, const bool *is_kept, int64_t s)
{
    __int128 sum = p->unit_elems[p->steps[s]];

    for (int64_t a = 0; a < s; a++)
        sum += is_kept[a] && p->next[a] > s ? p->unit_elems[p->steps[a]] : 0;
    return sum;
}

/* Whether the unit of step i, which is not kept, has room at each step until its next use. */
static inline bool brute_has_room(const struct brute_plan *p, const bool *is_kept, int64_t i)
{
    for (int64_t s = i + 1; s < p->next[i]; s++)
        if (brute_needed(p, is_kept, s) + p->unit_elems[p->steps[i]] > p->limits.max_live_elems)
            return false;
    return true;
}

/* Chooses the units to keep from those of may_keep: the farthest next use leaves, and comes back if it fits. */
static inline void brute_evict(const struct brute_plan *p, const bool *may_keep, bool *is_kept)
{
    for (int64_t i = 0; i < p->n_steps; i++)
        is_kept[i] = may_keep[i];
    for (int64_t s = 0; s < p->n_steps; s++)
        while (brute_needed(p, is_kept, s) > p->limits.max_live_elems) {
            int64_t farthest = -1;

            for (int64_t a = 0; a < s; a++)
                if (is_kept[a] && p->next[a] > s && (farthest < 0 || p->next[a] > p->next[farthest]))
                    farthest = a;
            if (farthest < 0)
                break; /* the step's own unit is larger than the limit */
            is_kept[farthest] = false;
        }
    for (int64_t i = 0; i < p->n_steps; i++)
        is_kept[i] = is_kept[i] || (may_keep[i] && brute_has_room(p, is_kept, i));
}

/* Checks next and keep of each step in time n_steps cubed. */
static inline const char *brute_reuse(const struct brute_plan *p)
{
    bool may_keep[BRUTE_MAX_STEPS] = {false};
    bool is_kept[BRUTE_MAX_STEPS];

    for (int64_t i = 0; i < p->n_steps; i++) {
        bool is_between[BRUTE_MAX_UNITS] = {false};
        int64_t next = i + 1;

        for (; next < p->n_steps && p->steps[next] != p->steps[i]; next++)
            is_between[p->steps[next]] = true;
        BRUTE_RULE(p->next[i] == next, "next[%lld] is %lld and not %lld", (long long)i, (long long)p->next[i], (long long)next);
        may_keep[i] = next < p->n_steps && brute_sum(p, is_between) <= p->limits.max_reuse_elems;
    }
    brute_evict(p, may_keep, is_kept);
    for (int64_t i = 0; i < p->n_steps; i++) {
        bool keep = p->next[i] < p->n_steps && (p->next[i] < p->until[i] || is_kept[i]);

        BRUTE_RULE(p->keep[i] == keep, "keep[%lld] is %d and not %d: next %lld, until %lld", (long long)i, (int)p->keep[i], (int)keep,
                   (long long)p->next[i], (long long)p->until[i]);
    }
    return NULL;
}

/*
 * Writes the GATHER and STEP actions of a whole pass to out_units: `unit` for a gather, `~unit` for a step. The units
 * of is_live_first (NULL: none) are live when the pass begins. out_units has room for 2 * n_steps entries. Returns
 * their number.
 */
static inline int64_t brute_gathers(const struct brute_plan *p, const uint8_t *is_live_first, int32_t *out_units)
{
    bool is_live[BRUTE_MAX_UNITS] = {false};
    int64_t n = 0;

    for (int32_t u = 0; u < p->n_units; u++)
        is_live[u] = is_live_first != NULL && is_live_first[u];
    for (int64_t i = 0; i < p->n_steps; i++) {
        if (i > 0 && !p->keep[i - 1])
            is_live[p->steps[i - 1]] = false;
        for (int64_t k = i == 0 ? 0 : p->until[i - 1]; k < p->until[i]; k++) {
            if (!is_live[p->steps[k]])
                out_units[n++] = p->steps[k];
            is_live[p->steps[k]] = true;
        }
        out_units[n++] = ~p->steps[i];
    }
    return n;
}

/* A record of the actions of a pass. */
struct brute_book {
    bool is_live[BRUTE_MAX_UNITS];
    int32_t *gathers; /* in order, and ~unit for each STEP */
    int64_t n_gathers;
    int64_t capacity;
};

static inline void brute_book_begin(struct brute_book *book, const uint8_t *is_live, int32_t n_units, int32_t *gathers, int64_t capacity)
{
    *book = (struct brute_book){.gathers = gathers, .capacity = capacity};
    for (int32_t u = 0; u < n_units; u++)
        book->is_live[u] = is_live != NULL && is_live[u];
}

/* Records the actions of one call, and compares the record with the runner's. */
static inline const char *brute_book_take(struct brute_book *book, const struct dsc_fetch *fetch, const struct dsc_fetch_action *actions,
                                          int64_t n)
{
    int64_t live_elems = 0;

    for (int64_t i = 0; i < n; i++) {
        bool is_gather = actions[i].kind == DSC_FETCH_GATHER;
        int32_t unit = actions[i].unit;

        BRUTE_RULE(unit >= 0 && unit < fetch->n_units, "action %lld is for unit %d", (long long)i, (int)unit);
        if (actions[i].kind == DSC_FETCH_STEP) {
            BRUTE_RULE(book->is_live[unit], "STEP of unit %d, which is not live", (int)unit);
            BRUTE_RULE(book->n_gathers < book->capacity, "more than %lld gathers and steps", (long long)book->capacity);
            book->gathers[book->n_gathers++] = ~unit;
            continue;
        }
        BRUTE_RULE(is_gather || actions[i].kind == DSC_FETCH_RELEASE, "action %lld is of kind %d", (long long)i, (int)actions[i].kind);
        BRUTE_RULE(book->is_live[unit] != is_gather, "%s of unit %d, which is%s live", is_gather ? "GATHER" : "RELEASE", (int)unit,
                   book->is_live[unit] ? "" : " not");
        book->is_live[unit] = is_gather;
        if (is_gather) {
            BRUTE_RULE(book->n_gathers < book->capacity, "more than %lld gathers", (long long)book->capacity);
            book->gathers[book->n_gathers++] = unit;
        }
    }
    for (int32_t u = 0; u < fetch->n_units; u++) {
        BRUTE_RULE(fetch->units[u].is_live == book->is_live[u], "the runner has unit %d as%s live", (int)u, book->is_live[u] ? " not" : "");
        live_elems += book->is_live[u] ? fetch->unit_elems[u] : 0;
    }
    BRUTE_RULE(fetch->live_elems == live_elems && fetch->peak_elems >= live_elems, "%lld elements are live; the runner has %lld, peak %lld",
               (long long)live_elems, (long long)fetch->live_elems, (long long)fetch->peak_elems);
    return NULL;
}

#endif
