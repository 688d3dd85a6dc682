/* Checks the gathers and releases of a table: which units are live at each action of a rank. */
#include "base/fail.h"
#include "pipe/pipe.h"

#include <stdlib.h>

/* Units lie on one rank each, so the state of all ranks fits into one array for each number. */
struct watch {
    const struct dsc_pipe_table *table;
    bool *is_live;      /* n_units */
    int64_t *n_uses_at; /* n_units: the uses of the stage at the unit's last gather */
    int64_t *n_uses;    /* n_stages: computations so far */
    int32_t *n_live;    /* n_stages: live units */
    int64_t n_elements; /* live elements of the rank */
};

static dsc_status fail(const char *what, int32_t rank, int64_t index, const struct dsc_pipe_action *action,
                       int32_t unit)
{
    char text[40] = "";

    dsc_pipe_format(action, sizeof text, text);
    return dsc_fail(DSC_EINVAL, "rank %d has %s, action %lld of its list, %s: unit %d of stage %d", (int)rank, text,
                    (long long)index, what, (int)unit, (int)action->stage);
}

static dsc_status gather(struct watch *watch, int32_t rank, int64_t index, const struct dsc_pipe_action *action)
{
    const struct dsc_pipe_table *table = watch->table;
    int32_t unit = pipe_first_unit(table, action->stage) + action->micro_batch;

    if (watch->is_live[unit])
        return fail("of a unit that is live", rank, index, action, action->micro_batch);
    watch->is_live[unit] = true;
    watch->n_uses_at[unit] = watch->n_uses[action->stage];
    watch->n_live[action->stage]++;
    watch->n_elements += table->units[unit].numel;
    if (table->limit_elements >= 0 && watch->n_elements > table->limit_elements) {
        char text[40] = "";

        dsc_pipe_format(action, sizeof text, text);
        return dsc_fail(DSC_EINVAL, "rank %d holds %lld elements from %s, action %lld of its list; the limit is %lld",
                        (int)rank, (long long)watch->n_elements, text, (long long)index,
                        (long long)table->limit_elements);
    }
    return DSC_OK;
}

static dsc_status release(struct watch *watch, int32_t rank, int64_t index, const struct dsc_pipe_action *action)
{
    int32_t unit = pipe_first_unit(watch->table, action->stage) + action->micro_batch;

    if (!watch->is_live[unit])
        return fail("of a unit that is not live", rank, index, action, action->micro_batch);
    if (watch->n_uses_at[unit] == watch->n_uses[action->stage])
        return fail("of a unit that was gathered for no computation", rank, index, action, action->micro_batch);
    watch->is_live[unit] = false;
    watch->n_live[action->stage]--;
    watch->n_elements -= watch->table->units[unit].numel;
    return DSC_OK;
}

static dsc_status use(struct watch *watch, int32_t rank, int64_t index, const struct dsc_pipe_action *action)
{
    int32_t first = pipe_first_unit(watch->table, action->stage);
    int32_t n = pipe_first_unit(watch->table, action->stage + 1) - first;
    int32_t unit = 0;

    watch->n_uses[action->stage]++;
    if (watch->n_live[action->stage] == n)
        return DSC_OK;
    while (watch->is_live[first + unit])
        unit++;
    return fail("before a unit that it needs is live", rank, index, action, unit);
}

static dsc_status walk(struct watch *watch)
{
    const struct dsc_pipe_table *table = watch->table;

    for (int32_t rank = 0; rank < table->n_ranks; rank++) {
        watch->n_elements = 0;
        for (int64_t i = table->begins[rank]; i < table->begins[rank + 1]; i++) {
            const struct dsc_pipe_action *action = &table->actions[i];
            int64_t index = i - table->begins[rank];

            if (action->kind == DSC_PIPE_GATHER)
                DSC_TRY(gather(watch, rank, index, action));
            else if (action->kind == DSC_PIPE_RELEASE)
                DSC_TRY(release(watch, rank, index, action));
            else if (pipe_computes(action->kind))
                DSC_TRY(use(watch, rank, index, action));
        }
    }
    for (int32_t unit = 0; unit < table->n_units; unit++)
        if (watch->is_live[unit]) {
            int32_t stage = table->units[unit].stage;

            return dsc_fail(DSC_EINVAL, "rank %d never releases unit %d of stage %d", (int)table->rank_of[stage],
                            (int)(unit - pipe_first_unit(table, stage)), (int)stage);
        }
    return DSC_OK;
}

dsc_status dsc_pipe_check_gathers(const struct dsc_pipe_table *table)
{
    if (table->n_units == 0)
        return DSC_OK; /* dsc_pipe_check_table lets no action act on a unit */

    struct watch watch = {.table = table};
    dsc_status status;

    watch.is_live = calloc((size_t)table->n_units, sizeof *watch.is_live);
    watch.n_uses_at = calloc((size_t)table->n_units, sizeof *watch.n_uses_at);
    watch.n_uses = calloc((size_t)table->n_stages, sizeof *watch.n_uses);
    watch.n_live = calloc((size_t)table->n_stages, sizeof *watch.n_live);
    if (watch.is_live == NULL || watch.n_uses_at == NULL || watch.n_uses == NULL || watch.n_live == NULL)
        status = dsc_fail(DSC_ENOMEM, "no memory for %d units", (int)table->n_units);
    else
        status = walk(&watch);
    free(watch.is_live);
    free(watch.n_uses_at);
    free(watch.n_uses);
    free(watch.n_live);
    return status;
}
