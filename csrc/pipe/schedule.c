/* Finds schedules by name, and gives their limits, the ranks of their stages, and their lists. */
#include "base/fail.h"
#include "pipe/pipe.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define DSC_SCHEDULE(name) extern const struct pipe_schedule dsc_pipe_schedule_##name;
#include "pipe/schedules.inc"
#undef DSC_SCHEDULE

static const struct pipe_schedule *const schedules[] = {
#define DSC_SCHEDULE(name) &dsc_pipe_schedule_##name,
#include "pipe/schedules.inc"
#undef DSC_SCHEDULE
};

#define N_SCHEDULES ((int32_t)(sizeof schedules / sizeof *schedules))

const char *dsc_pipe_schedule_name(int32_t index)
{
    return index >= 0 && index < N_SCHEDULES ? schedules[index]->name : NULL;
}

static dsc_status find(const char *name, const struct pipe_schedule **out)
{
    char known[256] = "";
    size_t n = 0;

    if (name == NULL)
        return dsc_fail(DSC_EINVAL, "schedule is NULL");
    for (int32_t i = 0; i < N_SCHEDULES; i++) {
        if (strcmp(schedules[i]->name, name) == 0) {
            *out = schedules[i];
            return DSC_OK;
        }
        if (n < sizeof known)
            n += (size_t)snprintf(known + n, sizeof known - n, "%s%s", i > 0 ? ", " : "", schedules[i]->name);
    }
    return dsc_fail(DSC_ENOTFOUND, "no schedule \"%.60s\"; there are %s", name, known);
}

dsc_status dsc_pipe_traits_of(const char *schedule, struct dsc_pipe_traits *out_traits)
{
    const struct pipe_schedule *found;

    if (out_traits == NULL)
        return dsc_fail(DSC_EINVAL, "out_traits is NULL");
    DSC_TRY(find(schedule, &found));
    *out_traits = found->traits;
    return DSC_OK;
}

static dsc_status check(const struct pipe_schedule *schedule, const struct dsc_pipe_shape *shape)
{
    const struct dsc_pipe_traits *traits = &schedule->traits;

    if (shape == NULL)
        return dsc_fail(DSC_EINVAL, "shape is NULL");
    if (shape->n_ranks < 1 || shape->n_ranks > DSC_PIPE_MAX_RANKS)
        return dsc_fail(DSC_EINVAL, "%d ranks, must be 1 to %d", (int)shape->n_ranks, DSC_PIPE_MAX_RANKS);
    if (shape->n_micro_batches < 1 || shape->n_micro_batches > DSC_PIPE_MAX_MICRO_BATCHES)
        return dsc_fail(DSC_EINVAL, "%d micro-batches, must be 1 to %d", (int)shape->n_micro_batches,
                        DSC_PIPE_MAX_MICRO_BATCHES);
    if (shape->n_virtual < traits->min_virtual || shape->n_virtual > traits->max_virtual)
        return dsc_fail(DSC_EINVAL, "%s cannot have %d stages a rank, the nearest that it can is %d", schedule->name,
                        (int)shape->n_virtual,
                        (int)(shape->n_virtual < traits->min_virtual ? traits->min_virtual : traits->max_virtual));
    if (shape->n_micro_batches < traits->min_micro_batches_per_rank * shape->n_ranks)
        return dsc_fail(DSC_EINVAL, "%s on %d ranks needs at least %d micro-batches, there are %d", schedule->name,
                        (int)shape->n_ranks, (int)(traits->min_micro_batches_per_rank * shape->n_ranks),
                        (int)shape->n_micro_batches);
    if ((int64_t)shape->n_ranks * shape->n_virtual * shape->n_micro_batches * 3 > DSC_PIPE_MAX_ACTIONS)
        return dsc_fail(DSC_EINVAL, "%d ranks, %d stages each and %d micro-batches are more than %d actions",
                        (int)shape->n_ranks, (int)shape->n_virtual, (int)shape->n_micro_batches, DSC_PIPE_MAX_ACTIONS);
    return DSC_OK;
}

dsc_status dsc_pipe_check(const char *schedule, const struct dsc_pipe_shape *shape)
{
    const struct pipe_schedule *found;

    DSC_TRY(find(schedule, &found));
    return check(found, shape);
}

static int32_t rank_of(const struct pipe_schedule *schedule, const struct dsc_pipe_shape *shape, int32_t stage)
{
    if (schedule->traits.is_v && stage >= shape->n_ranks)
        return 2 * shape->n_ranks - 1 - stage;
    return stage % shape->n_ranks;
}

