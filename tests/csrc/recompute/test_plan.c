/* recompute/plan.c against all plans of small problems, and against the header's guarantees for large ones. */
#include "test.h"

#include "dsc/recompute.h"

#define MAX_LAYERS 8
#define MAX_ITEMS 32
#define MAX_CHOICES 256

struct small {
    struct dsc_recompute_layer layers[MAX_LAYERS];
    int32_t sizes[MAX_ITEMS];
    struct dsc_recompute_choice choices[MAX_CHOICES];
    struct dsc_recompute_problem problem;
};

/* Makes a problem of n_items groups and whole choices in total, distributed randomly over layers. */
static void make_small(struct small *s, uint64_t *random, int64_t limit, bool is_saved_either_way)
{
    int32_t n_layers = (int32_t)(1 + test_below(random, MAX_LAYERS));
    int32_t n_items = (int32_t)(1 + test_below(random, 8));

    memset(s, 0, sizeof *s);
    s->problem = (struct dsc_recompute_problem){s->layers, n_layers, s->sizes, s->choices, 0, 0};
    for (int32_t i = 0; i < n_items; i++) {
        struct dsc_recompute_layer *layer = &s->layers[test_below(random, n_layers)];

        if (test_below(random, 3) == 0)
            layer->n_whole++;
        else
            layer->n_groups++;
    }
    for (int32_t i = 0; i < n_layers; i++) {
        struct dsc_recompute_layer *layer = &s->layers[i];

        layer->work_bytes = test_below(random, 4) == 0 ? test_below(random, limit) : 0;
        s->problem.n_choices += layer->n_whole;
        for (int32_t g = 0; g < layer->n_groups; g++) {
            int32_t size = (int32_t)(1 + test_below(random, 4));

            s->sizes[s->problem.n_group_sizes++] = size;
            s->problem.n_choices += size;
        }
    }
    for (int32_t c = 0; c < s->problem.n_choices; c++) {
        int64_t n_bytes = test_below(random, limit);

        s->choices[c] = is_saved_either_way && c % 2 == 0
                            ? (struct dsc_recompute_choice){n_bytes, 0, 0}
                            : (struct dsc_recompute_choice){test_below(random, n_bytes + 1), n_bytes, test_below(random, limit)};
    }
}

struct best {
    int64_t ns;
    int64_t peak;
    int64_t smallest;
};

static void try_from(struct small *s, int64_t budget, int32_t layer, int32_t group, int32_t *whole, int32_t *groups,
                     int32_t n_done, struct best *best)
{
    if (layer == s->problem.n_layers) {
        int64_t kept = 0;
        int64_t peak = 0;
        int64_t ns = 0;
        const struct dsc_recompute_choice *at = s->choices;

        for (int32_t i = 0, g = 0; i < s->problem.n_layers; i++) {
            int64_t k = 0;
            int64_t t = 0;

            for (int32_t w = 0; w < s->layers[i].n_whole; w++, at++)
                if (whole[i] == w) {
                    k = at->kept_bytes;
                    t = at->transient_bytes;
                    ns += at->added_ns;
                }
            for (int32_t n = 0; n < s->layers[i].n_groups; n++, g++)
                for (int32_t c = 0; c < s->sizes[g]; c++, at++)
                    if (groups[g] == c) {
                        k += at->kept_bytes;
                        t += at->transient_bytes;
                        ns += at->added_ns;
                    }
            kept += k;
            t = t > s->layers[i].work_bytes ? t : s->layers[i].work_bytes;
            peak = kept + t > peak ? kept + t : peak;
        }
        best->smallest = peak < best->smallest ? peak : best->smallest;
        if (peak <= budget && (ns < best->ns || (ns == best->ns && peak < best->peak))) {
            best->ns = ns;
            best->peak = peak;
        }
        return;
    }
    if (group == 0) {
        whole[layer] = -1;
        for (int32_t g = 0; g < s->layers[layer].n_groups; g++)
            groups[n_done + g] = -1;
        for (int32_t w = 0; w < s->layers[layer].n_whole; w++) {
            whole[layer] = w;
            try_from(s, budget, layer + 1, 0, whole, groups, n_done + s->layers[layer].n_groups, best);
        }
        whole[layer] = -1;
    }
    if (group == s->layers[layer].n_groups) {
        if (group > 0 || s->layers[layer].n_whole == 0)
            try_from(s, budget, layer + 1, 0, whole, groups, n_done + group, best);
        return;
    }
    for (int32_t c = 0; c < s->sizes[n_done + group]; c++) {
        groups[n_done + group] = c;
        try_from(s, budget, layer, group + 1, whole, groups, n_done, best);
    }
    groups[n_done + group] = -1;
}

