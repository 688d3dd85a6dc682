/*
 * When each gather unit of a model is gathered and released (ZeRO stage 3): the trace of a pass, the plan made from it,
 * and the runner that follows the plan.
 *
 * A *unit* is the group of parameters that one collective gathers; units are numbered 0..n_units-1, the same on all
 * ranks. A *pass* is one forward or one backward. A use of a unit in a pass is a *step*. A pass is recorded as a
 * *trace*, the trace becomes a plan, and the next pass runs along the plan:
 *
 *   record of a pass  --dsc_trace_prune-->  steps  --dsc_prefetch_plan-->  plan  --dsc_fetch_begin, use, ..., end-->
 * actions, and the next record
 *
 * A unit is *live* from its GATHER action to its RELEASE action. Collectives match across ranks only if all ranks start
 * the same collectives in the same order. Yet ranks need not do the same work: one rank may skip a layer, another may
 * give no token to an expert. The design therefore rests on this property:
 *
 *   [The order of gathers] For one plan and one set of units that are live when the pass begins, the sequence of GATHER
 *   actions from begin to end is the same for every subsequence of the plan's steps that a rank may use, and so are the
 * STEPs between them. Units of steps that a rank skips are gathered and released all the same.
 *
 * The property holds because the set of live units depends only on the last step passed, and on nothing else that a
 * rank does. The exception is an *unexpected* use, which the plan does not have: its unit is gathered on the spot, and
 * this is correct only if all ranks do so at the same point of the plan.
 *
 * Nothing here touches a tensor, and nothing allocates. Steps and elements are int64_t, units int32_t. An object
 * belongs to one thread at a time.
 */
#ifndef DSC_FETCH_H
#define DSC_FETCH_H

#include "dsc/status.h"
#include "dsc/types.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The units of a pass in order of use. The caller owns the storage, and may read the arrays up to n_steps. */
struct dsc_trace {
    int32_t *units;   /* kept: capacity entries */
    uint8_t *is_used; /* kept: capacity entries; 0 for a step of the plan that this rank passed without a use */
    int64_t capacity;
    int64_t n_steps;
};

DSC_API dsc_status dsc_trace_init(struct dsc_trace *trace, int32_t *units, uint8_t *is_used, int64_t capacity);

/* Removes all steps. */
DSC_API void dsc_trace_clear(struct dsc_trace *trace);

/* DSC_EOVERFLOW when the trace is full, DSC_EINVAL for a negative unit; the trace is unchanged then. */
DSC_API dsc_status dsc_trace_append(struct dsc_trace *trace, int32_t unit, bool is_used);

/*
 * Removes, in place, the steps that would only hinder a plan. First, a step that was not used is removed if its unit
 * may be dropped (may_drop[unit] != 0) or is used by another step. Then, of adjacent steps of one unit, only the first
 * remains, because a runner cannot tell them apart.
 *
 * All ranks must come to the same plan, so callers must first combine is_used over all ranks with OR. may_drop: n_units
 * flags. scratch: n_units bytes, borrowed. DSC_EINVAL, with nothing changed, when a step's unit is not below n_units.
 */
DSC_API dsc_status dsc_trace_prune(struct dsc_trace *trace, const uint8_t *may_drop, int32_t n_units, uint8_t *scratch);

struct dsc_prefetch_limits {
    uint32_t size;          /* sizeof(struct dsc_prefetch_limits) */
    int64_t max_live_elems; /* >= 0; limit for all units that are live at once, see below */
    int64_t ahead_elems; /* >= 0; elements gathered ahead of their step. A larger unit waits for its step, and so do the
                            units behind it */
    int64_t max_reuse_elems; /* >= 0; a unit stays live between two uses up to this reuse distance */
};

#define DSC_PREFETCH_LIMITS_INIT                                            \
    {                                                                       \
        sizeof(struct dsc_prefetch_limits), INT64_MAX, INT64_MAX, INT64_MAX \
    }

