/*
 * The order of moves along convex fronts: the most nanoseconds saved for a byte come first.
 *
 * Slopes are fractions, and the order is exact: products of 128 bits decide which fraction is larger. In most cases a
 * quotient in double decides already. Numbers below 2^53 convert exactly and the quotient is rounded correctly, so if
 * two quotients differ, the larger quotient belongs to the larger fraction.
 */
#include "recompute/front.h"

#include <string.h>

#define MAX_EXACT ((int64_t)1 << 53)
#define RUN 8 /* length of runs that are sorted by insertion before runs are merged */

int dsc_recompute_compare_slopes(const struct dsc_recompute_move *a, const struct dsc_recompute_move *b)
{
    __int128 x = (__int128)a->saved_ns * b->bytes;
    __int128 y = (__int128)b->saved_ns * a->bytes;

    return x > y ? -1 : x < y;
}

/* Whether a comes before b or is equal to it. */
static inline bool is_in_order(const struct dsc_recompute_move *moves, const struct dsc_recompute_place *a,
                               const struct dsc_recompute_place *b)
{
    const struct dsc_recompute_move *x = &moves[a->index];
    const struct dsc_recompute_move *y = &moves[b->index];
    int order;

    if (__builtin_expect(a->slope != b->slope && a->slope >= 0 && b->slope >= 0, true))
        return a->slope > b->slope;
    order = dsc_recompute_compare_slopes(x, y);
    if (order != 0)
        return order < 0;
    return x->group != y->group ? x->group < y->group : x->choice <= y->choice;
}

/* Merges two runs, each of at least one place. */
static void merge(const struct dsc_recompute_move *moves, const struct dsc_recompute_place *a,
                  const struct dsc_recompute_place *end_a, const struct dsc_recompute_place *b,
                  const struct dsc_recompute_place *end_b, struct dsc_recompute_place *out)
{
    while (a < end_a && b < end_b) { /* without a branch on the order, because the processor could not predict it */
        bool is_a = is_in_order(moves, a, b);

        *out++ = *(is_a ? a : b);
        a += is_a;
        b += !is_a;
    }
    memcpy(out, a, (size_t)(end_a - a) * sizeof *out);
    memcpy(out + (end_a - a), b, (size_t)(end_b - b) * sizeof *out);
}

static int64_t smaller(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

const struct dsc_recompute_place *dsc_recompute_order(const struct dsc_recompute_move *moves, int64_t n_moves,
                                                      struct dsc_recompute_place *places)
{
    struct dsc_recompute_place *from = places;
    struct dsc_recompute_place *to = places + n_moves;

    for (int64_t i = 0; i < n_moves; i++) {
        bool is_exact = moves[i].saved_ns < MAX_EXACT && moves[i].bytes < MAX_EXACT;
        struct dsc_recompute_place place = {
            .slope = is_exact ? (double)moves[i].saved_ns / (double)moves[i].bytes : -1.0,
            .index = (uint32_t)i,
        };
        int64_t j = i;

        for (; j % RUN != 0 && !is_in_order(moves, &from[j - 1], &place); j--)
            from[j] = from[j - 1];
        from[j] = place;
    }
    for (int64_t run = RUN; run < n_moves; run *= 2) {
        struct dsc_recompute_place *merged = to;

        for (int64_t begin = 0; begin < n_moves; begin += 2 * run) {
            int64_t middle = smaller(begin + run, n_moves);

            merge(moves, from + begin, from + middle, from + middle, from + smaller(begin + 2 * run, n_moves),
                  to + begin);
        }
        to = from;
        from = merged;
    }
    return from;
}

void dsc_recompute_sort_moves(struct dsc_recompute_move *moves, int64_t n_moves, struct dsc_recompute_place *places,
                              struct dsc_recompute_move *spare)
{
    const struct dsc_recompute_place *order = dsc_recompute_order(moves, n_moves, places);

    memcpy(spare, moves, (size_t)n_moves * sizeof *spare);
    for (int64_t i = 0; i < n_moves; i++)
        moves[i] = spare[order[i].index];
}
