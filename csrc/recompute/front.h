/* The ways to treat one layer that no other way dominates, and the moves that give a lower bound for all plans. */
#ifndef DSC_RECOMPUTE_FRONT_H
#define DSC_RECOMPUTE_FRONT_H

#include "dsc/recompute.h"

/* One layer's part of a problem. */
struct dsc_recompute_view {
    const struct dsc_recompute_layer *layer;
    const struct dsc_recompute_choice *whole; /* its own choices; its groups' choices lie behind them */
    const int32_t *sizes;                     /* of its groups */
};

static inline const struct dsc_recompute_choice *dsc_recompute_choices(const struct dsc_recompute_view *view)
{
    return view->whole + view->layer->n_whole;
}

/* A way to treat a layer: its numbers, and a code that dsc_recompute_decode turns into its choices. */
struct dsc_recompute_option {
    int64_t kept_bytes;
    int64_t transient_bytes; /* or work_bytes, if larger */
    int64_t added_ns;
    uint64_t code;
    int32_t kind;
};

/* A step along a convex front: from one choice of a group, or one way to treat a layer, to the next larger one. */
struct dsc_recompute_move {
    int64_t bytes;           /* > 0: increase of the bytes by which the front is sorted */
    int64_t transient_bytes; /* increase, if not part of bytes */
    int64_t saved_ns;        /* > 0 less */
    int32_t group;
    int32_t choice;
};

/* A move's sort key: its slope and its index. */
struct dsc_recompute_place {
    double slope; /* < 0 if numbers are too large to be exact in double; the moves themselves are then compared */
    uint32_t index;
};

#define DSC_RECOMPUTE_MAX_FRONT 512

/* The caller's scratch memory: for one layer at a time, and for the moves of each layer, which are computed once. */
struct dsc_recompute_scratch {
    struct dsc_recompute_option *candidates; /* n_candidates, at least a front and the whole choices of the largest
                                                layer */
    struct dsc_recompute_option *front;      /* DSC_RECOMPUTE_MAX_FRONT */
    struct dsc_recompute_move *moves;        /* choices of the largest layer, and one more */
    struct dsc_recompute_choice *hull;       /* as many */
    int32_t *order;                          /* as many */
    struct dsc_recompute_move *sorted;       /* as many */
    struct dsc_recompute_place *places;      /* twice as many */
    const struct dsc_recompute_problem *problem;
    struct dsc_recompute_move *known; /* n_choices: the moves of a layer's groups begin where its choices do */
    int32_t *n_known;                 /* n_layers; -1: not asked for yet */
    int64_t n_candidates;
    int64_t n_steps_left; /* number of comparisons that exact fronts may still make. A count and not a time, so that
                             plans are the same everywhere */
};

/* Checks a problem. The error names the bad entry. */
dsc_status dsc_recompute_check(const struct dsc_recompute_problem *problem);

/* Fills in peak_bytes, added_ns and peak_layer of a plan whose choices are in range. */
void dsc_recompute_add_up(const struct dsc_recompute_problem *problem, struct dsc_recompute_plan *plan);

/* Sums the numbers of a layer under the given choices. */
struct dsc_recompute_choice dsc_recompute_sum(const struct dsc_recompute_view *view, int32_t whole,
                                              const int32_t *groups);

/* Iterate over the layers' views, from first to last. The view after the last layer must not be read. */
struct dsc_recompute_view dsc_recompute_first(const struct dsc_recompute_problem *problem);
void dsc_recompute_next(struct dsc_recompute_view *view);

/*
 * Writes at most DSC_RECOMPUTE_MAX_FRONT options, and returns how many. Sets *is_exact to false if the Pareto front did
 * not fit.
 */
int32_t dsc_recompute_front(const struct dsc_recompute_view *view, struct dsc_recompute_scratch *scratch,
                            struct dsc_recompute_option *out, bool *is_exact);

/* The choices of an option of dsc_recompute_front: *out_whole, and a choice for each group (-1 where whole). */
void dsc_recompute_decode(const struct dsc_recompute_view *view, struct dsc_recompute_scratch *scratch,
                          const struct dsc_recompute_option *option, int32_t *out_whole, int32_t *out_groups);

/*
 * Writes the moves along the lower convex hull of all ways to treat a layer to scratch->moves, steepest first, and
 * returns their number. The hull is in the plane (kept_bytes, added_ns), or with is_peak (kept and transient bytes,
 * added_ns). The moves start at scratch->hull[*out_first] (its kept_bytes is the hull's first coordinate). Each move's
 * choice is a point of scratch->hull.
 */
int32_t dsc_recompute_moves(const struct dsc_recompute_view *view, struct dsc_recompute_scratch *scratch, bool is_peak,
                            int32_t *out_first);

/* The choices at a point of dsc_recompute_moves without is_peak. */
void dsc_recompute_decode_point(const struct dsc_recompute_view *view, struct dsc_recompute_scratch *scratch,
                                int32_t point, int32_t *out_whole, int32_t *out_groups);

/* < 0 if a saves more time per byte than b, > 0 if it saves less. */
int dsc_recompute_compare_slopes(const struct dsc_recompute_move *a, const struct dsc_recompute_move *b);

/*
 * Sorts moves, steepest first; equal moves by group and choice, and then by their old order. The order is exact. The
 * returned pointer points into places, which must have room for twice n_moves.
 */
const struct dsc_recompute_place *dsc_recompute_order(const struct dsc_recompute_move *moves, int64_t n_moves,
                                                      struct dsc_recompute_place *places);

/*
 * Sorts moves in place, in the order of dsc_recompute_order. places: room for twice n_moves. spare: room for n_moves.
 */
void dsc_recompute_sort_moves(struct dsc_recompute_move *moves, int64_t n_moves, struct dsc_recompute_place *places,
                              struct dsc_recompute_move *spare);

#endif