static void check_small(struct small *s, int64_t budget)
{
    int32_t whole[MAX_LAYERS];
    int32_t groups[MAX_ITEMS];
    struct best best = {INT64_MAX, INT64_MAX, INT64_MAX};
    struct dsc_recompute_plan plan = {.whole = whole, .groups = groups};
    int64_t smallest = -1;

    try_from(s, budget, 0, 0, whole, groups, 0, &best);
    CHECK_STATUS(dsc_recompute_smallest(&s->problem, &smallest), DSC_OK);
    CHECK_EQ(smallest, best.smallest);
    if (best.ns == INT64_MAX) {
        char number[64];

        CHECK_STATUS(dsc_recompute_solve(&s->problem, budget, &plan), DSC_ENOSPC);
        snprintf(number, sizeof number, "budget is %" PRId64 " bytes, %" PRId64, best.smallest, budget);
        CHECK(strstr(dsc_last_error(), number) != NULL);
        CHECK_EQ(plan.smallest_bytes, best.smallest);
        return;
    }
    CHECK_STATUS(dsc_recompute_solve(&s->problem, budget, &plan), DSC_OK);
    CHECK(plan.is_exact);
    CHECK_EQ(plan.added_ns, best.ns);
    CHECK_EQ(plan.bound_ns, best.ns);
    CHECK_EQ(plan.peak_bytes, best.peak);
    CHECK_EQ(plan.smallest_bytes, best.smallest);

    struct dsc_recompute_plan again = {.whole = whole, .groups = groups};

    CHECK_STATUS(dsc_recompute_peak(&s->problem, &again), DSC_OK);
    CHECK_EQ(again.peak_bytes, best.peak);
    CHECK_EQ(again.added_ns, best.ns);
    CHECK_EQ(again.peak_layer, plan.peak_layer);
}

static void test_against_all_plans(void)
{
    static struct small s;
    uint64_t random = 11;
    int n_full = 0;

    for (int round = 0; round < 3000; round++) {
        int64_t limit = round % 4 == 0 ? 4 : 1000; /* many ties */
        int64_t smallest = 0;

        make_small(&s, &random, limit, round % 2 == 0);
        CHECK_STATUS(dsc_recompute_smallest(&s.problem, &smallest), DSC_OK);

        int64_t budget = test_below(&random, 5) == 0 ? smallest : smallest / 2 + test_below(&random, 2 * smallest + 2);

        TEST_CASE("round %d: %d layers, budget %lld", round, (int)s.problem.n_layers, (long long)budget);
        check_small(&s, budget);
        n_full += budget < smallest;
    }
    TEST_CASE("the problems are of all sorts");
    CHECK(n_full > 300 && n_full < 1500);
}

/* Keeping the last layer is free, since backward begins there. */
static void test_the_last_layer_is_kept(void)
{
    enum { N = 5 };
    struct dsc_recompute_layer layers[N];
    struct dsc_recompute_choice choices[2 * N];
    int32_t whole[N];
    struct dsc_recompute_problem problem = {layers, N, NULL, choices, 0, 2 * N};
    struct dsc_recompute_plan plan = {.whole = whole};

    TEST_CASE("equal layers that keep 100, or 10 and 90 when computed again");
    for (int i = 0; i < N; i++) {
        layers[i] = (struct dsc_recompute_layer){0, 2, 0};
        choices[2 * i] = (struct dsc_recompute_choice){100, 0, 0};
        choices[2 * i + 1] = (struct dsc_recompute_choice){10, 90, 7};
    }
    for (int n_kept = 1; n_kept <= N; n_kept++) { /* each layer costs 90 more, except the last layer */
        CHECK_STATUS(dsc_recompute_solve(&problem, 10 * N + 90 * n_kept, &plan), DSC_OK);
        CHECK_EQ(plan.added_ns, 7 * (N - n_kept));
        CHECK_EQ(plan.smallest_bytes, 10 * N + 90);
        CHECK_EQ(whole[N - 1], 0);
        CHECK(plan.is_exact);
    }
    CHECK_ERROR(dsc_recompute_solve(&problem, 10 * N + 89, &plan), DSC_ENOSPC, "140 bytes, 139");
}