/*
 * Plans a pass that uses the units of steps in that order. No unit is live when the pass begins. unit_elems[u] >= 0
 * elements.
 *
 * out_until[i]: when step i is entered, the gathers of all steps < out_until[i] are issued, except for units that are
 * live already. It is at least i + 1 and at most n_steps, never decreases with i, and is as large as two limits allow.
 * First, the gathered units whose first use lies after i have at most ahead_elems elements. Second, all live units have
 * at most max_live_elems elements. The gather of step i itself is issued even if it breaks the second limit. This
 * happens only for a unit larger than max_live_elems, and nothing else is live then. out_next[i]: the next step that
 * uses the unit of step i; n_steps when there is none. out_keep[i]: 1 when the unit of step i stays live after the
 * step, until out_next[i]. There are two reasons to keep it. Either step out_next[i] has been issued already
 * (out_next[i] < out_until[i]); or the reuse distance, which is the number of elements of the distinct units used in
 * between, is at most max_reuse_elems, and the unit is among those that max_live_elems has room for.
 *
 * If units do not fit beside the unit of a step, the one with the farthest next use leaves, until the rest fits (Belady
 * 1966). Then units that have left are taken back, in the order of their steps, if they fit at each step in between. So
 * no other unit could be kept as well. If all units are equal in size and max_reuse_elems excludes none, no other
 * choice needs fewer gathers, at any ahead_elems. If sizes differ, another choice may gather fewer elements.
 * Prefetching gets the memory beside the kept units, and adds no gathers.
 *
 * *out_peak_elems: the largest number of live elements at any step.
 *
 * The output arrays have n_steps entries. scratch: 4 * n_steps + 2 * n_units int64_t, borrowed. Costs O(n_steps log
 * n_steps). DSC_EINVAL names the bad entry; DSC_EOVERFLOW when the sum of unit_elems does not fit int64_t. On failure
 * no output is written.
 */
DSC_API dsc_status dsc_prefetch_plan(const int32_t *steps, int64_t n_steps, const int64_t *unit_elems, int32_t n_units,
                                     const struct dsc_prefetch_limits *limits, int64_t *scratch, int64_t *out_until,
                                     int64_t *out_next, uint8_t *out_keep, int64_t *out_peak_elems);

/* A plan as the runner takes it: the inputs and outputs of dsc_prefetch_plan. */
struct dsc_fetch_plan {
    const int32_t *steps;
    const int64_t *until;
    const int64_t *next;
    const uint8_t *keep;
    int64_t n_steps;
};

enum dsc_fetch_kind { DSC_FETCH_GATHER = 0, DSC_FETCH_RELEASE = 1, DSC_FETCH_STEP = 2 };

/*
 * An action for the caller, in the order given. GATHER: gather the unit, which is not live. RELEASE: release the unit,
 * which is live. STEP: a step of the plan with this unit has been passed and its gathers are issued. At a STEP the
 * caller starts other collectives, such as reductions of gradients, that must come at the same place between the
 * gathers on all ranks.
 */
struct dsc_fetch_action {
    int32_t kind; /* enum dsc_fetch_kind */
    int32_t unit;
};

/* The runner's state of one unit. */
struct dsc_fetch_unit {
    int64_t step; /* the first step >= cursor that uses it; n_steps when there is none */
    uint8_t is_live;
    uint8_t is_touched; /* used while live, ahead of that step */
};

