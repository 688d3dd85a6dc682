/*
 * The budget's dynamic programme, from the last layer to the first.
 *
 * A state of layer i stands for a way to treat layer i and all later layers: the bytes that these layers need beyond
 * the bytes kept by earlier layers, and the time that they add. Let the layer before keep k bytes, hold t bytes while
 * it is recomputed, and add time u. A state (bytes, ns) then becomes (k + max(t, bytes), ns + u). States are sorted by
 * bytes, and each state adds less time than the previous one.
 */
#include "base/fail.h"
#include "recompute/front.h"

#include <stdlib.h>
#include <string.h>

#define MAX_STATES 4096
#define N_BUCKETS 256            /* into which states are thinned out */
#define MAX_SORTED 65536         /* candidates of one layer that may all be looked at */
#define MAX_SORTED_IN_ALL 131072 /* ... and all layers */
#define MAX_STEPS 2000000        /* comparisons of exact fronts */
#define N_CANDIDATES 2048

struct state {
    int64_t bytes;
    int64_t ns;
    uint16_t option;
    uint16_t next; /* state of the next layer */
};

/* The option and the state from which a state was made. */
struct link {
    uint16_t option;
    uint16_t next;
};

/* Consecutive layers: the bytes they keep, and the most that any of their moments needs, kept bytes included. */
struct stretch {
    int64_t kept_bytes;
    int64_t most_bytes;
};

struct search {
    const struct dsc_recompute_problem *problem;
    struct dsc_recompute_scratch scratch;
    struct dsc_recompute_view *views;
    struct dsc_recompute_option *options; /* of all layers */
    int64_t *first_option;                /* n_layers + 1 */
    int64_t *first_link;                  /* of each layer */
    int64_t *before_bytes;                /* the least that the layers before it keep */
    struct link *links;
    int64_t n_links;
    int64_t max_links;
    struct dsc_recompute_move *moves; /* of all layers, one layer after the other; group is the layer */
    struct dsc_recompute_place *places;
    const struct dsc_recompute_place *order; /* of moves, steepest first */
    struct dsc_recompute_choice *starts;     /* each layer's: the point where its moves begin */
    int64_t n_moves;
    struct state *states;
    struct state *candidates; /* MAX_SORTED */
    struct state *merged;     /* as many */
    struct state *buckets;    /* N_BUCKETS */
    struct stretch *tree;     /* node i is made of 2 i and 2 i + 1; layers are the leaves */
    int32_t *points;          /* of each layer, on its hull */
    bool *is_stuck;           /* of each layer: its next move did not fit */
    int32_t *other;           /* whole and groups of a second plan */
    int32_t n_leaves;
    int32_t n_states;
    int64_t n_sorted_left;
    bool is_exact;
};

