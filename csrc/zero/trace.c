/* Records, compares and prunes the order of a pass's gather units. */
#include "dsc/fetch.h"

#include "base/fail.h"

dsc_status dsc_trace_init(struct dsc_trace *trace, int32_t *units, uint8_t *is_used, int64_t capacity)
{
    if (trace == NULL)
        return dsc_fail(DSC_EINVAL, "trace is NULL");
    if (capacity < 0)
        return dsc_fail(DSC_EINVAL, "capacity is %lld, must not be negative", (long long)capacity);
    if (capacity > 0 && (units == NULL || is_used == NULL))
        return dsc_fail(DSC_EINVAL, "%s is NULL for %lld steps", units == NULL ? "units" : "is_used",
                        (long long)capacity);
    *trace = (struct dsc_trace){.units = units, .is_used = is_used, .capacity = capacity};
    return DSC_OK;
}

void dsc_trace_clear(struct dsc_trace *trace)
{
    trace->n_steps = 0;
}

dsc_status dsc_trace_append(struct dsc_trace *trace, int32_t unit, bool is_used)
{
    if (trace == NULL)
        return dsc_fail(DSC_EINVAL, "trace is NULL");
    if (unit < 0)
        return dsc_fail(DSC_EINVAL, "unit is %d, must not be negative", (int)unit);
    if (trace->n_steps >= trace->capacity)
        return dsc_fail(DSC_EOVERFLOW, "the trace has room for %lld steps and is full", (long long)trace->capacity);
    trace->units[trace->n_steps] = unit;
    trace->is_used[trace->n_steps] = is_used;
    trace->n_steps++;
    return DSC_OK;
}

dsc_status dsc_trace_prune(struct dsc_trace *trace, const uint8_t *may_drop, int32_t n_units, uint8_t *scratch)
{
    uint8_t *has_use = scratch;
    int64_t n_left = 0;

    if (trace == NULL)
        return dsc_fail(DSC_EINVAL, "trace is NULL");
    if (n_units < 0)
        return dsc_fail(DSC_EINVAL, "n_units is %d, must not be negative", (int)n_units);
    if (n_units > 0 && (may_drop == NULL || scratch == NULL))
        return dsc_fail(DSC_EINVAL, "%s is NULL for %d units", may_drop == NULL ? "may_drop" : "scratch", (int)n_units);
    for (int64_t i = 0; i < trace->n_steps; i++)
        if (trace->units[i] < 0 || trace->units[i] >= n_units)
            return dsc_fail(DSC_EINVAL, "the unit of step %lld is %d, must be 0 to %d", (long long)i,
                            (int)trace->units[i], (int)n_units - 1);

    for (int32_t u = 0; u < n_units; u++)
        has_use[u] = 0;
    for (int64_t i = 0; i < trace->n_steps; i++)
        has_use[trace->units[i]] |= trace->is_used[i] != 0;
    for (int64_t i = 0; i < trace->n_steps; i++) {
        int32_t unit = trace->units[i];

        if (!trace->is_used[i] && (may_drop[unit] || has_use[unit]))
            continue;
        if (n_left > 0 && trace->units[n_left - 1] == unit) /* both steps are used or both are not: an unused step
                                                               beside a used step of its unit has been removed */
            continue;
        trace->units[n_left] = unit;
        trace->is_used[n_left] = trace->is_used[i];
        n_left++;
    }
    trace->n_steps = n_left;
    return DSC_OK;
}
