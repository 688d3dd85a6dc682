/*
 * Adds gathers and releases of weights to a table.
 *
 * Each rank is planned alone, over its computations 0 to n - 1. A *gap* lies between two uses of a stage. The units
 * that leave the rank during a gap are *cut* there: released after the first use, and gathered for the second one. The
 * first gather of a unit is a cut as well. The plan chooses the cuts from left to right, and then moves their gathers
 * forward into room that is left.
 */
#include "base/fail.h"
#include "pipe/pipe.h"

#include <stdlib.h>
#include <string.h>

#define NONE (-1)

struct cut {
    int64_t from;      /* the computation after which the unit is released, or NONE for its first gather */
    int64_t to;        /* the computation that needs it again */
    int64_t gather_at; /* the computation before which it is gathered; NONE: it stays after all */
    int32_t unit;      /* index in table->units */
};

/* Units of one stage in its current gap. Only units of the list are away; the others are held. */
struct gap {
    int64_t from;
    int64_t to;         /* the stage's next use, or NONE: no gap is open */
    int64_t held;       /* elements */
    int64_t total;      /* elements of all units of the stage */
    int32_t first_unit; /* index in table->units */
    int32_t n_units;
    int32_t n_away;
};

struct plan {
    const struct dsc_pipe_table *table;
    int64_t limit; /* INT64_MAX for none */
    int32_t ahead;
    struct gap *gaps; /* n_stages */
    bool *is_away;    /* n_units: cut in the current gap */
    int32_t *dropped; /* n_units: units that this step has cut, in this order */
    int32_t *stages;  /* stages of the rank that have units */
    int32_t n_stages;
    /* By computation of the rank. */
    int64_t *computes;  /* its index in table->actions */
    int64_t *next_use;  /* the stage's next computation, or NONE */
    int64_t *live;      /* live elements during it */
    int64_t *first_cut; /* index of the first cut from it, or NONE; its cuts stand together */
    int64_t n_computes;
    struct cut *cuts; /* by to */
    int64_t n_cuts;
    int64_t cuts_capacity;
};

static dsc_status push_cut(struct plan *plan, int64_t from, int64_t to, int32_t unit)
{
    if (plan->n_cuts == plan->cuts_capacity) {
        int64_t capacity = plan->cuts_capacity < 64 ? 64 : 2 * plan->cuts_capacity;
        struct cut *cuts = realloc(plan->cuts, (size_t)capacity * sizeof *cuts);

        if (cuts == NULL)
            return dsc_fail(DSC_ENOMEM, "no memory for %lld gathers", (long long)capacity);
        plan->cuts = cuts;
        plan->cuts_capacity = capacity;
    }
    if (from != NONE && plan->first_cut[from] == NONE)
        plan->first_cut[from] = plan->n_cuts;
    plan->cuts[plan->n_cuts++] = (struct cut){from, to, to, unit};
    return DSC_OK;
}

/* The stage of the rank that is used last of all that still hold something. There is one while the limit is exceeded.
 */
static struct gap *farthest(const struct plan *plan)
{
    struct gap *found = NULL;

    for (int32_t i = 0; i < plan->n_stages; i++) {
        struct gap *gap = &plan->gaps[plan->stages[i]];

        if (gap->to != NONE && gap->held > 0 && (found == NULL || gap->to > found->to))
            found = gap;
    }
    return found;
}

/* A held unit of the gap: the smallest that frees enough, else the largest. Of equals the last. */
static int32_t pick(const struct plan *plan, const struct gap *gap, int64_t wanted)
{
    const struct dsc_pipe_unit *units = plan->table->units;
    int32_t best = NONE;

    for (int32_t i = gap->first_unit; i < gap->first_unit + gap->n_units; i++) {
        bool is_enough = units[i].numel >= wanted;
        bool had_enough = best != NONE && units[best].numel >= wanted;

        if (plan->is_away[i])
            continue;
        if (best == NONE || (is_enough && !had_enough) ||
            (is_enough == had_enough &&
             (is_enough ? units[i].numel <= units[best].numel : units[i].numel >= units[best].numel)))
            best = i;
    }
    return best;
}

static void set_away(struct plan *plan, struct gap *gap, int32_t unit, bool is_away)
{
    int64_t numel = plan->table->units[unit].numel;

    plan->is_away[unit] = is_away;
    gap->held += is_away ? -numel : numel;
    gap->n_away += is_away ? 1 : -1;
}