/* Runs plans, one pass after another. The caller owns the storage; the fields may be read. */
struct dsc_fetch {
    const int64_t *unit_elems;    /* kept */
    struct dsc_fetch_unit *units; /* kept: n_units entries */
    int32_t n_units;
    bool is_active;             /* between begin and end */
    struct dsc_fetch_plan plan; /* its arrays are kept from begin to end */
    struct dsc_trace *record;   /* kept from begin to end */
    int64_t cursor;             /* steps below it have been passed; the last of them is *running* */
    int64_t issued;             /* the gathers of steps below it have been issued */
    int32_t running_unit;       /* the unit of the running step; -1 before the first */
    int32_t unexpected_unit;    /* the unexpected unit that is live; -1: none */
    int64_t n_unexpected;       /* in this pass */
    int32_t n_live;
    int64_t live_elems;
    int64_t peak_elems; /* the largest live_elems of this pass */
};

/* unit_elems: n_units entries >= 0 whose sum fits int64_t (DSC_EOVERFLOW). */
DSC_API dsc_status dsc_fetch_init(struct dsc_fetch *fetch, const int64_t *unit_elems, int32_t n_units,
                                  struct dsc_fetch_unit *units);

/*
 * Begins a pass along plan, which dsc_prefetch_plan made for the same units. is_live: n_units flags, borrowed (NULL:
 * none). They mark units that are live already, for example a unit kept from the forward, and must be the same on all
 * ranks. Such units are released after their first step or at the end, like any other, and may exceed the plan's peak.
 * record is cleared and then receives the steps that are passed; unexpected steps are recorded at the point where they
 * occur. DSC_ESTATE in a pass; DSC_EINVAL for a plan that no planner would make. Costs O(n_steps + n_units).
 */
DSC_API dsc_status dsc_fetch_begin(struct dsc_fetch *fetch, const struct dsc_fetch_plan *plan, const uint8_t *is_live,
                                   struct dsc_trace *record);

/*
 * Announces that the unit is about to be used. After the actions the unit is live, and it stays live at least until the
 * next call.
 *
 * 1. The running step has this unit: nothing to do. 2. The next step p of the unit is at the cursor or has been issued,
 * or the unit is not live: the steps from the cursor to p are passed. Passing step s means three things. The step
 * before s is left: RELEASE its unit, unless kept or issued ahead, and RELEASE the unexpected unit. Then GATHER the
 * units of the steps below until[s] that are not live. Then record s; it counts as used if s == p or if case 3 has
 * touched its unit. 3. The unit is live, and its next step is further away than in case 2 or does not exist: nothing to
 * do. The cursor stays, because this may be an extra use, and a jump would skip the steps in between. The next step of
 * the unit counts as used. 4. The unit is not live and has no step left: it is unexpected. RELEASE the previous
 * unexpected unit, but not the unit of the running step, which goes on. GATHER the unit and record it as used.
 *
 * Writes *out_n actions to out_actions. 3 * n_steps + n_units entries are always enough, for end and abort too. With
 * nothing changed: DSC_EINVAL when capacity is less than the call could need, or for a bad unit; DSC_EOVERFLOW when the
 * record has no room; DSC_ESTATE outside a pass.
 */
DSC_API dsc_status dsc_fetch_use(struct dsc_fetch *fetch, int32_t unit, int64_t capacity,
                                 struct dsc_fetch_action *out_actions, int64_t *out_n);

/*
 * Ends the pass: passes all remaining steps, then RELEASEs the live units except keep_unit (-1: none; the same on all
 * ranks), in ascending order. keep_unit, if it is live, stays marked as live until the next dsc_fetch_begin, whose
 * is_live must name it.
 */
DSC_API dsc_status dsc_fetch_end(struct dsc_fetch *fetch, int32_t keep_unit, int64_t capacity,
                                 struct dsc_fetch_action *out_actions, int64_t *out_n);

/*
 * Aborts the pass, for example after an exception that occurs on all ranks: RELEASEs the live units, gathers nothing,
 * clears the record. Does nothing outside a pass.
 */
DSC_API dsc_status dsc_fetch_abort(struct dsc_fetch *fetch, int64_t capacity, struct dsc_fetch_action *out_actions,
                                   int64_t *out_n);

#ifdef __cplusplus
}
#endif
#endif