/* Recomputing a collective costs communication again, so collectives are kept first although they are no smaller. */
static void test_groups_by_what_they_save(void)
{
    const struct dsc_recompute_layer layers[] = {{0, 1, 3}, {0, 0, 0}};
    const int32_t sizes[] = {2, 2, 2};
    const struct dsc_recompute_choice choices[] = {
        {120, 0, 0}, {40, 0, 100}, {0, 40, 300}, {40, 0, 0}, {0, 40, 100}, {10, 0, 20}, {10, 0, 20},
    };
    const struct dsc_recompute_problem problem = {layers, 2, sizes, choices, 3, 7};
    int32_t whole[2];
    int32_t groups[3];
    struct dsc_recompute_plan plan = {.whole = whole, .groups = groups};

    TEST_CASE("one layer and an empty one");
    CHECK_STATUS(dsc_recompute_solve(&problem, 119, &plan), DSC_OK);
    CHECK_EQ(whole[0], -1);
    CHECK_EQ(whole[1], -1);
    CHECK_EQ(groups[0], 0);
    CHECK_EQ(groups[1], 0);
    CHECK_EQ(plan.added_ns, 120);
    CHECK_EQ(plan.peak_bytes, 90);
    CHECK_STATUS(dsc_recompute_solve(&problem, 120, &plan), DSC_OK);
    CHECK_EQ(whole[0], 0);
    CHECK_EQ(groups[0], -1);
    CHECK_EQ(plan.added_ns, 0);
}

/* Plans n_layers layers of 20 operators with 4 choices each. */
static void test_large(int32_t n_layers, bool is_uniform)
{
    enum { GROUPS = 20, CHOICES = 4 };
    struct dsc_recompute_layer *layers = test_alloc((size_t)n_layers * sizeof *layers);
    int32_t *sizes = test_alloc((size_t)n_layers * GROUPS * sizeof *sizes);
    struct dsc_recompute_choice *choices = test_alloc((size_t)n_layers * GROUPS * CHOICES * sizeof *choices);
    int32_t *whole = test_alloc((size_t)n_layers * sizeof *whole);
    int32_t *groups = test_alloc((size_t)n_layers * GROUPS * sizeof *groups);
    struct dsc_recompute_problem problem = {layers, n_layers, sizes, choices, n_layers * GROUPS, n_layers * GROUPS * CHOICES};
    struct dsc_recompute_plan plan = {.whole = whole, .groups = groups};
    uint64_t random = 3;
    int64_t all = 0;
    int64_t all_ns = 0;
    int64_t smallest = 0;

    for (int32_t i = 0; i < n_layers; i++) {
        if (is_uniform)
            random = 3;
        layers[i] = (struct dsc_recompute_layer){0, 0, GROUPS};
        for (int g = 0; g < GROUPS; g++) {
            struct dsc_recompute_choice *at = &choices[(i * GROUPS + g) * CHOICES];
            int64_t n_bytes = (1 + test_below(&random, 64)) << 20;
            int64_t ns = n_bytes / 100 + test_below(&random, 1000000);

            sizes[i * GROUPS + g] = CHOICES;
            at[0] = (struct dsc_recompute_choice){n_bytes, 0, 0};
            at[1] = (struct dsc_recompute_choice){0, n_bytes, ns};
            at[2] = (struct dsc_recompute_choice){0, n_bytes, n_bytes / 25};
            at[3] = (struct dsc_recompute_choice){n_bytes / 4, n_bytes - n_bytes / 4, n_bytes / 50};
            all += n_bytes;
            all_ns += ns < n_bytes / 25 ? ns : n_bytes / 25;
        }
    }
    CHECK_STATUS(dsc_recompute_smallest(&problem, &smallest), DSC_OK);
    for (int eighth = 1; eighth <= 8; eighth++) {
        int64_t budget = smallest + (all - smallest) / 8 * eighth;

        TEST_CASE("%d %s layers, %d eighths", (int)n_layers, is_uniform ? "equal" : "different", eighth);
        CHECK_STATUS(dsc_recompute_solve(&problem, budget, &plan), DSC_OK);
        CHECK_EQ(plan.smallest_bytes, smallest);
        CHECK(plan.peak_bytes <= budget);
        CHECK(plan.bound_ns <= plan.added_ns);
        /* At most a hundredth of all_ns above the lower bound. */
        test_report(plan.added_ns - plan.bound_ns <= all_ns / 100, __FILE__, __LINE__, "%lld ns, at least %lld, of %lld",
                    (long long)plan.added_ns, (long long)plan.bound_ns, (long long)all_ns);

        struct dsc_recompute_plan again = {.whole = whole, .groups = groups};

        CHECK_STATUS(dsc_recompute_peak(&problem, &again), DSC_OK);
        CHECK_EQ(again.peak_bytes, plan.peak_bytes);
        CHECK_EQ(again.added_ns, plan.added_ns);
    }
    free(layers);
    free(sizes);
    free(choices);
    free(whole);
    free(groups);
}