/*
 * Cuts units of other stages until the rank holds at most room elements in gaps. Then takes back units that fit beside
 * the last ones after all. Before this computation they were held anyway, so a unit that is taken back breaks no limit
 * there.
 */
static void make_room(struct plan *plan, int64_t *held, int64_t room)
{
    int64_t n_dropped = 0;

    while (*held > room) {
        struct gap *gap = farthest(plan);
        int32_t unit = pick(plan, gap, *held - room);

        set_away(plan, gap, unit, true);
        *held -= plan->table->units[unit].numel;
        plan->dropped[n_dropped++] = unit;
    }
    while (n_dropped-- > 0) {
        int32_t unit = plan->dropped[n_dropped];
        int64_t numel = plan->table->units[unit].numel;

        if (*held + numel > room)
            continue;
        set_away(plan, &plan->gaps[plan->table->units[unit].stage], unit, false);
        *held += numel;
    }
}

/* Ends the stage's gap at computation j: its units that are away come back. The first use needs all of them. */
static dsc_status close_gap(struct plan *plan, struct gap *gap, int64_t j)
{
    bool is_first = gap->from == NONE;
    bool is_reversed = pipe_makes_gradient(plan->table->actions[plan->computes[j]].kind);

    for (int32_t i = 0; (is_first || gap->n_away > 0) && i < gap->n_units; i++) {
        int32_t unit = gap->first_unit + (is_reversed ? gap->n_units - 1 - i : i);

        if (is_first)
            DSC_TRY(push_cut(plan, NONE, j, unit));
        if (!plan->is_away[unit])
            continue;
        DSC_TRY(push_cut(plan, gap->from, j, unit));
        set_away(plan, gap, unit, false);
    }
    return DSC_OK;
}

/* Chooses what is cut in each gap. */
static dsc_status choose_cuts(struct plan *plan, int32_t rank)
{
    int64_t held = 0; /* elements in open gaps */

    for (int64_t j = 0; j < plan->n_computes; j++) {
        int32_t stage = plan->table->actions[plan->computes[j]].stage;
        struct gap *gap = &plan->gaps[stage];

        if (gap->total > plan->limit)
            return dsc_fail(DSC_EINVAL,
                            "a computation on stage %d of rank %d needs %lld live elements, the limit is %lld",
                            (int)stage, (int)rank, (long long)gap->total, (long long)plan->limit);
        if (gap->to != NONE)
            held -= gap->held;
        DSC_TRY(close_gap(plan, gap, j));
        gap->to = NONE;
        make_room(plan, &held, plan->limit - gap->total);
        gap->from = j;
        gap->to = plan->next_use[j];
        gap->held = gap->total;
        if (gap->to != NONE)
            held += gap->total;
    }
    return DSC_OK;
}

/* Sums the live elements of each computation: a unit is live from its first to its last use, but not within cuts. */
static void sum_live(struct plan *plan)
{
    memset(plan->live, 0, (size_t)(plan->n_computes + 1) * sizeof *plan->live);
    for (int64_t i = 0; i < plan->n_cuts; i++) {
        const struct cut *cut = &plan->cuts[i];
        int64_t numel = plan->table->units[cut->unit].numel;

        if (cut->from != NONE)
            plan->live[cut->from + 1] -= numel;
        plan->live[cut->to] += numel;
    }
    for (int64_t j = 0; j < plan->n_computes; j++)
        if (plan->next_use[j] == NONE)
            plan->live[j + 1] -= plan->gaps[plan->table->actions[plan->computes[j]].stage].total;
    for (int64_t j = 1; j <= plan->n_computes; j++)
        plan->live[j] += plan->live[j - 1];
}

/* Moves gathers to the first computation, of the `ahead` before their use, from which on the limit has room for them.
 */
static void move_gathers(struct plan *plan)
{
    int64_t last = 0; /* place of the gather before: gathers stand in the order of their uses */

    sum_live(plan);
    for (int64_t i = 0; i < plan->n_cuts; i++) {
        struct cut *cut = &plan->cuts[i];
        int64_t numel = plan->table->units[cut->unit].numel;
        int64_t first = cut->to - plan->ahead;

        first = first > cut->from + 1 ? first : cut->from + 1;
        first = first > last ? first : last;
        while (cut->gather_at > first && plan->live[cut->gather_at - 1] <= plan->limit - numel)
            plan->live[--cut->gather_at] += numel;
        if (cut->from != NONE && cut->gather_at == cut->from + 1)
            cut->gather_at = NONE; /* later cuts have left room for the whole gap */
        else
            last = cut->gather_at;
    }
}

