/*
 * The dynamic loss scale as a state machine of plain numbers. The order of the decisions is DeepSpeed's, so that a run
 * gives the same scales.
 */
#include "dsc/scaler.h"

#include "base/fail.h"

#include <math.h>

static bool is_scale(double value)
{
    return isfinite(value) && value > 0.0;
}

dsc_status dsc_scaler_init(struct dsc_scaler *scaler, const struct dsc_scaler_config *config)
{
    if (scaler == NULL || config == NULL)
        return dsc_fail(DSC_EINVAL, "%s is NULL", scaler == NULL ? "scaler" : "config");
    if (config->size != sizeof *config)
        return dsc_fail(DSC_EINVAL, "config.size is %u, this library expects %u; start from DSC_SCALER_CONFIG_INIT",
                        (unsigned)config->size, (unsigned)sizeof *config);
    if (!is_scale(config->initial_scale))
        return dsc_fail(DSC_EINVAL, "initial_scale is %g, must be finite and positive", config->initial_scale);
    if (!(isfinite(config->factor) && config->factor > 1.0))
        return dsc_fail(DSC_EINVAL, "factor is %g, must be finite and greater than 1", config->factor);
    if (!is_scale(config->min_scale))
        return dsc_fail(DSC_EINVAL, "min_scale is %g, must be finite and positive", config->min_scale);
    if (config->window_steps < 1)
        return dsc_fail(DSC_EINVAL, "window_steps is %lld, must be at least 1", (long long)config->window_steps);
    if (config->hysteresis < 1)
        return dsc_fail(DSC_EINVAL, "hysteresis is %d, must be at least 1", (int)config->hysteresis);
    *scaler = (struct dsc_scaler){
        .config = *config,
        .scale = config->initial_scale,
        .last_overflow_step = -1,
        .hysteresis_left = config->hysteresis,
    };
    return DSC_OK;
}

/* True when the scale is as low as it may get. */
static bool back_off(struct dsc_scaler *scaler)
{
    double next = scaler->scale / scaler->config.factor;

    if (scaler->hysteresis_left > 1) {
        scaler->hysteresis_left--;
        return false;
    }
    /*
     * The hysteresis stays used up until growth (or a good step) refills it: one overflow after another then cuts at
     * once.
     */
    if (scaler->scale <= scaler->config.min_scale)
        return true;
    scaler->scale = next > scaler->config.min_scale ? next : scaler->config.min_scale;
    return false;
}

static void grow(struct dsc_scaler *scaler)
{
    int64_t n_good = scaler->step - scaler->last_overflow_step - 1; /* before this one */
    double next = scaler->scale * scaler->config.factor;

    if (scaler->config.consecutive_hysteresis)
        scaler->hysteresis_left = scaler->config.hysteresis;
    if (n_good == 0 || n_good % scaler->config.window_steps != 0)
        return;
    scaler->hysteresis_left = scaler->config.hysteresis;
    if (isfinite(next)) /* a run without gradients would double for ever */
        scaler->scale = next;
}

dsc_status dsc_scaler_update(struct dsc_scaler *scaler, bool has_overflow, bool *out_at_floor)
{
    bool is_at_floor = false;

    if (scaler == NULL || out_at_floor == NULL)
        return dsc_fail(DSC_EINVAL, "%s is NULL", scaler == NULL ? "scaler" : "out_at_floor");
    if (scaler->step == INT64_MAX)
        return dsc_fail(DSC_EOVERFLOW, "the step count is at its end");
    if (scaler->config.is_dynamic && has_overflow)
        is_at_floor = back_off(scaler);
    else if (scaler->config.is_dynamic)
        grow(scaler);
    if (has_overflow)
        scaler->last_overflow_step = scaler->step;
    scaler->step++;
    *out_at_floor = is_at_floor;
    return DSC_OK;
}

dsc_status dsc_scaler_restore(struct dsc_scaler *scaler, double scale, int64_t step, int64_t last_overflow_step,
                              int32_t hysteresis_left)
{
    if (scaler == NULL)
        return dsc_fail(DSC_EINVAL, "scaler is NULL");
    if (!is_scale(scale))
        return dsc_fail(DSC_EINVAL, "scale is %g, must be finite and positive", scale);
    if (step < 0)
        return dsc_fail(DSC_EINVAL, "step is %lld, must not be negative", (long long)step);
    if (last_overflow_step < -1 || last_overflow_step >= step)
        return dsc_fail(DSC_EINVAL, "last_overflow_step is %lld, must be -1 or one of the %lld steps so far",
                        (long long)last_overflow_step, (long long)step);
    if (hysteresis_left < 1 || hysteresis_left > scaler->config.hysteresis)
        return dsc_fail(DSC_EINVAL, "hysteresis_left is %d, must be 1 to %d", (int)hysteresis_left,
                        (int)scaler->config.hysteresis);
    scaler->scale = scale;
    scaler->step = step;
    scaler->last_overflow_step = last_overflow_step;
    scaler->hysteresis_left = hysteresis_left;
    return DSC_OK;
}