static int64_t larger(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

static void free_search(struct search *s)
{
    free(s->scratch.candidates);
    free(s->scratch.front);
    free(s->scratch.moves);
    free(s->scratch.hull);
    free(s->scratch.order);
    free(s->scratch.sorted);
    free(s->scratch.places);
    free(s->scratch.known);
    free(s->scratch.n_known);
    free(s->views);
    free(s->options);
    free(s->first_option);
    free(s->first_link);
    free(s->before_bytes);
    free(s->links);
    free(s->moves);
    free(s->places);
    free(s->starts);
    free(s->tree);
    free(s->points);
    free(s->is_stuck);
    free(s->other);
    free(s->states);
    free(s->candidates);
    free(s->merged);
    free(s->buckets);
}

static void *array(int64_t n, size_t size)
{
    return calloc(n > 0 ? (size_t)n : 1, size);
}

static dsc_status fail_for_memory(void)
{
    return dsc_fail(DSC_ENOMEM, "no memory for the search of a plan");
}

/* The fronts of all layers, one after the other. */
static dsc_status find_options(struct search *s)
{
    int32_t n_layers = s->problem->n_layers;
    int64_t max_options = 0;
    int64_t n = 0;

    for (int32_t i = 0; i < n_layers; i++) {
        if (n + DSC_RECOMPUTE_MAX_FRONT > max_options) {
            max_options = 2 * max_options + 2 * DSC_RECOMPUTE_MAX_FRONT;

            void *grown = realloc(s->options, (size_t)max_options * sizeof *s->options);

            if (grown == NULL)
                return fail_for_memory();
            s->options = grown;
        }
        s->first_option[i] = n;
        n += dsc_recompute_front(&s->views[i], &s->scratch, &s->options[n], &s->is_exact);
    }
    s->first_option[n_layers] = n;
    s->before_bytes[0] = 0;
    for (int32_t i = 0; i < n_layers; i++) /* sorted by kept_bytes */
        s->before_bytes[i + 1] = s->before_bytes[i] + s->options[s->first_option[i]].kept_bytes;
    return DSC_OK;
}

static dsc_status begin_search(struct search *s, const struct dsc_recompute_problem *problem)
{
    int32_t n_layers = problem->n_layers;
    int64_t n_choices = 1;
    int64_t n_whole = 0;

    *s = (struct search){.problem = problem, .n_sorted_left = MAX_SORTED_IN_ALL, .is_exact = true};
    s->views = array(n_layers, sizeof *s->views);
    if (s->views == NULL)
        return fail_for_memory();
    if (n_layers > 0)
        s->views[0] = dsc_recompute_first(problem);
    for (int32_t i = 0; i < n_layers; i++) {
        struct dsc_recompute_view behind = s->views[i];

        dsc_recompute_next(&behind);
        n_choices = larger(n_choices, behind.whole - s->views[i].whole);
        n_whole = larger(n_whole, s->views[i].layer->n_whole);
        if (i + 1 < n_layers)
            s->views[i + 1] = behind;
    }
    s->scratch.n_candidates = larger(N_CANDIDATES, n_whole + DSC_RECOMPUTE_MAX_FRONT);
    s->scratch.n_steps_left = MAX_STEPS;
    s->scratch.candidates = array(s->scratch.n_candidates, sizeof *s->scratch.candidates);
    s->scratch.front = array(DSC_RECOMPUTE_MAX_FRONT, sizeof *s->scratch.front);
    s->scratch.moves = array(n_choices + 1, sizeof *s->scratch.moves);
    s->scratch.hull = array(n_choices + 1, sizeof *s->scratch.hull);
    s->scratch.order = array(n_choices + 1, sizeof *s->scratch.order);
    s->scratch.sorted = array(n_choices + 1, sizeof *s->scratch.sorted);
    s->scratch.places = array(2 * (n_choices + 1), sizeof *s->scratch.places);
    s->scratch.problem = problem;
    s->scratch.known = array(problem->n_choices, sizeof *s->scratch.known);
    s->scratch.n_known = array(n_layers, sizeof *s->scratch.n_known);
    s->first_option = array((int64_t)n_layers + 1, sizeof *s->first_option);
    s->first_link = array((int64_t)n_layers + 1, sizeof *s->first_link);
    s->before_bytes = array((int64_t)n_layers + 1, sizeof *s->before_bytes);
    s->moves = array((int64_t)problem->n_choices + n_layers, sizeof *s->moves);
    s->places = array(2 * ((int64_t)problem->n_choices + n_layers), sizeof *s->places);
    s->starts = array(n_layers, sizeof *s->starts);
    for (s->n_leaves = 1; s->n_leaves < n_layers;)
        s->n_leaves *= 2;
    s->tree = array(2 * (int64_t)s->n_leaves, sizeof *s->tree);
    s->points = array(n_layers, sizeof *s->points);
    s->is_stuck = array(n_layers, sizeof *s->is_stuck);
    s->other = array((int64_t)n_layers + problem->n_group_sizes, sizeof *s->other);
    s->states = array(MAX_STATES, sizeof *s->states);
    s->candidates = array(MAX_SORTED, sizeof *s->candidates);
    s->merged = array(MAX_SORTED, sizeof *s->merged);
    s->buckets = array(N_BUCKETS, sizeof *s->buckets);
    if (s->scratch.candidates == NULL || s->scratch.front == NULL || s->scratch.moves == NULL ||
        s->scratch.hull == NULL || s->scratch.order == NULL || s->scratch.sorted == NULL || s->scratch.places == NULL ||
        s->scratch.known == NULL || s->scratch.n_known == NULL || s->places == NULL || s->starts == NULL ||
        s->first_option == NULL || s->first_link == NULL || s->before_bytes == NULL || s->moves == NULL ||
        s->tree == NULL || s->points == NULL || s->is_stuck == NULL || s->other == NULL || s->states == NULL ||
        s->candidates == NULL || s->merged == NULL || s->buckets == NULL)
        return fail_for_memory();
    for (int32_t i = 0; i < n_layers; i++)
        s->scratch.n_known[i] = -1;
    return find_options(s);
}

/* The least bytes that this layer and later ones need beyond the bytes kept by earlier layers. */
static int64_t least_bytes(const struct search *s, int32_t layer, int64_t behind)
{
    int64_t least = INT64_MAX;

    for (int64_t o = s->first_option[layer]; o < s->first_option[layer + 1]; o++) {
        int64_t bytes = s->options[o].kept_bytes + larger(s->options[o].transient_bytes, behind);

        least = bytes < least ? bytes : least;
    }
    return least;
}

static int64_t smallest(const struct search *s)
{
    int64_t bytes = 0;

    for (int32_t i = s->problem->n_layers - 1; i >= 0; i--)
        bytes = least_bytes(s, i, bytes);
    return bytes;
}

static int compare_states(const void *a, const void *b)
{
    const struct state *x = a;
    const struct state *y = b;

    if (x->bytes != y->bytes)
        return x->bytes < y->bytes ? -1 : 1;
    if (x->ns != y->ns)
        return x->ns < y->ns ? -1 : 1;
    if (x->option != y->option)
        return x->option < y->option ? -1 : 1;
    return (x->next > y->next) - (x->next < y->next);
}

/*
 * Returns the first state that matters for a layer with this transient. Earlier states need as many bytes with this
 * layer, and add more time.
 */
static int32_t first_behind(const struct search *s, int64_t transient_bytes)
{
    int32_t low = 0;
    int32_t high = s->n_states - 1;

    while (low < high) {
        int32_t middle = (low + high + 1) / 2;

        if (s->states[middle].bytes <= transient_bytes)
            low = middle;
        else
            high = middle - 1;
    }
    return low;
}

/* Merges two sorted runs, and drops states that do not add less time than an earlier state. */
static int64_t merge(const struct state *a, const struct state *end_a, const struct state *b, const struct state *end_b,
                     struct state *out)
{
    int64_t least_ns = INT64_MAX;
    int64_t n = 0;

    while (a < end_a || b < end_b) {
        const struct state *next = b == end_b || (a < end_a && compare_states(a, b) < 0) ? a++ : b++;

        if (next->ns < least_ns) {
            out[n++] = *next;
            least_ns = next->ns;
        }
    }
    return n;
}

/*
 * Makes all pairs of an option and a state, sorted. The pairs of one option have the order of the states, so the runs
 * of all options are merged.
 */
static void combine_all(struct search *s, const struct dsc_recompute_option *options, int32_t n_options, int64_t limit)
{
    int32_t begins[DSC_RECOMPUTE_MAX_FRONT + 1];
    int32_t n_runs = n_options;
    int32_t n = 0;

    for (int32_t o = 0; o < n_options; o++) {
        begins[o] = n;
        for (int32_t i = first_behind(s, options[o].transient_bytes); i < s->n_states; i++) {
            int64_t bytes = options[o].kept_bytes + larger(options[o].transient_bytes, s->states[i].bytes);

            if (bytes > limit)
                break;
            s->candidates[n++] = (struct state){bytes, options[o].added_ns + s->states[i].ns, (uint16_t)o, (uint16_t)i};
        }
    }
    begins[n_options] = n;
    s->n_sorted_left -= n;
    while (n_runs > 1) {
        struct state *from = s->candidates;
        int32_t n_merged = 0;

        n = 0;
        for (int32_t r = 0; r < n_runs; r += 2) {
            int32_t middle = begins[r + 1];
            int32_t end = begins[r + 2 <= n_runs ? r + 2 : n_runs];
            int64_t length = merge(from + begins[r], from + middle, from + middle, from + end, s->merged + n);

            begins[n_merged++] = n; /* the overwritten entries have been read */
            n += (int32_t)length;
        }
        begins[n_merged] = n;
        n_runs = n_merged;
        s->candidates = s->merged;
        s->merged = from;
    }
    s->n_states = n;
}

/* Thins out the sorted s->candidates: keeps the first state, and in each bucket the state that adds the least time. */
static void thin_out(struct search *s, int64_t limit)
{
    int64_t first = s->candidates[0].bytes;
    int shift = 0;
    int32_t n = 1;

    while ((limit - first) >> shift >= N_BUCKETS)
        shift++;
    s->is_exact = false;
    for (int32_t i = 1; i < s->n_states; i++) {
        bool is_last = i + 1 == s->n_states ||
                       (s->candidates[i + 1].bytes - first) >> shift != (s->candidates[i].bytes - first) >> shift;

        if (is_last)
            s->candidates[n++] = s->candidates[i];
    }
    s->n_states = n;
}

/* Does the work of combine_all and thin_out without storing all pairs. */
static void combine_in_buckets(struct search *s, const struct dsc_recompute_option *options, int32_t n_options,
                               int64_t limit, int64_t least)
{
    struct state first = {least, INT64_MAX, 0, 0};
    int shift = 0;
    int32_t n = 0;

    while ((limit - least) >> shift >= N_BUCKETS)
        shift++;
    s->is_exact = false;
    for (int32_t b = 0; b < N_BUCKETS; b++)
        s->buckets[b].ns = INT64_MAX;
    for (int32_t o = 0; o < n_options; o++) {
        const struct dsc_recompute_option option = options[o];

        for (int32_t i = first_behind(s, option.transient_bytes); i < s->n_states; i++) {
            int64_t bytes = option.kept_bytes + larger(option.transient_bytes, s->states[i].bytes);
            int64_t ns = option.added_ns + s->states[i].ns;

            if (bytes > limit)
                break;

            struct state *bucket = &s->buckets[(bytes - least) >> shift];

            if (ns < bucket->ns || (ns == bucket->ns && bytes < bucket->bytes))
                *bucket = (struct state){bytes, ns, (uint16_t)o, (uint16_t)i};
            if (bytes == least && ns < first.ns)
                first = (struct state){bytes, ns, (uint16_t)o, (uint16_t)i};
        }
    }
    s->candidates[n++] = first;
    for (int32_t b = 0; b < N_BUCKETS; b++)
        if (s->buckets[b].ns < s->candidates[n - 1].ns)
            s->candidates[n++] = s->buckets[b];
    s->n_states = n;
}

static dsc_status keep_links(struct search *s, int32_t layer)
{
    if (s->n_links + s->n_states > s->max_links) {
        s->max_links = 2 * s->max_links + s->n_states;

        void *grown = realloc(s->links, (size_t)s->max_links * sizeof *s->links);

        if (grown == NULL)
            return fail_for_memory();
        s->links = grown;
    }
    s->first_link[layer] = s->n_links;
    for (int32_t i = 0; i < s->n_states; i++)
        s->links[s->n_links++] = (struct link){s->candidates[i].option, s->candidates[i].next};
    memcpy(s->states, s->candidates, (size_t)s->n_states * sizeof *s->states);
    return DSC_OK;
}

static dsc_status run(struct search *s, int64_t budget_bytes)
{
    s->states[0] = (struct state){0, 0, 0, 0};
    s->n_states = 1;
    for (int32_t i = s->problem->n_layers - 1; i >= 0; i--) {
        const struct dsc_recompute_option *options = &s->options[s->first_option[i]];
        int32_t n_options = (int32_t)(s->first_option[i + 1] - s->first_option[i]);
        int64_t n_pairs = (int64_t)n_options * s->n_states;
        int64_t limit = budget_bytes - s->before_bytes[i];

        if (n_pairs <= MAX_SORTED && n_pairs <= s->n_sorted_left) {
            combine_all(s, options, n_options, limit);
            if (s->n_states > MAX_STATES)
                thin_out(s, limit);
        } else {
            combine_in_buckets(s, options, n_options, limit, least_bytes(s, i, s->states[0].bytes));
        }
        DSC_TRY(keep_links(s, i));
    }
    return DSC_OK;
}

/* Decodes the choices of the last state, which adds the least time of all states that fit. */
static void decode(struct search *s, struct dsc_recompute_plan *plan)
{
    int32_t state = s->n_states - 1;
    int32_t *groups = plan->groups;

    for (int32_t i = 0; i < s->problem->n_layers; i++) {
        struct link link = s->links[s->first_link[i] + state];

        dsc_recompute_decode(&s->views[i], &s->scratch, &s->options[s->first_option[i] + link.option], &plan->whole[i],
                             groups);
        groups += s->views[i].layer->n_groups;
        state = link.next;
    }
}

/*
 * Uses memory that thinning has left unused: from the last layer to the first, takes each choice that adds less time
 * and fits. kept: bytes that layers 0..i keep. room: bytes that are left at every moment after the moment of i.
 */
static void use_room(struct search *s, int64_t budget_bytes, struct dsc_recompute_plan *plan)
{
    int32_t *groups = plan->groups + s->problem->n_group_sizes;
    int64_t room = INT64_MAX;
    int64_t kept = 0;

    for (int32_t i = 0, *at = plan->groups; i < s->problem->n_layers; at += s->views[i++].layer->n_groups)
        kept += dsc_recompute_sum(&s->views[i], plan->whole[i], at).kept_bytes;
    for (int32_t i = s->problem->n_layers - 1; i >= 0; i--) {
        const struct dsc_recompute_view *view = &s->views[i];
        const struct dsc_recompute_choice *choices = dsc_recompute_choices(view);
        int32_t n_groups = view->layer->n_groups;

        groups -= n_groups;

        struct dsc_recompute_choice sum = dsc_recompute_sum(view, plan->whole[i], groups);
        int64_t before = kept - sum.kept_bytes;

        for (int32_t g = 0; g < n_groups && plan->whole[i] < 0; choices += view->sizes[g++])
            for (int32_t c = 0; c < view->sizes[g]; c++) {
                const struct dsc_recompute_choice *now = &choices[groups[g]];
                struct dsc_recompute_choice then = {
                    sum.kept_bytes + choices[c].kept_bytes - now->kept_bytes,
                    sum.transient_bytes + choices[c].transient_bytes - now->transient_bytes,
                    sum.added_ns + choices[c].added_ns - now->added_ns,
                };

                if (then.added_ns >= sum.added_ns || then.kept_bytes - sum.kept_bytes > room ||
                    before + then.kept_bytes + larger(then.transient_bytes, view->layer->work_bytes) > budget_bytes)
                    continue;
                if (room != INT64_MAX)
                    room -= then.kept_bytes - sum.kept_bytes;
                sum = then;
                groups[g] = c;
            }

        int64_t left = budget_bytes - before - sum.kept_bytes - larger(sum.transient_bytes, view->layer->work_bytes);

        room = left < room ? left : room;
        kept = before;
    }
}

/* The moves of all layers, and their order. */
static void find_moves(struct search *s)
{
    s->n_moves = 0;
    for (int32_t i = 0; i < s->problem->n_layers; i++) {
        int32_t n = dsc_recompute_moves(&s->views[i], &s->scratch, false, &s->points[i]);

        s->starts[i] = s->scratch.hull[s->points[i]];
        for (int32_t m = 0; m < n; m++) {
            s->moves[s->n_moves] = s->scratch.moves[m];
            s->moves[s->n_moves++].group = i;
        }
    }
    s->order = dsc_recompute_order(s->moves, s->n_moves, s->places);
}

/*
 * Computes a lower bound for a relaxed problem: only the moment of plan->peak_layer counts, and each layer may mix its
 * choices. This linear problem is solved by taking the steepest moves first. The peak layer itself has other moves
 * (is_peak).
 */
static void find_bound(struct search *s, int64_t budget_bytes, struct dsc_recompute_plan *plan)
{
    int32_t first;
    int32_t n_own = dsc_recompute_moves(&s->views[plan->peak_layer], &s->scratch, true, &first);
    int32_t own = 0;
    int64_t room = budget_bytes - s->scratch.hull[first].kept_bytes;
    __int128 ns = s->scratch.hull[first].added_ns;

    for (int32_t i = 0; i < s->problem->n_layers; i++)
        if (i != plan->peak_layer) {
            ns += s->starts[i].added_ns;
            room -= i < plan->peak_layer ? s->starts[i].kept_bytes : 0;
        }
    for (int64_t m = 0; m < s->n_moves; m++) /* later layers hold nothing at that moment */
        ns -= s->moves[m].group > plan->peak_layer ? s->moves[m].saved_ns : 0;
    for (int64_t m = 0; (m < s->n_moves || own < n_own) && room > 0;) {
        const struct dsc_recompute_move *move = m < s->n_moves ? &s->moves[s->order[m].index] : NULL;

        if (move != NULL && move->group >= plan->peak_layer) {
            m++;
            continue;
        }
        if (move == NULL || (own < n_own && dsc_recompute_compare_slopes(&s->scratch.moves[own], move) < 0))
            move = &s->scratch.moves[own++];
        else
            m++;
        if (move->bytes > room) {
            ns -= ((__int128)move->saved_ns * room + move->bytes - 1) / move->bytes;
            break;
        }
        ns -= move->saved_ns;
        room -= move->bytes;
    }
    plan->bound_ns = ns < 0 ? 0 : (int64_t)ns;
}

/* Sets a layer's leaf: the bytes it keeps, and the bytes its moment adds to them. */
static void set_leaf(struct search *s, int32_t layer, int64_t kept_bytes, int64_t transient_bytes)
{
    int32_t at = layer + s->n_leaves;

    s->tree[at] = (struct stretch){kept_bytes, kept_bytes + transient_bytes};
    while ((at /= 2) > 0) {
        const struct stretch *a = &s->tree[2 * at];
        const struct stretch *b = &s->tree[2 * at + 1];

        s->tree[at] =
            (struct stretch){a->kept_bytes + b->kept_bytes, larger(a->most_bytes, a->kept_bytes + b->most_bytes)};
    }
}

/*
 * Starts with the choices that keep the least, and takes the moves of all layers in order of time saved per byte, as
 * far as they fit. False if the start itself does not fit.
 */
static bool take_steepest(struct search *s, int64_t budget_bytes, struct dsc_recompute_plan *plan)
{
    int32_t n_layers = s->problem->n_layers;
    int32_t *groups = plan->groups;

    memset(s->tree, 0, 2 * (size_t)s->n_leaves * sizeof *s->tree);
    for (int32_t i = 0; i < n_layers; i++) {
        set_leaf(s, i, s->starts[i].kept_bytes, s->starts[i].transient_bytes);
        s->is_stuck[i] = false;
    }
    if (s->tree[1].most_bytes > budget_bytes)
        return false;
    for (int64_t m = 0; m < s->n_moves; m++) {
        const struct dsc_recompute_move *move = &s->moves[s->order[m].index];
        int32_t layer = move->group;
        struct stretch leaf = s->tree[layer + s->n_leaves];
        int64_t transient_bytes = leaf.most_bytes - leaf.kept_bytes;

        if (s->is_stuck[layer])
            continue;
        set_leaf(s, layer, leaf.kept_bytes + move->bytes, transient_bytes + move->transient_bytes);
        if (s->tree[1].most_bytes > budget_bytes) { /* its next move begins where this one ends */
            set_leaf(s, layer, leaf.kept_bytes, transient_bytes);
            s->is_stuck[layer] = true;
        } else {
            s->points[layer] = move->choice;
        }
    }
    for (int32_t i = 0; i < n_layers; i++) {
        dsc_recompute_decode_point(&s->views[i], &s->scratch, s->points[i], &plan->whole[i], groups);
        groups += s->views[i].layer->n_groups;
    }
    return true;
}

dsc_status dsc_recompute_smallest(const struct dsc_recompute_problem *problem, int64_t *out_bytes)
{
    struct search s;
    dsc_status status;

    DSC_TRY(dsc_recompute_check(problem));
    if (out_bytes == NULL)
        return dsc_fail(DSC_EINVAL, "out_bytes is NULL");
    status = begin_search(&s, problem);
    if (status == DSC_OK)
        *out_bytes = smallest(&s);
    free_search(&s);
    return status;
}

/* Takes the plan of the steepest moves if it adds less time. */
static void take_better(struct search *s, int64_t budget_bytes, struct dsc_recompute_plan *plan)
{
    struct dsc_recompute_plan other = *plan;
    int32_t n_layers = s->problem->n_layers;

    other.whole = s->other;
    other.groups = s->other + n_layers;
    if (!take_steepest(s, budget_bytes, &other))
        return;
    use_room(s, budget_bytes, &other);
    dsc_recompute_add_up(s->problem, &other);
    if (other.added_ns >= plan->added_ns)
        return;
    memcpy(plan->whole, other.whole, (size_t)n_layers * sizeof *other.whole);
    if (s->problem->n_group_sizes > 0)
        memcpy(plan->groups, other.groups, (size_t)s->problem->n_group_sizes * sizeof *other.groups);
    plan->peak_bytes = other.peak_bytes;
    plan->added_ns = other.added_ns;
    plan->peak_layer = other.peak_layer;
}

static dsc_status solve(struct search *s, int64_t budget_bytes, struct dsc_recompute_plan *plan)
{
    struct dsc_recompute_plan found = *plan;

    found.smallest_bytes = smallest(s);
    if (found.smallest_bytes > budget_bytes) {
        plan->smallest_bytes = found.smallest_bytes;
        return dsc_fail(DSC_ENOSPC, "the smallest possible budget is %lld bytes, %lld are given",
                        (long long)found.smallest_bytes, (long long)budget_bytes);
    }
    DSC_TRY(run(s, budget_bytes));
    decode(s, &found);
    found.is_exact = s->is_exact;
    if (!found.is_exact)
        use_room(s, budget_bytes, &found);
    dsc_recompute_add_up(s->problem, &found);
    found.bound_ns = found.added_ns;
    if (!found.is_exact) {
        find_moves(s);
        take_better(s, budget_bytes, &found);
        find_bound(s, budget_bytes, &found);
    }
    *plan = found;
    return DSC_OK;
}

dsc_status dsc_recompute_solve(const struct dsc_recompute_problem *problem, int64_t budget_bytes,
                               struct dsc_recompute_plan *plan)
{
    struct search s;
    dsc_status status;

    DSC_TRY(dsc_recompute_check(problem));
    if (plan == NULL || (plan->whole == NULL && problem->n_layers > 0) ||
        (plan->groups == NULL && problem->n_group_sizes > 0))
        return dsc_fail(DSC_EINVAL, "plan, whole or groups is NULL");
    if (budget_bytes < 0)
        return dsc_fail(DSC_EINVAL, "budget_bytes is %lld, must not be negative", (long long)budget_bytes);
    status = begin_search(&s, problem);
    if (status == DSC_OK)
        status = solve(&s, budget_bytes, plan);
    free_search(&s);
    return status;
}