static void push_unit(const struct plan *plan, struct pipe_list *list, enum dsc_pipe_kind kind, int32_t unit)
{
    int32_t stage = plan->table->units[unit].stage;

    dsc_pipe_push(list, kind, stage, unit - plan->gaps[stage].first_unit);
}

/* Releases that follow computation j. */
static void push_releases(const struct plan *plan, struct pipe_list *list, int64_t j)
{
    const struct gap *gap = &plan->gaps[plan->table->actions[plan->computes[j]].stage];

    if (plan->next_use[j] == NONE)
        for (int32_t i = 0; i < gap->n_units; i++)
            push_unit(plan, list, DSC_PIPE_RELEASE, gap->first_unit + i);
    for (int64_t i = plan->first_cut[j]; i != NONE && i < plan->n_cuts && plan->cuts[i].from == j; i++)
        if (plan->cuts[i].gather_at != NONE)
            push_unit(plan, list, DSC_PIPE_RELEASE, plan->cuts[i].unit);
}

/* Appends the rank's list. Gathers for computation j stand behind the sends of the one before, and before receives. */
static void write_list(const struct plan *plan, int32_t rank, struct pipe_list *list)
{
    const struct dsc_pipe_table *table = plan->table;
    int64_t next_cut = 0;
    int64_t j = 0;             /* the next computation */
    bool are_gathered = false; /* the gathers for j stand in the list */

    for (int64_t i = table->begins[rank]; i <= table->begins[rank + 1]; i++) {
        const struct dsc_pipe_action *action = &table->actions[i];
        bool is_end = i == table->begins[rank + 1];

        if (!are_gathered && (is_end || !pipe_sends(action->kind))) {
            for (; next_cut < plan->n_cuts && plan->cuts[next_cut].gather_at <= j; next_cut++)
                if (plan->cuts[next_cut].gather_at != NONE)
                    push_unit(plan, list, DSC_PIPE_GATHER, plan->cuts[next_cut].unit);
            are_gathered = true;
        }
        if (is_end)
            break;
        dsc_pipe_push(list, action->kind, action->stage, action->micro_batch);
        if (pipe_computes(action->kind)) {
            push_releases(plan, list, j++);
            are_gathered = false;
        }
    }
}

static dsc_status plan_rank(struct plan *plan, int32_t rank, struct pipe_list *list)
{
    const struct dsc_pipe_table *table = plan->table;

    plan->n_computes = 0;
    plan->n_cuts = 0;
    plan->n_stages = 0;
    for (int32_t stage = 0; stage < table->n_stages; stage++)
        if (table->rank_of[stage] == rank && plan->gaps[stage].n_units > 0)
            plan->stages[plan->n_stages++] = stage;
    for (int64_t i = table->begins[rank]; i < table->begins[rank + 1]; i++)
        if (pipe_computes(table->actions[i].kind))
            plan->computes[plan->n_computes++] = i;
    for (int64_t j = plan->n_computes - 1; j >= 0; j--) {
        /* While lists are read backwards, gap->to is the next use. */
        struct gap *gap = &plan->gaps[table->actions[plan->computes[j]].stage];

        plan->next_use[j] = gap->to;
        plan->first_cut[j] = NONE;
        gap->to = j;
    }
    for (int32_t i = 0; i < plan->n_stages; i++)
        plan->gaps[plan->stages[i]].to = NONE;
    DSC_TRY(choose_cuts(plan, rank));
    move_gathers(plan);
    write_list(plan, rank, list);
    return DSC_OK;
}

