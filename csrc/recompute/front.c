/*
 * Computes one layer's front: all sums of its groups' choices if they are few, otherwise the sums along the convex
 * hull.
 *
 * For an exact front the groups are added one after the other, and only the sums that no other sum dominates are kept
 * (the Pareto front).
 */
#include "recompute/front.h"

#include <stdlib.h>
#include <string.h>

/*
 * The meaning of an option's code: an index, four bits for each group, the number of moves along the hull, or nothing.
 */
enum { WHOLE, PACKED, MOVES, LEAST_KEPT, LEAST_PEAK };

#define MAX_PACKED_GROUPS 16
#define MAX_PACKED_CHOICES 16
#define MAX_MOVES_SHOWN 16 /* number of points of the hull that become options */

static int compare_options(const void *a, const void *b)
{
    const struct dsc_recompute_option *x = a;
    const struct dsc_recompute_option *y = b;

    if (x->kept_bytes != y->kept_bytes)
        return x->kept_bytes < y->kept_bytes ? -1 : 1;
    if (x->transient_bytes != y->transient_bytes)
        return x->transient_bytes < y->transient_bytes ? -1 : 1;
    if (x->added_ns != y->added_ns)
        return x->added_ns < y->added_ns ? -1 : 1;
    if (x->kind != y->kind)
        return x->kind < y->kind ? -1 : 1;
    return x->code < y->code ? -1 : x->code > y->code;
}

/*
 * Sorts, and reduces options to their Pareto front: at most limit of them, plus one if there are more. Counts
 * comparisons.
 */
static int64_t prune(struct dsc_recompute_option *options, int64_t n, int64_t limit, int64_t *n_steps)
{
    int64_t n_left = 0;

    qsort(options, (size_t)n, sizeof *options, compare_options);
    for (int64_t i = 0; i < n && n_left <= limit; i++) {
        bool is_dominated = false;

        for (int64_t j = n_left; j-- > 0 && !is_dominated;) { /* earlier options keep no more */
            is_dominated =
                options[j].transient_bytes <= options[i].transient_bytes && options[j].added_ns <= options[i].added_ns;
            ++*n_steps;
        }
        if (!is_dominated)
            options[n_left++] = options[i];
    }
    return n_left;
}

