/* Follows a plan through a pass: each use of a unit becomes the gathers and releases that are due. */
#include "dsc/fetch.h"

#include "base/fail.h"

/* The actions of one call. Its capacity was checked before the first. */
struct actions {
    struct dsc_fetch_action *entries;
    int64_t n;
};

static void gather(struct dsc_fetch *fetch, struct actions *actions, int32_t unit)
{
    fetch->units[unit].is_live = 1;
    fetch->n_live++;
    fetch->live_elems += fetch->unit_elems[unit];
    if (fetch->live_elems > fetch->peak_elems)
        fetch->peak_elems = fetch->live_elems;
    actions->entries[actions->n++] = (struct dsc_fetch_action){DSC_FETCH_GATHER, unit};
}

static void release(struct dsc_fetch *fetch, struct actions *actions, int32_t unit)
{
    fetch->units[unit].is_live = 0;
    fetch->n_live--;
    fetch->live_elems -= fetch->unit_elems[unit];
    actions->entries[actions->n++] = (struct dsc_fetch_action){DSC_FETCH_RELEASE, unit};
}

static void release_unexpected(struct dsc_fetch *fetch, struct actions *actions)
{
    if (fetch->unexpected_unit >= 0)
        release(fetch, actions, fetch->unexpected_unit);
    fetch->unexpected_unit = -1;
}

/* Passes the step at the cursor, which is running from now on. */
static void pass_step(struct dsc_fetch *fetch, struct actions *actions, bool is_used)
{
    const struct dsc_fetch_plan *plan = &fetch->plan;
    int32_t unit = plan->steps[fetch->cursor];
    struct dsc_fetch_unit *book = &fetch->units[unit];

    /* If the next step of a live unit has been issued, no gather was made for that step, so the unit must stay live. */
    if (fetch->cursor > 0 && !plan->keep[fetch->cursor - 1] && fetch->units[fetch->running_unit].step >= fetch->issued)
        release(fetch, actions, fetch->running_unit);
    release_unexpected(fetch, actions);
    for (; fetch->issued < plan->until[fetch->cursor]; fetch->issued++)
        if (!fetch->units[plan->steps[fetch->issued]].is_live)
            gather(fetch, actions, plan->steps[fetch->issued]);
    actions->entries[actions->n++] = (struct dsc_fetch_action){DSC_FETCH_STEP, unit};

    fetch->record->units[fetch->record->n_steps] = unit;
    fetch->record->is_used[fetch->record->n_steps] = is_used || book->is_touched;
    fetch->record->n_steps++;
    book->is_touched = 0;
    book->step = plan->next[fetch->cursor];
    fetch->running_unit = unit;
    fetch->cursor++;
}

/* Checks for room for n_records more steps in the record and for n_needed actions, before anything is changed. */
static dsc_status check_room(const struct dsc_fetch *fetch, int64_t n_records, int64_t n_needed, int64_t capacity,
                             const struct dsc_fetch_action *actions)
{
    if (capacity < n_needed || (actions == NULL && n_needed > 0))
        return dsc_fail(DSC_EINVAL,
                        "capacity is %lld, this call may need %lld; 3 * n_steps + n_units = %lld are always enough",
                        actions == NULL ? 0LL : (long long)capacity, (long long)n_needed,
                        (long long)(3 * fetch->plan.n_steps + fetch->n_units));
    if (n_records > fetch->record->capacity - fetch->record->n_steps)
        return dsc_fail(DSC_EOVERFLOW, "the record holds %lld of at most %lld steps, %lld more have been passed",
                        (long long)fetch->record->n_steps, (long long)fetch->record->capacity, (long long)n_records);
    return DSC_OK;
}

dsc_status dsc_fetch_init(struct dsc_fetch *fetch, const int64_t *unit_elems, int32_t n_units,
                          struct dsc_fetch_unit *units)
{
    int64_t total = 0;

