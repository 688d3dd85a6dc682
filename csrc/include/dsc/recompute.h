/*
 * The activation budget: for each layer, decides which activations to keep from forward to backward and which to
 * compute again, so that no moment of a step holds more bytes than a budget and the least time is added.
 *
 * Only numbers: nothing here touches a tensor or measures anything, and the same numbers give the same plan on every
 * rank.
 */
#ifndef DSC_RECOMPUTE_H
#define DSC_RECOMPUTE_H

#include "dsc/status.h"
#include "dsc/types.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A way to treat a layer, or an operator of it. All are at least 0. */
struct dsc_recompute_choice {
    int64_t kept_bytes;      /* held from its forward until its backward is over */
    int64_t transient_bytes; /* held besides while its backward runs: tensors computed again or read back */
    int64_t added_ns;        /* of time, compared with keeping everything */
};

/*
 * A layer is treated as a whole in one of n_whole ways, or by its groups: each of the n_groups groups gets a choice,
 * and their numbers are added. Groups are its expensive operators, and its inputs. With n_whole > 0 and no groups the
 * layer is treated as a whole; with neither it takes nothing.
 */
struct dsc_recompute_layer {
    int64_t work_bytes; /* >= 0: held besides while its forward or its backward runs, under every choice */
    int32_t n_whole;
    int32_t n_groups;
};

/* Layers in the order of their forwards. Everything belongs to the caller. */
struct dsc_recompute_problem {
    const struct dsc_recompute_layer *layers;
    int32_t n_layers;
    const int32_t *group_sizes;                 /* choices of each group (>= 1), of all layers one after the other */
    const struct dsc_recompute_choice *choices; /* for each layer: its n_whole choices, then each group's */
    int32_t n_group_sizes;                      /* entries of group_sizes and choices, to be compared with */
    int32_t n_choices;
};

struct dsc_recompute_plan {
    int32_t *whole;         /* n_layers, the caller's: a choice of the layer as a whole, or -1: by its groups */
    int32_t *groups;        /* n_group_sizes, the caller's: a choice of each group, or -1: of a layer that is whole */
    int64_t peak_bytes;     /* the most that any moment holds */
    int64_t added_ns;       /* of all layers */
    int64_t bound_ns;       /* no plan within the budget adds less. added_ns where the plan is known to be the best */
    int64_t smallest_bytes; /* that a budget may be */
    int32_t peak_layer;     /* the last one while which most is held; -1 without layers */
    bool is_exact;          /* nothing was thinned out: no plan adds less */
};

/*
 * Computes the peak bytes and the added time of a plan. While layer i's forward or backward runs, these bytes are held:
 *
 *   kept_bytes of layers 0..i, and the larger of work_bytes and transient_bytes of i
 *
 * since later layers have freed their kept bytes when i's backward begins. For the last layer, keeping therefore costs
 * as much memory as computing again. Reads whole and groups; sets peak_bytes, added_ns and peak_layer. DSC_EINVAL names
 * an entry that is out of range.
 */
DSC_API dsc_status dsc_recompute_peak(const struct dsc_recompute_problem *problem, struct dsc_recompute_plan *plan);

/*
 * The smallest budget that a plan exists for. It is exact where each group has a choice with both the least kept_bytes
 * and the least sum of kept and transient bytes, and for small problems (below); otherwise some smaller one may do.
 */
DSC_API dsc_status dsc_recompute_smallest(const struct dsc_recompute_problem *problem, int64_t *out_bytes);

/*
 * Finds the plan within budget_bytes (>= 0) that adds the least time; of equals the plan that holds least.
 *
 * From the last layer to the first, the Pareto front of all pairs (bytes that the rest needs, time that it adds) is
 * kept. A front that grows too long is thinned out: the remaining pairs are real plans, so that the result always fits,
 * and the smallest budget is never lost. A second plan is then made by the choices that save most time for a byte, as
 * long as they fit, and the better one is the result. is_exact tells whether that has happened, and bound_ns (a linear
 * relaxation) how far from the best the plan may be.
 *
 * DSC_EINVAL names the first bad argument, DSC_EOVERFLOW says that the numbers do not add up in int64_t, DSC_ENOMEM
 * that there is no memory for the search: *plan is then untouched. DSC_ENOSPC when no plan fits: the sentence has both
 * numbers, and smallest_bytes alone is set.
 */
DSC_API dsc_status dsc_recompute_solve(const struct dsc_recompute_problem *problem, int64_t budget_bytes,
                                       struct dsc_recompute_plan *plan);

#ifdef __cplusplus
}
#endif
#endif