dsc_status dsc_pipe_rank_of(const char *schedule, const struct dsc_pipe_shape *shape, int32_t stage, int32_t *out_rank)
{
    const struct pipe_schedule *found;

    if (out_rank == NULL)
        return dsc_fail(DSC_EINVAL, "out_rank is NULL");
    DSC_TRY(find(schedule, &found));
    DSC_TRY(check(found, shape));
    if (stage < 0 || stage >= shape->n_ranks * shape->n_virtual)
        return dsc_fail(DSC_EINVAL, "stage is %d, must be 0 to %d", (int)stage,
                        (int)(shape->n_ranks * shape->n_virtual) - 1);
    *out_rank = rank_of(found, shape, stage);
    return DSC_OK;
}

void dsc_pipe_push(struct pipe_list *list, enum dsc_pipe_kind kind, int32_t stage, int32_t micro_batch)
{
    if (list->n < list->capacity)
        list->actions[list->n] = (struct dsc_pipe_action){(int32_t)kind, stage, micro_batch};
    list->n++;
}

dsc_status dsc_pipe_build(const char *schedule, const struct dsc_pipe_shape *shape, int32_t rank, int64_t capacity,
                          struct dsc_pipe_action *out_actions, int64_t *out_n)
{
    const struct pipe_schedule *found;

    if (out_n == NULL || capacity < 0)
        return dsc_fail(DSC_EINVAL, "out_n is NULL, or capacity is %lld", (long long)capacity);
    DSC_TRY(find(schedule, &found));
    DSC_TRY(check(found, shape));
    if (rank < 0 || rank >= shape->n_ranks)
        return dsc_fail(DSC_EINVAL, "rank is %d, must be 0 to %d", (int)rank, (int)shape->n_ranks - 1);

    struct pipe_list count = {0};

    found->fill(shape, rank, &count);
    if (out_actions != NULL) {
        struct pipe_list list = {out_actions, capacity, 0};

        if (count.n > capacity)
            return dsc_fail(DSC_ENOSPC, "room for %lld actions of %lld", (long long)capacity, (long long)count.n);
        found->fill(shape, rank, &list);
    }
    *out_n = count.n;
    return DSC_OK;
}

dsc_status dsc_pipe_make_table(const char *schedule, const struct dsc_pipe_shape *shape, struct pipe_own_table *out)
{
    const struct pipe_schedule *found;

    *out = (struct pipe_own_table){0};
    DSC_TRY(find(schedule, &found));
    DSC_TRY(check(found, shape));

    struct pipe_list list = {0};

    for (int32_t rank = 0; rank < shape->n_ranks; rank++)
        found->fill(shape, rank, &list);
    list.capacity = list.n;
    list.n = 0;
    out->actions = calloc((size_t)list.capacity, sizeof *out->actions);
    out->begins = calloc((size_t)shape->n_ranks + 1, sizeof *out->begins);
    out->rank_of = calloc((size_t)shape->n_ranks * (size_t)shape->n_virtual, sizeof *out->rank_of);
    if (out->actions == NULL || out->begins == NULL || out->rank_of == NULL)
        return dsc_fail(DSC_ENOMEM, "no memory for %lld actions", (long long)list.capacity);
    list.actions = out->actions;
    for (int32_t rank = 0; rank < shape->n_ranks; rank++) {
        found->fill(shape, rank, &list);
        out->begins[rank + 1] = list.n;
    }
    for (int32_t stage = 0; stage < shape->n_ranks * shape->n_virtual; stage++)
        out->rank_of[stage] = rank_of(found, shape, stage);
    out->table = (struct dsc_pipe_table){
        .actions = out->actions,
        .begins = out->begins,
        .rank_of = out->rank_of,
        .n_ranks = shape->n_ranks,
        .n_stages = shape->n_ranks * shape->n_virtual,
        .n_micro_batches = shape->n_micro_batches,
        .has_backward = found->traits.has_backward,
    };
    return DSC_OK;
}

void dsc_pipe_clear_table(struct pipe_own_table *own)
{
    free(own->actions);
    free(own->begins);
    free(own->rank_of);
    *own = (struct pipe_own_table){0};
}