static dsc_status open_plan(struct plan *plan)
{
    const struct dsc_pipe_table *table = plan->table;
    int64_t longest = 0;

    for (int32_t rank = 0; rank < table->n_ranks; rank++)
        if (table->begins[rank + 1] - table->begins[rank] > longest)
            longest = table->begins[rank + 1] - table->begins[rank];
    plan->limit = table->limit_elements < 0 ? INT64_MAX : table->limit_elements;
    plan->gaps = calloc((size_t)table->n_stages, sizeof *plan->gaps);
    plan->stages = calloc((size_t)table->n_stages, sizeof *plan->stages);
    plan->is_away = calloc((size_t)table->n_units + 1, sizeof *plan->is_away);
    plan->dropped = calloc((size_t)table->n_units + 1, sizeof *plan->dropped);
    plan->computes = calloc((size_t)longest + 1, sizeof *plan->computes);
    plan->next_use = calloc((size_t)longest + 1, sizeof *plan->next_use);
    plan->live = calloc((size_t)longest + 1, sizeof *plan->live);
    plan->first_cut = calloc((size_t)longest + 1, sizeof *plan->first_cut);
    if (plan->gaps == NULL || plan->stages == NULL || plan->is_away == NULL || plan->dropped == NULL ||
        plan->computes == NULL || plan->next_use == NULL || plan->live == NULL || plan->first_cut == NULL)
        return dsc_fail(DSC_ENOMEM, "no memory for %lld actions and %d units", (long long)longest, (int)table->n_units);
    return DSC_OK;
}

static void close_plan(struct plan *plan)
{
    free(plan->gaps);
    free(plan->stages);
    free(plan->is_away);
    free(plan->dropped);
    free(plan->computes);
    free(plan->next_use);
    free(plan->live);
    free(plan->first_cut);
    free(plan->cuts);
}

/* Writes the lists of all ranks, and their begins. */
static dsc_status write_all(struct plan *plan, struct pipe_list *list, int64_t *begins)
{
    const struct dsc_pipe_table *table = plan->table;

    for (int32_t stage = 0; stage < table->n_stages; stage++) {
        int32_t first = pipe_first_unit(table, stage);
        struct gap gap = {.from = NONE, .to = NONE, .first_unit = first};

        gap.n_units = pipe_first_unit(table, stage + 1) - first;
        for (int32_t i = 0; i < gap.n_units; i++)
            gap.total += table->units[first + i].numel;
        plan->gaps[stage] = gap;
    }
    for (int32_t rank = 0; rank < table->n_ranks; rank++) {
        begins[rank] = list->n;
        DSC_TRY(plan_rank(plan, rank, list));
    }
    begins[table->n_ranks] = list->n;
    return DSC_OK;
}

dsc_status dsc_pipe_add_gathers(const struct dsc_pipe_table *table, int32_t ahead, int64_t capacity,
                                struct dsc_pipe_action *out_actions, int64_t *out_begins)
{
    if (out_begins == NULL || capacity < 0 || ahead < 0)
        return dsc_fail(DSC_EINVAL, "out_begins is NULL, or capacity is %lld, or ahead is %d", (long long)capacity,
                        (int)ahead);
    DSC_TRY(dsc_pipe_check_table(table));
    for (int64_t i = 0; i < table->begins[table->n_ranks]; i++)
        if (pipe_has_unit(table->actions[i].kind))
            return dsc_fail(DSC_EINVAL, "the table has gathers or releases: action %lld of all ranks' lists",
                            (long long)i);

    struct plan plan = {.table = table, .ahead = ahead};
    struct pipe_list list = {0};
    int64_t *begins = calloc((size_t)table->n_ranks + 1, sizeof *begins);
    dsc_status status = begins == NULL ? dsc_fail(DSC_ENOMEM, "no memory for %d ranks", (int)table->n_ranks) : DSC_OK;

    if (status == DSC_OK)
        status = open_plan(&plan);
    if (status == DSC_OK)
        status = write_all(&plan, &list, begins); /* only counts: what is too small must not be written */
    if (status == DSC_OK && list.n > 8 * (int64_t)DSC_PIPE_MAX_ACTIONS)
        status = dsc_fail(DSC_EINVAL, "%lld actions with gathers, the most is %lld: a higher limit gathers less often",
                          (long long)list.n, 8 * (long long)DSC_PIPE_MAX_ACTIONS);
    if (status == DSC_OK && out_actions != NULL && list.n > capacity)
        status = dsc_fail(DSC_ENOSPC, "room for %lld actions of %lld", (long long)capacity, (long long)list.n);
    if (status == DSC_OK && out_actions != NULL) {
        list = (struct pipe_list){out_actions, capacity, 0};
        status = write_all(&plan, &list, begins);
    }
    if (status == DSC_OK)
        memcpy(out_begins, begins, ((size_t)table->n_ranks + 1) * sizeof *begins);
    close_plan(&plan);
    free(begins);
    return status;
}
