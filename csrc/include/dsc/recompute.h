/*
 * The activation budget. For each layer, decides which activations to keep from forward to backward and which to
 * recompute. The plan stays within a budget of bytes at every moment of a step, and adds the least time.
 *
 * Everything here works on numbers only: it touches no tensor and measures nothing, and the same numbers give the same
 * plan on every rank.
 */
#ifndef DSC_RECOMPUTE_H
#define DSC_RECOMPUTE_H

#include "dsc/status.h"
#include "dsc/types.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A way to treat a layer or one of its operators. All fields are at least 0. */
struct dsc_recompute_choice {
    int64_t kept_bytes;      /* held from its forward until its backward is over */
    int64_t transient_bytes; /* held in addition while its backward runs: tensors that are recomputed or read back */
    int64_t added_ns;        /* additional time, compared with keeping everything */
};

/*
 * A layer is treated as a whole in one of n_whole ways, or by its groups: each of the n_groups groups gets a choice,
 * and the numbers of these choices are added. The groups are the layer's expensive operators and its inputs. A layer
 * without groups and with n_whole > 0 is treated as a whole. A layer with neither costs nothing.
 */
struct dsc_recompute_layer {
    int64_t work_bytes; /* >= 0: held in addition while its forward or its backward runs, under every choice */
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
    int64_t bound_ns;       /* no plan within the budget adds less. Equals added_ns if the plan is known to be the
                               best */
    int64_t smallest_bytes; /* the smallest budget for which a plan exists */
    int32_t peak_layer;     /* the last layer that runs while peak_bytes are held; -1 without layers */
    bool is_exact;          /* no front was thinned out, so no plan adds less */
};

/*
 * Computes the peak bytes and the added time of a plan. While layer i's forward or backward runs, these bytes are held:
 *
 *   kept_bytes of layers 0..i, and the larger of work_bytes and transient_bytes of i
 *
 * because later layers have freed their kept bytes when the backward of layer i begins. So for the last layer, keeping
 * costs as much memory as recomputing. Reads whole and groups; sets peak_bytes, added_ns and peak_layer. DSC_EINVAL
 * names an entry that is out of range.
 */
DSC_API dsc_status dsc_recompute_peak(const struct dsc_recompute_problem *problem, struct dsc_recompute_plan *plan);

/*
 * The smallest budget for which a plan exists. It is exact for small problems (see dsc_recompute_solve), and if each
 * group has a choice with both the least kept_bytes and the least sum of kept and transient bytes. Otherwise a smaller
 * budget may do.
 */
DSC_API dsc_status dsc_recompute_smallest(const struct dsc_recompute_problem *problem, int64_t *out_bytes);

/*
 * Finds the plan within budget_bytes (>= 0) that adds the least time. Among equal plans it takes the one with the
 * smallest peak.
 *
 * The search goes from the last layer to the first and keeps the Pareto front of the pairs (bytes that the layers so
 * far need, time that they add). A front that grows too long is thinned out. The remaining pairs are real plans, so the
 * result always fits, and the smallest budget is never lost. After thinning, a second plan is made greedily, from the
 * choices that save most time per byte and fit, and the better plan is the result. is_exact is false if a front was
 * thinned out; bound_ns (a linear relaxation) then limits how far the plan may be from the best.
 *
 * DSC_EINVAL names the first bad argument. DSC_EOVERFLOW: a sum does not fit int64_t. DSC_ENOMEM: no memory for the
 * search. *plan is untouched after these. DSC_ENOSPC: no plan fits; the sentence has the budget and the smallest
 * budget, and only smallest_bytes is set.
 */
DSC_API dsc_status dsc_recompute_solve(const struct dsc_recompute_problem *problem, int64_t budget_bytes,
                                       struct dsc_recompute_plan *plan);

#ifdef __cplusplus
}
#endif
#endif
