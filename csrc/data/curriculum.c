/* The difficulty of a step: DeepSpeed's schedules. */
#include "dsc/data.h"

#include "base/fail.h"

#include <math.h>

#define LARGEST ((int64_t)1 << 53) /* integers up to it are exact in f64 */

static dsc_status check_discrete(const struct dsc_curriculum *c)
{
    if (c->difficulties == NULL || c->last_steps == NULL)
        return dsc_fail(DSC_EINVAL, "%s is NULL", c->difficulties == NULL ? "difficulty" : "max_step");
    for (int64_t i = 0; i < c->n_steps; i++) {
        if (c->difficulties[i + 1] < c->difficulties[i])
            return dsc_fail(DSC_EINVAL, "difficulty goes down, from %lld to %lld at entry %lld",
                            (long long)c->difficulties[i], (long long)c->difficulties[i + 1], (long long)i + 1);
        if (c->last_steps[i] < 0 || (i > 0 && c->last_steps[i] <= c->last_steps[i - 1]))
            return dsc_fail(DSC_EINVAL, "max_step is %lld at entry %lld, must be above the one before",
                            (long long)c->last_steps[i], (long long)i);
    }
    return DSC_OK;
}

dsc_status dsc_curriculum_check(const struct dsc_curriculum *c)
{
    if ((int)c->kind < 0 || c->kind >= DSC_CURRICULUM_COUNT)
        return dsc_fail(DSC_EINVAL, "kind is %d, which is no dsc_curriculum_kind", (int)c->kind);
    if (c->n_steps < 1)
        return dsc_fail(DSC_EINVAL, "%s is %lld, must be at least 1",
                        c->kind == DSC_CURRICULUM_ROOT ? "total_curriculum_step" : "the number of max_step",
                        (long long)c->n_steps);
    if (c->kind == DSC_CURRICULUM_DISCRETE)
        return check_discrete(c);
    if (c->max < c->min)
        return dsc_fail(DSC_EINVAL, "max_difficulty is %lld, below min_difficulty %lld", (long long)c->max,
                        (long long)c->min);
    if (c->min < -LARGEST || c->max > LARGEST)
        return dsc_fail(DSC_EOVERFLOW, "difficulties from %lld to %lld: their magnitudes may be 2^53 at most",
                        (long long)c->min, (long long)c->max);
    if (c->multiple < 1 || c->multiple > LARGEST)
        return dsc_fail(DSC_EINVAL, "difficulty_step is %lld, must be 1 to 2^53", (long long)c->multiple);
    if (!(isfinite(c->degree) && c->degree > 0.0))
        return dsc_fail(DSC_EINVAL, "root_degree is %g, must be finite and positive", c->degree);
    return DSC_OK;
}

static int64_t discrete(const struct dsc_curriculum *c, int64_t step)
{
    int64_t i = 0;

    while (i < c->n_steps && step > c->last_steps[i])
        i++;
    return c->difficulties[i];
}

/* The largest multiple at or below a value. */
static int64_t multiple_below(int64_t value, int64_t multiple)
{
    int64_t rest = value % multiple;

    return value - (rest < 0 ? rest + multiple : rest);
}

int64_t dsc_curriculum_at(const struct dsc_curriculum *c, int64_t step)
{
    double grown;
    int64_t value;

    if (c->kind == DSC_CURRICULUM_DISCRETE)
        return discrete(c, step);
    /* Beyond n_steps it grows on, to the multiple that is max or above it. */
    grown = pow((double)step / (double)c->n_steps, 1.0 / c->degree) * (double)(c->max - c->min);
    if (grown >= (double)(c->max - c->min) + (double)c->multiple)
        return c->max;
    value = multiple_below(c->min + (int64_t)grown, c->multiple);
    return value < c->min ? c->min : value > c->max ? c->max : value;
}