static int64_t larger(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

/* Writes the front of all sums of the groups to scratch->front; -1 if there are too many. */
static int64_t packed_front(const struct dsc_recompute_view *view, struct dsc_recompute_scratch *scratch)
{
    const struct dsc_recompute_choice *choices = dsc_recompute_choices(view);
    struct dsc_recompute_option *front = scratch->front;
    int64_t n = 1;

    if (view->layer->n_groups > MAX_PACKED_GROUPS)
        return -1;
    front[0] = (struct dsc_recompute_option){.kind = PACKED};
    for (int32_t g = 0; g < view->layer->n_groups; g++) {
        int32_t size = view->sizes[g];
        int64_t n_steps = 0;
        int64_t n_found = 0;

        if (size > MAX_PACKED_CHOICES || n * size > scratch->n_candidates || scratch->n_steps_left <= 0)
            return -1;
        for (int64_t i = 0; i < n; i++)
            for (int32_t c = 0; c < size; c++) {
                struct dsc_recompute_option *option = &scratch->candidates[n_found++];

                *option = front[i];
                option->kept_bytes += choices[c].kept_bytes;
                option->transient_bytes += choices[c].transient_bytes;
                option->added_ns += choices[c].added_ns;
                option->code |= (uint64_t)c << 4 * g;
            }
        n = prune(scratch->candidates, n_found, DSC_RECOMPUTE_MAX_FRONT / 2, &n_steps);
        scratch->n_steps_left -= n_steps + 16 * n_found;
        if (n > DSC_RECOMPUTE_MAX_FRONT / 2)
            return -1;
        memcpy(front, scratch->candidates, (size_t)n * sizeof *front);
        choices += size;
    }
    return n;
}

struct point {
    int64_t bytes;
    int64_t ns;
    int32_t index;
};

static bool is_before(const struct point *a, const struct point *b)
{
    if (a->bytes != b->bytes)
        return a->bytes < b->bytes;
    return a->ns != b->ns ? a->ns < b->ns : a->index < b->index;
}

/*
 * Appends one group's moves along the lower convex hull of its points (sorted, into hull); returns the number of moves.
 */
static int32_t append_hull(const struct dsc_recompute_choice *choices, int32_t size, bool is_peak, int32_t group,
                           int32_t *hull, struct dsc_recompute_move *moves, int32_t n_moves)
{
    int32_t n = 0;

    for (int32_t i = 0; i < size; i++)
        hull[i] = i;
    for (int32_t i = 1; i < size; i++) /* insertion sort, because there are few */
        for (int32_t j = i; j > 0; j--) {
            const struct dsc_recompute_choice *a = &choices[hull[j - 1]];
            const struct dsc_recompute_choice *b = &choices[hull[j]];
            struct point x = {a->kept_bytes + (is_peak ? a->transient_bytes : 0), a->added_ns, hull[j - 1]};
            struct point y = {b->kept_bytes + (is_peak ? b->transient_bytes : 0), b->added_ns, hull[j]};

            if (is_before(&x, &y))
                break;
            hull[j - 1] = y.index;
            hull[j] = x.index;
        }
    for (int32_t i = 0; i < size; i++) {
        const struct dsc_recompute_choice *at = &choices[hull[i]];
        int64_t bytes = at->kept_bytes + (is_peak ? at->transient_bytes : 0);

        while (n > 0) {
            const struct dsc_recompute_choice *last = &choices[hull[n - 1]];
            int64_t last_bytes = last->kept_bytes + (is_peak ? last->transient_bytes : 0);
            struct dsc_recompute_move move = {
                .bytes = bytes - last_bytes,
                .transient_bytes = is_peak ? 0 : at->transient_bytes - last->transient_bytes,
                .saved_ns = last->added_ns - at->added_ns,
                .group = group,
                .choice = hull[i],
            };

            if (move.saved_ns <= 0) /* this choice takes more bytes without less time; of choices with equal bytes
                                       the one with the least time came first */
                break;
            if (n > 1 && dsc_recompute_compare_slopes(&move, &moves[n_moves + n - 2]) <= 0) {
                n--; /* the last point does not lie below the line */
                continue;
            }
            moves[n_moves + n - 1] = move;
            hull[n++] = hull[i];
            break;
        }
        if (n == 0)
            hull[n++] = hull[i];
    }
    return n_moves + n - 1;
}

/*
 * The start of the moves of all groups: each group's smallest choice, and of equally small choices the one that adds
 * the least time.
 */
static struct dsc_recompute_option start_of(const struct dsc_recompute_view *view, bool is_peak, int32_t *out_groups)
{
    const struct dsc_recompute_choice *choices = dsc_recompute_choices(view);
    struct dsc_recompute_option start = {.kind = MOVES};

    for (int32_t g = 0; g < view->layer->n_groups; g++) {
        struct point first = {choices[0].kept_bytes + (is_peak ? choices[0].transient_bytes : 0), choices[0].added_ns,
                              0};

        for (int32_t c = 1; c < view->sizes[g]; c++) {
            struct point other = {choices[c].kept_bytes + (is_peak ? choices[c].transient_bytes : 0),
                                  choices[c].added_ns, c};

            if (is_before(&other, &first))
                first = other;
        }
        start.kept_bytes += choices[first.index].kept_bytes;
        start.transient_bytes += choices[first.index].transient_bytes;
        start.added_ns += choices[first.index].added_ns;
        if (out_groups != NULL)
            out_groups[g] = first.index;
        choices += view->sizes[g];
    }
    return start;
}

/*
 * The moves of all groups, steepest first. Moves without is_peak are needed several times, so they are computed once
 * and kept.
 */
static const struct dsc_recompute_move *group_moves(const struct dsc_recompute_view *view,
                                                    struct dsc_recompute_scratch *scratch, bool is_peak,
                                                    int32_t *out_n_moves)
{
    const struct dsc_recompute_choice *choices = dsc_recompute_choices(view);
    int32_t *n_known = &scratch->n_known[view->layer - scratch->problem->layers];
    struct dsc_recompute_move *moves =
        is_peak ? scratch->moves : &scratch->known[view->whole - scratch->problem->choices];
    int32_t n_moves = 0;

    if (!is_peak && *n_known >= 0) {
        *out_n_moves = *n_known;
        return moves;
    }
    for (int32_t g = 0; g < view->layer->n_groups; g++) {
        n_moves = append_hull(choices, view->sizes[g], is_peak, g, scratch->order, moves, n_moves);
        choices += view->sizes[g];
    }
    dsc_recompute_sort_moves(moves, n_moves, scratch->places, scratch->sorted);
    if (!is_peak)
        *n_known = n_moves;
    *out_n_moves = n_moves;
    return moves;
}

/*
 * Takes from each group the choice with the fewest bytes kept, or the fewest bytes in all. Ties are decided by the
 * other of the two numbers.
 */
static struct dsc_recompute_option least(const struct dsc_recompute_view *view, int32_t kind, int32_t *out_groups)
{
    const struct dsc_recompute_choice *choices = dsc_recompute_choices(view);
    struct dsc_recompute_option sum = {.kind = kind};

    for (int32_t g = 0; g < view->layer->n_groups; g++) {
        int32_t best = 0;

        for (int32_t c = 1; c < view->sizes[g]; c++) {
            const struct dsc_recompute_choice *a = &choices[c];
            const struct dsc_recompute_choice *b = &choices[best];
            int64_t a_peak = a->kept_bytes + a->transient_bytes;
            int64_t b_peak = b->kept_bytes + b->transient_bytes;
            int64_t first = kind == LEAST_KEPT ? a->kept_bytes - b->kept_bytes : a_peak - b_peak;
            int64_t second = kind == LEAST_KEPT ? a_peak - b_peak : a->kept_bytes - b->kept_bytes;

            if (first < 0 || (first == 0 && (second < 0 || (second == 0 && a->added_ns < b->added_ns))))
                best = c;
        }
        sum.kept_bytes += choices[best].kept_bytes;
        sum.transient_bytes += choices[best].transient_bytes;
        sum.added_ns += choices[best].added_ns;
        if (out_groups != NULL)
            out_groups[g] = best;
        choices += view->sizes[g];
    }
    return sum;
}

/* Writes evenly spaced points along the hull, and the two options that need the fewest bytes, to scratch->front. */
static int64_t hull_front(const struct dsc_recompute_view *view, struct dsc_recompute_scratch *scratch)
{
    struct dsc_recompute_option at = start_of(view, false, NULL);
    int64_t n = 0;
    int32_t n_moves;
    const struct dsc_recompute_move *moves = group_moves(view, scratch, false, &n_moves);
    int32_t n_between = (n_moves + MAX_MOVES_SHOWN) / MAX_MOVES_SHOWN;

    scratch->front[n++] = least(view, LEAST_KEPT, NULL);
    scratch->front[n++] = least(view, LEAST_PEAK, NULL);
    scratch->front[n++] = at;

    for (int32_t m = 0; m < n_moves; m++) {
        at.kept_bytes += moves[m].bytes;
        at.transient_bytes += moves[m].transient_bytes;
        at.added_ns -= moves[m].saved_ns;
        at.code = (uint64_t)m + 1;
        if ((m + 1) % n_between == 0 || m + 1 == n_moves)
            scratch->front[n++] = at;
    }
    return n;
}

int32_t dsc_recompute_front(const struct dsc_recompute_view *view, struct dsc_recompute_scratch *scratch,
                            struct dsc_recompute_option *out, bool *is_exact)
{
    const struct dsc_recompute_layer *layer = view->layer;
    int64_t n = 0;
    int64_t n_steps = 0;
    int32_t n_whole = layer->n_whole;

    if (layer->n_groups > 0 || layer->n_whole == 0) {
        n = packed_front(view, scratch);
        if (n < 0) {
            n = hull_front(view, scratch);
            *is_exact = false;
        }
    }
    memcpy(scratch->candidates, scratch->front, (size_t)n * sizeof *out);
    for (int32_t i = 0; i < n_whole; i++) {
        const struct dsc_recompute_choice *whole = &view->whole[i];

        scratch->candidates[n++] = (struct dsc_recompute_option){whole->kept_bytes, whole->transient_bytes,
                                                                 whole->added_ns, (uint64_t)i, WHOLE};
    }
    for (int64_t i = 0; i < n; i++)
        scratch->candidates[i].transient_bytes = larger(scratch->candidates[i].transient_bytes, layer->work_bytes);
    n = prune(scratch->candidates, n, DSC_RECOMPUTE_MAX_FRONT - 1, &n_steps);
    if (n > DSC_RECOMPUTE_MAX_FRONT - 1) { /* the options that keep the least stay, because the smallest budget needs
                                              them */
        n = DSC_RECOMPUTE_MAX_FRONT - 1;
        *is_exact = false;
    }
    memcpy(out, scratch->candidates, (size_t)n * sizeof *out);
    return (int32_t)n;
}

void dsc_recompute_decode(const struct dsc_recompute_view *view, struct dsc_recompute_scratch *scratch,
                          const struct dsc_recompute_option *option, int32_t *out_whole, int32_t *out_groups)
{
    const struct dsc_recompute_move *moves;
    int32_t n_moves;

    *out_whole = option->kind == WHOLE ? (int32_t)option->code : -1;
    switch (option->kind) {
    case WHOLE:
    case PACKED:
        for (int32_t g = 0; g < view->layer->n_groups; g++)
            out_groups[g] = option->kind == WHOLE ? -1 : (int32_t)(option->code >> 4 * g & 15);
        break;
    case MOVES:
        start_of(view, false, out_groups);
        moves = group_moves(view, scratch, false, &n_moves);
        for (uint64_t m = 0; m < option->code; m++)
            out_groups[moves[m].group] = moves[m].choice;
        break;
    default:
        least(view, option->kind, out_groups);
    }
}

/*
 * Converts an option of a layer to a point of the hull. With is_peak only the sum of kept and transient bytes counts.
 */
static struct dsc_recompute_choice point_of(struct dsc_recompute_choice sum, const struct dsc_recompute_layer *layer,
                                            bool is_peak)
{
    if (is_peak)
        return (struct dsc_recompute_choice){sum.kept_bytes + sum.transient_bytes, 0, sum.added_ns};
    sum.transient_bytes = larger(sum.transient_bytes, layer->work_bytes);
    return sum;
}

int32_t dsc_recompute_moves(const struct dsc_recompute_view *view, struct dsc_recompute_scratch *scratch, bool is_peak,
                            int32_t *out_first)
{
    const struct dsc_recompute_layer *layer = view->layer;
    int32_t n_points = 0;

    if (layer->n_groups > 0 || layer->n_whole == 0) {
        struct dsc_recompute_option start = start_of(view, is_peak, NULL);
        int32_t n_moves;
        const struct dsc_recompute_move *moves = group_moves(view, scratch, is_peak, &n_moves);
        struct dsc_recompute_choice at = {start.kept_bytes, start.transient_bytes, start.added_ns};

        for (int32_t m = 0; m <= n_moves; m++) {
            scratch->hull[n_points++] = point_of(at, layer, is_peak);
            if (m < n_moves) {
                at.kept_bytes += moves[m].bytes;
                at.transient_bytes += moves[m].transient_bytes;
                at.added_ns -= moves[m].saved_ns;
            }
        }
    }
    for (int32_t i = 0; i < layer->n_whole; i++)
        scratch->hull[n_points++] = point_of(view->whole[i], layer, is_peak);
    n_points = append_hull(scratch->hull, n_points, false, 0, scratch->order, scratch->moves, 0);
    *out_first = scratch->order[0];
    return n_points;
}

void dsc_recompute_decode_point(const struct dsc_recompute_view *view, struct dsc_recompute_scratch *scratch,
                                int32_t point, int32_t *out_whole, int32_t *out_groups)
{
    const struct dsc_recompute_layer *layer = view->layer;
    const struct dsc_recompute_move *moves = NULL;
    int32_t n_moves = -1;

    if (layer->n_groups > 0 || layer->n_whole == 0) {
        start_of(view, false, out_groups);
        moves = group_moves(view, scratch, false, &n_moves);
    }
    *out_whole = point > n_moves ? point - n_moves - 1 : -1;
    for (int32_t m = 0; m < point && m < n_moves; m++)
        out_groups[moves[m].group] = moves[m].choice;
    for (int32_t g = 0; g < layer->n_groups && *out_whole >= 0; g++)
        out_groups[g] = -1;
}
