/* Computes the bytes that a plan holds at each moment, and checks problems. */
#include "recompute/front.h"

#include "base/fail.h"

static dsc_status check_choice(const struct dsc_recompute_choice *choice, int32_t index)
{
    if (choice->kept_bytes < 0 || choice->transient_bytes < 0 || choice->added_ns < 0)
        return dsc_fail(DSC_EINVAL, "choices[%d] is {%lld, %lld, %lld}, must not be negative", (int)index,
                        (long long)choice->kept_bytes, (long long)choice->transient_bytes, (long long)choice->added_ns);
    return DSC_OK;
}

static dsc_status check_counts(const struct dsc_recompute_problem *p)
{
    int64_t n_groups = 0;
    int64_t n_choices = 0;

    for (int32_t i = 0; i < p->n_layers; i++) {
        const struct dsc_recompute_layer *layer = &p->layers[i];

        if (layer->work_bytes < 0 || layer->n_whole < 0 || layer->n_groups < 0)
            return dsc_fail(DSC_EINVAL, "layers[%d] is {%lld, %d, %d}, must not be negative", (int)i,
                            (long long)layer->work_bytes, (int)layer->n_whole, (int)layer->n_groups);
        n_choices += layer->n_whole;
        n_groups += layer->n_groups;
    }
    if (n_groups != p->n_group_sizes)
        return dsc_fail(DSC_EINVAL, "layers have %lld groups, n_group_sizes is %d", (long long)n_groups,
                        (int)p->n_group_sizes);
    for (int32_t i = 0; i < p->n_group_sizes; i++) {
        if (p->group_sizes[i] < 1)
            return dsc_fail(DSC_EINVAL, "group_sizes[%d] is %d, must be at least 1", (int)i, (int)p->group_sizes[i]);
        n_choices += p->group_sizes[i];
    }
    if (n_choices != p->n_choices)
        return dsc_fail(DSC_EINVAL, "layers and groups have %lld choices, n_choices is %d", (long long)n_choices,
                        (int)p->n_choices);
    return DSC_OK;
}

dsc_status dsc_recompute_check(const struct dsc_recompute_problem *p)
{
    int64_t total = 0;
    int64_t ns = 0;

    if (p == NULL || p->n_layers < 0 || p->n_group_sizes < 0 || p->n_choices < 0)
        return dsc_fail(DSC_EINVAL, "%s", p == NULL ? "problem is NULL" : "a count of the problem is negative");
    if ((p->layers == NULL && p->n_layers > 0) || (p->group_sizes == NULL && p->n_group_sizes > 0) ||
        (p->choices == NULL && p->n_choices > 0))
        return dsc_fail(DSC_EINVAL, "layers, group_sizes or choices is NULL");
    DSC_TRY(check_counts(p));
    for (int32_t i = 0; i < p->n_layers; i++)
        if (__builtin_add_overflow(total, p->layers[i].work_bytes, &total))
            return dsc_fail(DSC_EOVERFLOW, "the bytes of the first %d layers do not add up in int64_t", (int)(i + 1));
    for (int32_t i = 0; i < p->n_choices; i++) {
        const struct dsc_recompute_choice *choice = &p->choices[i];

        DSC_TRY(check_choice(choice, i));
        if (__builtin_add_overflow(total, choice->kept_bytes, &total) ||
            __builtin_add_overflow(total, choice->transient_bytes, &total) ||
            __builtin_add_overflow(ns, choice->added_ns, &ns))
            return dsc_fail(DSC_EOVERFLOW, "the numbers of the first %d choices do not add up in int64_t",
                            (int)(i + 1));
    }
    return DSC_OK;
}

static dsc_status check_plan(const struct dsc_recompute_problem *problem, const struct dsc_recompute_plan *plan)
{
    const int32_t *sizes = problem->group_sizes;
    const int32_t *groups = plan->groups;

    for (int32_t i = 0; i < problem->n_layers; i++) {
        const struct dsc_recompute_layer *layer = &problem->layers[i];
        bool needs_whole = layer->n_groups == 0 && layer->n_whole > 0;

        if (plan->whole[i] < (needs_whole ? 0 : -1) || plan->whole[i] >= layer->n_whole)
            return dsc_fail(DSC_EINVAL, "whole[%d] is %d of %d choices", (int)i, (int)plan->whole[i],
                            (int)layer->n_whole);
        for (int32_t g = 0; g < layer->n_groups; g++)
            if (plan->whole[i] < 0 ? groups[g] < 0 || groups[g] >= sizes[g] : groups[g] != -1)
                return dsc_fail(DSC_EINVAL, "groups[%lld] is %d of %d choices", (long long)(groups + g - plan->groups),
                                (int)groups[g], (int)sizes[g]);
        sizes += layer->n_groups;
        groups += layer->n_groups;
    }
    return DSC_OK;
}

void dsc_recompute_add_up(const struct dsc_recompute_problem *problem, struct dsc_recompute_plan *plan)
{
    struct dsc_recompute_view view = dsc_recompute_first(problem);
    const int32_t *groups = plan->groups;
    int64_t kept = 0;

    plan->peak_bytes = plan->added_ns = 0;
    plan->peak_layer = -1;
    for (int32_t i = 0; i < problem->n_layers; i++) {
        struct dsc_recompute_choice sum = dsc_recompute_sum(&view, plan->whole[i], groups);
        int64_t held;

        kept += sum.kept_bytes;
        held = kept + (sum.transient_bytes > view.layer->work_bytes ? sum.transient_bytes : view.layer->work_bytes);
        if (held >= plan->peak_bytes) {
            plan->peak_bytes = held;
            plan->peak_layer = i;
        }
        plan->added_ns += sum.added_ns;
        groups += view.layer->n_groups;
        dsc_recompute_next(&view);
    }
}

struct dsc_recompute_choice dsc_recompute_sum(const struct dsc_recompute_view *view, int32_t whole,
                                              const int32_t *groups)
{
    struct dsc_recompute_choice sum = {0, 0, 0};
    const struct dsc_recompute_choice *choices = dsc_recompute_choices(view);

    if (whole >= 0)
        return view->whole[whole];
    for (int32_t g = 0; g < view->layer->n_groups; g++) {
        sum.kept_bytes += choices[groups[g]].kept_bytes;
        sum.transient_bytes += choices[groups[g]].transient_bytes;
        sum.added_ns += choices[groups[g]].added_ns;
        choices += view->sizes[g];
    }
    return sum;
}

struct dsc_recompute_view dsc_recompute_first(const struct dsc_recompute_problem *problem)
{
    return (struct dsc_recompute_view){problem->layers, problem->choices, problem->group_sizes};
}

void dsc_recompute_next(struct dsc_recompute_view *view)
{
    const struct dsc_recompute_choice *end = dsc_recompute_choices(view);

    for (int32_t g = 0; g < view->layer->n_groups; g++)
        end += view->sizes[g];
    view->whole = end;
    view->sizes += view->layer->n_groups;
    view->layer++;
}

dsc_status dsc_recompute_peak(const struct dsc_recompute_problem *problem, struct dsc_recompute_plan *plan)
{
    DSC_TRY(dsc_recompute_check(problem));
    if (plan == NULL || (plan->whole == NULL && problem->n_layers > 0) ||
        (plan->groups == NULL && problem->n_group_sizes > 0))
        return dsc_fail(DSC_EINVAL, "plan, whole or groups is NULL");
    DSC_TRY(check_plan(problem, plan));
    dsc_recompute_add_up(problem, plan);
    return DSC_OK;
}