    if (fetch == NULL)
        return dsc_fail(DSC_EINVAL, "fetch is NULL");
    if (n_units < 0)
        return dsc_fail(DSC_EINVAL, "n_units is %d, must not be negative", (int)n_units);
    if (n_units > 0 && (unit_elems == NULL || units == NULL))
        return dsc_fail(DSC_EINVAL, "%s is NULL for %d units", unit_elems == NULL ? "unit_elems" : "units",
                        (int)n_units);
    for (int32_t u = 0; u < n_units; u++) {
        if (unit_elems[u] < 0)
            return dsc_fail(DSC_EINVAL, "unit_elems[%d] is %lld, must not be negative", (int)u,
                            (long long)unit_elems[u]);
        if (__builtin_add_overflow(total, unit_elems[u], &total))
            return dsc_fail(DSC_EOVERFLOW, "the elements of units 0 to %d together do not fit int64_t", (int)u);
    }
    for (int32_t u = 0; u < n_units; u++)
        units[u] = (struct dsc_fetch_unit){.step = 0};
    *fetch = (struct dsc_fetch){
        .unit_elems = unit_elems,
        .units = units,
        .n_units = n_units,
        .running_unit = -1,
        .unexpected_unit = -1,
    };
    return DSC_OK;
}

/* Also sets the next step of each unit to its first step; outside a pass this field has no meaning. */
static dsc_status check_plan(struct dsc_fetch *fetch, const struct dsc_fetch_plan *plan)
{
    if (plan->n_steps < 0)
        return dsc_fail(DSC_EINVAL, "plan.n_steps is %lld, must not be negative", (long long)plan->n_steps);
    if (plan->n_steps > 0 && (plan->steps == NULL || plan->until == NULL || plan->next == NULL || plan->keep == NULL))
        return dsc_fail(DSC_EINVAL, "an array of the plan is NULL for %lld steps", (long long)plan->n_steps);
    for (int32_t u = 0; u < fetch->n_units; u++)
        fetch->units[u].step = plan->n_steps;
    for (int64_t i = plan->n_steps - 1; i >= 0; i--) {
        int64_t highest = i + 1 < plan->n_steps ? plan->until[i + 1] : plan->n_steps;
        int32_t unit = plan->steps[i];

        if (unit < 0 || unit >= fetch->n_units)
            return dsc_fail(DSC_EINVAL, "plan.steps[%lld] is %d, must be 0 to %d", (long long)i, (int)unit,
                            (int)fetch->n_units - 1);
        if (plan->until[i] <= i || plan->until[i] > highest)
            return dsc_fail(DSC_EINVAL, "plan.until[%lld] is %lld, must be %lld to %lld", (long long)i,
                            (long long)plan->until[i], (long long)i + 1, (long long)highest);
        if (plan->next[i] != fetch->units[unit].step)
            return dsc_fail(DSC_EINVAL, "plan.next[%lld] is %lld, the next step of unit %d is %lld", (long long)i,
                            (long long)plan->next[i], (int)unit, (long long)fetch->units[unit].step);
        fetch->units[unit].step = i;
    }
    return DSC_OK;
}

dsc_status dsc_fetch_begin(struct dsc_fetch *fetch, const struct dsc_fetch_plan *plan, const uint8_t *is_live,
                           struct dsc_trace *record)
{
    if (fetch == NULL || plan == NULL || record == NULL)
        return dsc_fail(DSC_EINVAL, "%s is NULL", fetch == NULL ? "fetch" : plan == NULL ? "plan" : "record");
    if (fetch->is_active)
        return dsc_fail(DSC_ESTATE, "the pass that is running stands at step %lld of %lld; end or abort it first",
                        (long long)fetch->cursor, (long long)fetch->plan.n_steps);
    DSC_TRY(check_plan(fetch, plan));
    fetch->is_active = true;
    fetch->plan = *plan;
    fetch->record = record;
    fetch->cursor = 0;
    fetch->issued = 0;
    fetch->running_unit = -1;
    fetch->unexpected_unit = -1;
    fetch->n_unexpected = 0;
    fetch->n_live = 0;
    fetch->live_elems = 0;
    for (int32_t u = 0; u < fetch->n_units; u++) {
        bool is_unit_live = is_live != NULL && is_live[u];

        fetch->units[u].is_live = is_unit_live;
        fetch->units[u].is_touched = 0;
        fetch->n_live += is_unit_live;
        fetch->live_elems += is_unit_live ? fetch->unit_elems[u] : 0;
    }
    fetch->peak_elems = fetch->live_elems;
    dsc_trace_clear(record);
    return DSC_OK;
}

static dsc_status check_call(const struct dsc_fetch *fetch, int64_t capacity, const int64_t *out_n)
{
    if (fetch == NULL || out_n == NULL)
        return dsc_fail(DSC_EINVAL, "%s is NULL", fetch == NULL ? "fetch" : "out_n");
    if (capacity < 0)
        return dsc_fail(DSC_EINVAL, "capacity is %lld, must not be negative", (long long)capacity);
    return DSC_OK;
}

