/* dsc_recompute_solve on any numbers: a plan that fits as dsc_recompute_peak counts, none better than the bound, and for few choices the best of all. */
#include "fuzz.h"

#include "dsc/recompute.h"

#define MAX_LAYERS 6
#define MAX_GROUPS 12
#define MAX_CHOICES 96

struct given {
    struct dsc_recompute_layer layers[MAX_LAYERS];
    int32_t sizes[MAX_GROUPS];
    struct dsc_recompute_choice choices[MAX_CHOICES];
    struct dsc_recompute_problem problem;
};

static void take_problem(struct input *input, struct given *given, bool is_wild)
{
    struct dsc_recompute_problem *p = &given->problem;

    memset(given, 0, sizeof *given);
    *p = (struct dsc_recompute_problem){given->layers, (int32_t)take_below(input, MAX_LAYERS + 1), given->sizes, given->choices, 0, 0};
    for (int32_t i = 0; i < p->n_layers; i++) {
        struct dsc_recompute_layer *layer = &given->layers[i];

        layer->work_bytes = is_wild ? take_wild(input) : take_below(input, 5);
        layer->n_whole = (int32_t)take_below(input, 4);
        layer->n_groups = (int32_t)take_below(input, 3);
        p->n_choices += layer->n_whole;
        for (int32_t g = 0; g < layer->n_groups; g++) {
            given->sizes[p->n_group_sizes] = (int32_t)(1 + take_below(input, 4));
            p->n_choices += given->sizes[p->n_group_sizes++];
        }
    }
    for (int32_t c = 0; c < p->n_choices; c++)
        given->choices[c] = is_wild ? (struct dsc_recompute_choice){take_wild(input), take_wild(input), take_wild(input)}
                                    : (struct dsc_recompute_choice){take_below(input, 20), take_below(input, 20), take_below(input, 9)};
}

/* The next way to treat all layers, as if counting; false after the last one. */
static bool next_plan(const struct given *given, struct dsc_recompute_plan *plan)
{
    int32_t g = given->problem.n_group_sizes;

    for (int32_t i = given->problem.n_layers - 1; i >= 0; i--) {
        const struct dsc_recompute_layer *layer = &given->layers[i];

        g -= layer->n_groups;
        if (plan->whole[i] < 0)
            for (int32_t n = layer->n_groups - 1; n >= 0; n--) {
                if (++plan->groups[g + n] < given->sizes[g + n])
                    return true;
                plan->groups[g + n] = 0;
            }
        if (plan->whole[i] + 1 < layer->n_whole) {
            plan->whole[i]++;
            for (int32_t n = 0; n < layer->n_groups; n++)
                plan->groups[g + n] = -1;
            return true;
        }
        plan->whole[i] = layer->n_groups == 0 && layer->n_whole > 0 ? 0 : -1;
        for (int32_t n = 0; n < layer->n_groups; n++)
            plan->groups[g + n] = 0;
    }
    return false;
}

static void compare_with_all(const struct given *given, int64_t budget, const struct dsc_recompute_plan *found, bool fits)
{
    int32_t whole[MAX_LAYERS];
    int32_t groups[MAX_GROUPS];
    struct dsc_recompute_plan plan = {.whole = whole, .groups = groups};
    int64_t best = INT64_MAX;
    int64_t smallest = INT64_MAX;
    int64_t n_plans = 1;

    for (int32_t g = 0; g < given->problem.n_group_sizes; g++)
        n_plans *= given->sizes[g];
    for (int32_t i = 0; i < given->problem.n_layers; i++)
        n_plans *= 1 + given->layers[i].n_whole;
    if (n_plans > 3000)
        return;
    memset(groups, 0, sizeof groups);
    for (int32_t i = 0; i < given->problem.n_layers; i++)
        whole[i] = given->layers[i].n_groups == 0 && given->layers[i].n_whole > 0 ? 0 : -1;
    do {
        REQUIRE(dsc_recompute_peak(&given->problem, &plan) == DSC_OK);
        smallest = plan.peak_bytes < smallest ? plan.peak_bytes : smallest;
        if (plan.peak_bytes <= budget && plan.added_ns < best)
            best = plan.added_ns;
    } while (next_plan(given, &plan));
    REQUIRE(found->smallest_bytes == smallest);
    REQUIRE(fits == (smallest <= budget));
    REQUIRE(!fits || (found->added_ns == best && found->is_exact));
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes)
{
    struct input input = {data, n_bytes};
    bool is_wild = take_byte(&input) % 3 == 0;
    struct given given;
    int32_t whole[MAX_LAYERS];
    int32_t groups[MAX_GROUPS];
    struct dsc_recompute_plan plan;
    struct dsc_recompute_plan before;
    dsc_status status;
    int64_t budget;

    take_problem(&input, &given, is_wild);
    budget = is_wild ? take_wild(&input) : take_below(&input, 120);
    memset(&plan, 0x5a, sizeof plan);
    plan.whole = whole;
    plan.groups = groups;
    before = plan;
    status = dsc_recompute_solve(&given.problem, budget, &plan);
    if (status != DSC_OK) {
        REQUIRE(status == DSC_ENOSPC || (is_wild && (status == DSC_EINVAL || status == DSC_EOVERFLOW)));
        REQUIRE(plan.peak_bytes == before.peak_bytes && plan.added_ns == before.added_ns);
        REQUIRE((plan.smallest_bytes == before.smallest_bytes) == (status != DSC_ENOSPC));
        if (status == DSC_ENOSPC) {
            REQUIRE(plan.smallest_bytes > budget);
            compare_with_all(&given, budget, &plan, false);
        }
        return 0;
    }
    before = plan;
    REQUIRE(plan.peak_bytes <= budget && plan.bound_ns <= plan.added_ns && plan.smallest_bytes <= plan.peak_bytes);
    REQUIRE(dsc_recompute_peak(&given.problem, &plan) == DSC_OK);
    REQUIRE(plan.peak_bytes == before.peak_bytes && plan.added_ns == before.added_ns && plan.peak_layer == before.peak_layer);
    compare_with_all(&given, budget, &plan, true);
    return 0;
}