static void test_nothing(void)
{
    const struct dsc_recompute_problem problem = {0};
    struct dsc_recompute_plan plan = {0};
    int64_t smallest = -1;

    TEST_CASE("no layers");
    CHECK_STATUS(dsc_recompute_solve(&problem, 0, &plan), DSC_OK);
    CHECK_EQ(plan.peak_bytes, 0);
    CHECK_EQ(plan.peak_layer, -1);
    CHECK(plan.is_exact);
    CHECK_STATUS(dsc_recompute_smallest(&problem, &smallest), DSC_OK);
    CHECK_EQ(smallest, 0);
}

static void test_bad_arguments(void)
{
    struct dsc_recompute_layer layers[] = {{0, 1, 1}};
    int32_t sizes[] = {1};
    struct dsc_recompute_choice choices[] = {{1, 2, 3}, {4, 5, 6}};
    struct dsc_recompute_problem problem = {layers, 1, sizes, choices, 1, 2};
    int32_t whole[] = {-1};
    int32_t groups[] = {0};
    struct dsc_recompute_plan plan = {.whole = whole, .groups = groups, .peak_bytes = -7};
    int64_t smallest = -1;

    TEST_CASE("bad arguments");
    CHECK_ERROR(dsc_recompute_solve(NULL, 0, &plan), DSC_EINVAL, "problem");
    CHECK_ERROR(dsc_recompute_solve(&problem, -1, &plan), DSC_EINVAL, "budget_bytes is -1");
    CHECK_ERROR(dsc_recompute_solve(&problem, 9, NULL), DSC_EINVAL, "plan");
    CHECK_ERROR(dsc_recompute_smallest(&problem, NULL), DSC_EINVAL, "out_bytes");
    CHECK_STATUS(dsc_recompute_smallest(&problem, &smallest), DSC_OK);
    CHECK_EQ(smallest, 3);

    struct dsc_recompute_problem bad = problem;

    bad.n_choices = 3;
    CHECK_ERROR(dsc_recompute_solve(&bad, 9, &plan), DSC_EINVAL, "n_choices is 3");
    bad = problem;
    bad.n_group_sizes = 0;
    CHECK_ERROR(dsc_recompute_solve(&bad, 9, &plan), DSC_EINVAL, "n_group_sizes is 0");
    bad = problem;
    bad.choices = NULL;
    CHECK_ERROR(dsc_recompute_solve(&bad, 9, &plan), DSC_EINVAL, "NULL");
    bad.n_layers = -1;
    CHECK_ERROR(dsc_recompute_solve(&bad, 9, &plan), DSC_EINVAL, "negative");
    sizes[0] = 0;
    CHECK_ERROR(dsc_recompute_solve(&problem, 9, &plan), DSC_EINVAL, "group_sizes[0] is 0");
    sizes[0] = 1;
    layers[0].work_bytes = -1;
    CHECK_ERROR(dsc_recompute_solve(&problem, 9, &plan), DSC_EINVAL, "layers[0]");
    layers[0].work_bytes = 0;
    choices[1].added_ns = -1;
    CHECK_ERROR(dsc_recompute_solve(&problem, 9, &plan), DSC_EINVAL, "choices[1]");
    choices[1].added_ns = INT64_MAX - 2;
    CHECK_ERROR(dsc_recompute_solve(&problem, 9, &plan), DSC_EOVERFLOW, "2 choices");
    choices[1].added_ns = 6;
    layers[0].work_bytes = INT64_MAX;
    CHECK_ERROR(dsc_recompute_solve(&problem, 9, &plan), DSC_EOVERFLOW, "choices");
    layers[0].work_bytes = 0;
    CHECK_EQ(plan.peak_bytes, -7);
    whole[0] = 1;
    CHECK_ERROR(dsc_recompute_peak(&problem, &plan), DSC_EINVAL, "whole[0] is 1 of 1");
    whole[0] = 0;
    CHECK_ERROR(dsc_recompute_peak(&problem, &plan), DSC_EINVAL, "groups[0] is 0");
    whole[0] = -1;
    groups[0] = 1;
    CHECK_ERROR(dsc_recompute_peak(&problem, &plan), DSC_EINVAL, "groups[0] is 1 of 1");
    CHECK_EQ(plan.peak_bytes, -7);
}

int main(void)
{
    test_nothing();
    test_against_all_plans();
    test_the_last_layer_is_kept();
    test_groups_by_what_they_save();
    test_large(40, false);
    test_large(40, true);
    test_large(1000, false);
    test_bad_arguments();
    return test_finish(__FILE__);
}