static dsc_status use_unexpected(struct dsc_fetch *fetch, int32_t unit, int64_t capacity, struct actions *actions)
{
    DSC_TRY(check_room(fetch, 1, fetch->unexpected_unit >= 0 ? 2 : 1, capacity, actions->entries));
    release_unexpected(fetch, actions);
    gather(fetch, actions, unit);
    fetch->unexpected_unit = unit;
    fetch->n_unexpected++;
    return dsc_trace_append(fetch->record, unit, true);
}

static dsc_status pass_until(struct dsc_fetch *fetch, int64_t end, bool is_last_used, int64_t capacity,
                             struct actions *actions)
{
    int64_t n_gathers = end > fetch->cursor ? fetch->plan.until[end - 1] - fetch->issued : 0;

    /* Each unit that this call releases is live now, or is gathered by this call. */
    DSC_TRY(check_room(fetch, end - fetch->cursor, fetch->n_live + 2 * n_gathers + (end - fetch->cursor), capacity,
                       actions->entries));
    while (fetch->cursor < end)
        pass_step(fetch, actions, is_last_used && fetch->cursor == end - 1);
    return DSC_OK;
}

dsc_status dsc_fetch_use(struct dsc_fetch *fetch, int32_t unit, int64_t capacity, struct dsc_fetch_action *out_actions,
                         int64_t *out_n)
{
    struct actions actions = {.entries = out_actions};

    DSC_TRY(check_call(fetch, capacity, out_n));
    if (!fetch->is_active)
        return dsc_fail(DSC_ESTATE, "unit %d is used outside a pass; begin one first", (int)unit);
    if (unit < 0 || unit >= fetch->n_units)
        return dsc_fail(DSC_EINVAL, "unit is %d, must be 0 to %d", (int)unit, (int)fetch->n_units - 1);
    if (unit != fetch->running_unit) {
        struct dsc_fetch_unit *book = &fetch->units[unit];
        bool is_near = book->step == fetch->cursor || book->step < fetch->issued;

        if (book->step < fetch->plan.n_steps && (is_near || !book->is_live))
            DSC_TRY(pass_until(fetch, book->step + 1, true, capacity, &actions));
        else if (book->is_live)
            book->is_touched = 1;
        else
            DSC_TRY(use_unexpected(fetch, unit, capacity, &actions));
    }
    *out_n = actions.n;
    return DSC_OK;
}

/* Releases all live units except keep_unit, and ends the pass. */
static void finish(struct dsc_fetch *fetch, int32_t keep_unit, struct actions *actions)
{
    for (int32_t u = 0; u < fetch->n_units && fetch->n_live > 0; u++)
        if (fetch->units[u].is_live && u != keep_unit)
            release(fetch, actions, u);
    fetch->is_active = false;
    fetch->running_unit = -1;
    fetch->unexpected_unit = -1;
    fetch->plan = (struct dsc_fetch_plan){0};
    fetch->record = NULL;
}

dsc_status dsc_fetch_end(struct dsc_fetch *fetch, int32_t keep_unit, int64_t capacity,
                         struct dsc_fetch_action *out_actions, int64_t *out_n)
{
    struct actions actions = {.entries = out_actions};

    DSC_TRY(check_call(fetch, capacity, out_n));
    if (!fetch->is_active)
        return dsc_fail(DSC_ESTATE, "there is no pass to end; begin one first");
    if (keep_unit < -1 || keep_unit >= fetch->n_units)
        return dsc_fail(DSC_EINVAL, "keep_unit is %d, must be -1 to %d", (int)keep_unit, (int)fetch->n_units - 1);
    DSC_TRY(pass_until(fetch, fetch->plan.n_steps, false, capacity, &actions));
    finish(fetch, keep_unit, &actions);
    *out_n = actions.n;
    return DSC_OK;
}

dsc_status dsc_fetch_abort(struct dsc_fetch *fetch, int64_t capacity, struct dsc_fetch_action *out_actions,
                           int64_t *out_n)
{
    struct actions actions = {.entries = out_actions};

    DSC_TRY(check_call(fetch, capacity, out_n));
    if (fetch->is_active) {
        DSC_TRY(check_room(fetch, 0, fetch->n_live, capacity, out_actions));
        dsc_trace_clear(fetch->record);
        finish(fetch, -1, &actions);
    }
    *out_n = actions.n;
    return DSC_OK;
}