static dsc_status check_units(const struct dsc_pipe_table *table)
{
    if (table->n_units < 0 || table->n_units > DSC_PIPE_MAX_UNITS || (table->n_units > 0 && table->units == NULL))
        return dsc_fail(DSC_EINVAL, "%d units, must be 0 to %d, or units is NULL", (int)table->n_units,
                        DSC_PIPE_MAX_UNITS);
    if (table->limit_elements < -1)
        return dsc_fail(DSC_EINVAL, "limit_elements is %lld, must be at least 0, or -1 for no limit",
                        (long long)table->limit_elements);
    for (int32_t i = 0; i < table->n_units; i++) {
        const struct dsc_pipe_unit *unit = &table->units[i];

        if (unit->stage < 0 || unit->stage >= table->n_stages || (i > 0 && unit->stage < table->units[i - 1].stage))
            return dsc_fail(DSC_EINVAL, "unit %d is of stage %d of %d, after a unit of stage %d", (int)i,
                            (int)unit->stage, (int)table->n_stages, i > 0 ? (int)table->units[i - 1].stage : -1);
        if (unit->numel < 0 || unit->numel > DSC_PIPE_MAX_UNIT_ELEMENTS || unit->gather_ns < 0)
            return dsc_fail(DSC_EINVAL, "unit %d of stage %d has %lld elements and takes %lld ns",
                            (int)(i - pipe_first_unit(table, unit->stage)), (int)unit->stage, (long long)unit->numel,
                            (long long)unit->gather_ns);
    }
    return DSC_OK;
}

/* Checks the stage of an action, and its micro-batch or unit. */
static dsc_status check_action(const struct dsc_pipe_table *table, const struct dsc_pipe_action *action, int32_t rank,
                               int64_t index)
{
    int32_t end = table->n_micro_batches;

    if (action->kind < 0 || action->kind >= DSC_PIPE_N_KINDS || action->stage < 0 || action->stage >= table->n_stages)
        return dsc_fail(DSC_EINVAL, "action %lld of rank %d has kind %d, stage %d of %d", (long long)index, (int)rank,
                        (int)action->kind, (int)action->stage, (int)table->n_stages);
    if (pipe_has_unit(action->kind))
        end = pipe_first_unit(table, action->stage + 1) - pipe_first_unit(table, action->stage);
    if (action->micro_batch < 0 || action->micro_batch >= end)
        return dsc_fail(DSC_EINVAL, "action %lld of rank %d has kind %d, stage %d of %d, %s %d of %d", (long long)index,
                        (int)rank, (int)action->kind, (int)action->stage, (int)table->n_stages,
                        pipe_has_unit(action->kind) ? "unit" : "micro-batch", (int)action->micro_batch, (int)end);
    if (table->rank_of[action->stage] != rank)
        return dsc_fail(DSC_EINVAL, "action %lld of rank %d is on stage %d, which lies on rank %d", (long long)index,
                        (int)rank, (int)action->stage, (int)table->rank_of[action->stage]);
    return DSC_OK;
}

dsc_status dsc_pipe_check_table(const struct dsc_pipe_table *table)
{
    if (table == NULL || table->begins == NULL || table->rank_of == NULL)
        return dsc_fail(DSC_EINVAL, "the table, its begins or its rank_of is NULL");
    if (table->n_ranks < 1 || table->n_ranks > DSC_PIPE_MAX_RANKS || table->n_stages < 1 ||
        table->n_stages > DSC_PIPE_MAX_RANKS * DSC_PIPE_MAX_VIRTUAL || table->n_micro_batches < 1 ||
        table->n_micro_batches > DSC_PIPE_MAX_MICRO_BATCHES ||
        (int64_t)table->n_stages * table->n_micro_batches > DSC_PIPE_MAX_ACTIONS)
        return dsc_fail(DSC_EINVAL, "a table of %d ranks, %d stages and %d micro-batches", (int)table->n_ranks,
                        (int)table->n_stages, (int)table->n_micro_batches);
    for (int32_t stage = 0; stage < table->n_stages; stage++)
        if (table->rank_of[stage] < 0 || table->rank_of[stage] >= table->n_ranks)
            return dsc_fail(DSC_EINVAL, "stage %d lies on rank %d of %d", (int)stage, (int)table->rank_of[stage],
                            (int)table->n_ranks);
    DSC_TRY(check_units(table));
    if (table->begins[0] != 0)
        return dsc_fail(DSC_EINVAL, "begins[0] is %lld, must be 0", (long long)table->begins[0]);
    for (int32_t rank = 0; rank < table->n_ranks; rank++)
        if (table->begins[rank + 1] < table->begins[rank] ||
            table->begins[rank + 1] > 8 * (int64_t)DSC_PIPE_MAX_ACTIONS)
            return dsc_fail(DSC_EINVAL, "the list of rank %d is [%lld, %lld)", (int)rank,
                            (long long)table->begins[rank], (long long)table->begins[rank + 1]);
    if (table->begins[table->n_ranks] > 0 && table->actions == NULL)
        return dsc_fail(DSC_EINVAL, "the table's actions are NULL");
    for (int32_t rank = 0; rank < table->n_ranks; rank++)
        for (int64_t i = table->begins[rank]; i < table->begins[rank + 1]; i++)
            DSC_TRY(check_action(table, &table->actions[i], rank, i - table->begins[rank]));
    return DSC_OK;
}
