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
 * the same ones in the same order, and ranks need not do the same work: one skips a layer, another gives no token to an
 * expert. Everything therefore rests on this:
 *
 *   [The order of gathers] For one plan and one set of units that are live when the pass begins, the sequence of GATHER
 *   actions from begin to end is the same for every subsequence of the plan's steps that a rank may use, and so are the
 *   STEPs between them. Steps that a rank skips are passed all the same: gathered, and released again.
 *
 * It holds because the set of live units is a function of the last step passed, and of nothing that a rank does
 * besides. The exception is a use that the plan does not have (*unexpected*): it is gathered on the spot, which is
 * correct only when all ranks do it at the same point of the plan.
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

/* Back to no steps. */
DSC_API void dsc_trace_clear(struct dsc_trace *trace);

/* DSC_EOVERFLOW when the trace is full, DSC_EINVAL for a negative unit; the trace is unchanged then. */
DSC_API dsc_status dsc_trace_append(struct dsc_trace *trace, int32_t unit, bool is_used);

/*
 * Removes, in place, the steps that would only hinder a plan: each step that was not used and whose unit either may be
 * dropped (may_drop[unit] != 0) or is used by another step; then, where steps of one unit stand next to each other, all
 * but the first, since a runner cannot tell them apart.
 *
 * All ranks must come to the same plan, so is_used must be the same on all ranks first: combined with OR over them.
 * may_drop: n_units flags. scratch: n_units bytes, borrowed. DSC_EINVAL, with nothing changed, when a step's unit is
 * not below n_units.
 */
DSC_API dsc_status dsc_trace_prune(struct dsc_trace *trace, const uint8_t *may_drop, int32_t n_units, uint8_t *scratch);

struct dsc_prefetch_limits {
    uint32_t size;          /* sizeof(struct dsc_prefetch_limits) */
    int64_t max_live_elems; /* >= 0; all that is live at once, see below */
    int64_t ahead_elems; /* >= 0; elements gathered ahead of their step. A larger unit waits for its step, and so do the
                            units behind it */
    int64_t max_reuse_elems; /* >= 0; a unit stays live between two uses up to this reuse distance */
};

#define DSC_PREFETCH_LIMITS_INIT                                            \
    {                                                                       \
        sizeof(struct dsc_prefetch_limits), INT64_MAX, INT64_MAX, INT64_MAX \
    }

/*
 * Plans a pass that uses the units of steps in that order; no unit is live when it begins. unit_elems[u] >= 0 elements.
 *
 * out_until[i]: when step i is entered, the gathers of all steps < out_until[i] are issued, except for units that are
 * live already. It is at least i + 1 and at most n_steps, never decreases, and is as large as two limits allow: the
 * elements of the units that have been gathered and whose first use lies after i are at most ahead_elems; and all that
 * is live is at most max_live_elems. Only the gather of step i itself is issued even where it breaks the second limit,
 * which happens for units that are larger than max_live_elems by themselves, and then nothing else is live.
 * out_next[i]: the next step that uses the unit of step i; n_steps when there is none. out_keep[i]: 1 when the unit of
 * step i stays live after it, until out_next[i]: because that step has been issued already (out_next[i] <
 * out_until[i]), or because the elements of the distinct units used in between, the reuse distance, are at most
 * max_reuse_elems and no step in between comes to break max_live_elems by it. Memory goes to the earlier decision:
 * prefetching gets the rest beside the units that are kept. *out_peak_elems: the largest number of live elements at any
 * step.
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
 * An action for the caller, in the order given. GATHER: a unit that is not live. RELEASE: a live unit. STEP: a step of
 * the plan, of that unit, has been passed and its gathers are issued; other collectives that must come at the same
 * place between the gathers on all ranks (reductions of gradients) are started here.
 */
struct dsc_fetch_action {
    int32_t kind; /* enum dsc_fetch_kind */
    int32_t unit;
};

/* The runner's book of one unit. */
struct dsc_fetch_unit {
    int64_t step; /* the first step >= cursor that uses it; n_steps when there is none */
    uint8_t is_live;
    uint8_t is_touched; /* used, while live, in advance of that step */
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
 * Begins a pass along plan, which dsc_prefetch_plan made for the same units. is_live: n_units flags, borrowed: units
 * that are live already, as one kept over from the forward (NULL: none); the same on all ranks. They are released like
 * any other after their first step, or at the end, and may come on top of the plan's peak. record is cleared, and gets
 * the steps that are passed, unexpected ones where they came. DSC_ESTATE in a pass; DSC_EINVAL for a plan that no
 * planner would make. Costs O(n_steps + n_units).
 */
DSC_API dsc_status dsc_fetch_begin(struct dsc_fetch *fetch, const struct dsc_fetch_plan *plan, const uint8_t *is_live,
                                   struct dsc_trace *record);

/*
 * The unit is going to be used now. After the actions it is live, and stays so at least until the next call.
 *
 * 1. The running step has this unit: nothing to do.
 * 2. Its next step p is the one at the cursor, or has been issued, or the unit is not live: the steps from the cursor
 * to p are passed. Passing step s means: leave the one before it (RELEASE its unit, unless kept or issued ahead;
 * RELEASE the unexpected unit), then GATHER the units of the steps below until[s] that are not live, and record s, as
 * used when s == p or when 3 has touched its unit.
 * 3. Live, and its next step is further away than that, or there is none: nothing to do. The cursor stays: the use may
 * be an extra one, and jumping would give up the steps in between. The next step of the unit counts as used.
 * 4. Not live, and no step left: it is unexpected. RELEASE the unexpected unit before it, but not the unit of the
 * running step, which goes on; GATHER it and record it as used.
 *
 * Writes *out_n actions to out_actions. 3 * n_steps + n_units entries are always enough, for end and abort too. With
 * nothing changed: DSC_EINVAL when capacity is less than the call could need, or for a bad unit; DSC_EOVERFLOW when the
 * record has no room; DSC_ESTATE outside a pass.
 */
DSC_API dsc_status dsc_fetch_use(struct dsc_fetch *fetch, int32_t unit, int64_t capacity,
                                 struct dsc_fetch_action *out_actions, int64_t *out_n);

/*
 * Ends the pass: passes all remaining steps, then RELEASEs the live units except keep_unit (-1: none; the same on all
 * ranks), in ascending order. keep_unit, if it is live, stays marked so until the next begin, whose is_live must name
 * it.
 */
DSC_API dsc_status dsc_fetch_end(struct dsc_fetch *fetch, int32_t keep_unit, int64_t capacity,
                                 struct dsc_fetch_action *out_actions, int64_t *out_n);

/*
 * Gives the pass up, as after an exception that all ranks have alike: RELEASEs the live units, gathers nothing, clears
 * the record. Outside a pass nothing happens.
 */
DSC_API dsc_status dsc_fetch_abort(struct dsc_fetch *fetch, int64_t capacity, struct dsc_fetch_action *out_actions,
                                   int64_t *out_n);

#ifdef __cplusplus
}
#endif
#endif
