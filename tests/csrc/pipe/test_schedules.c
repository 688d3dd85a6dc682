/*
 * Every schedule over many shapes: the verifier accepts it, and its time and memory stay within the figures of its
 * paper.
 */
#include "test.h"

#include "dsc/pipe.h"

#define MAX_RANKS 16
#define MAX_STAGES (MAX_RANKS * 4)
#define MAX_ACTIONS (MAX_STAGES * 64 * 7)

struct lists {
    struct dsc_pipe_table table;
    struct dsc_pipe_action *actions;
    int64_t begins[MAX_RANKS + 1];
    int32_t rank_of[MAX_STAGES];
};

static struct dsc_pipe_action *computed;
static struct dsc_pipe_action *complete;

/* Makes the lists of a schedule, with or without sends and receives. */
static bool make(const char *schedule, const struct dsc_pipe_shape *shape, bool with_comm, struct lists *out)
{
    struct dsc_pipe_traits traits;
    int64_t n;

    CHECK_STATUS(dsc_pipe_traits_of(schedule, &traits), DSC_OK);
    *out = (struct lists){.actions = computed};
    for (int32_t rank = 0; rank < shape->n_ranks; rank++) {
        if (!CHECK_STATUS(dsc_pipe_build(schedule, shape, rank, MAX_ACTIONS - out->begins[rank],
                                         computed + out->begins[rank], &n),
                          DSC_OK))
            return false;
        out->begins[rank + 1] = out->begins[rank] + n;
    }
    for (int32_t stage = 0; stage < shape->n_ranks * shape->n_virtual; stage++)
        CHECK_STATUS(dsc_pipe_rank_of(schedule, shape, stage, &out->rank_of[stage]), DSC_OK);
    out->table = (struct dsc_pipe_table){computed, out->begins, out->rank_of, shape->n_ranks, shape->n_ranks * shape->n_virtual,
                                         shape->n_micro_batches, traits.has_backward, NULL, 0, -1};
    if (with_comm) {
        int64_t begins[MAX_RANKS + 1];

        if (!CHECK_STATUS(dsc_pipe_add_comm(&out->table, MAX_ACTIONS, complete, begins), DSC_OK))
            return false;
        memcpy(out->begins, begins, sizeof begins);
        out->actions = complete;
        out->table.actions = complete;
    }
    return true;
}

static int64_t makespan_of(const struct lists *lists, struct dsc_pipe_cost cost, int64_t transfer_ns, struct dsc_pipe_usage *usage)
{
    struct dsc_pipe_cost costs[MAX_STAGES];
    int64_t makespan = -1;

    for (int32_t stage = 0; stage < lists->table.n_stages; stage++)
        costs[stage] = cost;
    CHECK_STATUS(dsc_pipe_simulate(&lists->table, costs, transfer_ns, NULL, usage, &makespan), DSC_OK);
    return makespan;
}

static void test_all_are_proved(void)
{
    static const int32_t micro_batches[] = {1, 2, 3, 4, 5, 7, 8, 13, 16, 31, 32, 63, 64};
    struct lists lists;
    const char *name;

    for (int32_t i = 0; (name = dsc_pipe_schedule_name(i)) != NULL; i++)
        for (int32_t p = 1; p <= MAX_RANKS; p++)
            for (int32_t v = 1; v <= 4; v++)
                for (size_t j = 0; j < sizeof micro_batches / sizeof *micro_batches; j++) {
                    struct dsc_pipe_shape shape = {p, v, micro_batches[j]};

                    TEST_CASE("%s, %d ranks, %d stages each, %d micro-batches", name, p, v, micro_batches[j]);
                    if (dsc_pipe_check(name, &shape) == DSC_OK && make(name, &shape, true, &lists))
                        CHECK_STATUS(dsc_pipe_verify(&lists.table), DSC_OK);
                }
}

static int64_t larger(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

/* The idle time of the rank that finishes last, from the papers: (p - 1)(F + B) for 1F1B and so on, with B = I + W. */
static void test_formulas(void)
{
    static const struct dsc_pipe_cost costs[] = {{100, 100, 100, 1, 0}, {100, 130, 70, 1, 0}, {70, 90, 60, 1, 0}, {100, 150, 150, 1, 0}};
    struct dsc_pipe_usage usage[MAX_RANKS];
    struct lists lists;

    for (int32_t p = 1; p <= MAX_RANKS; p++)
        for (int32_t m = p; m <= 64; m += p)
            for (size_t i = 0; i < sizeof costs / sizeof *costs; i++) {
                struct dsc_pipe_cost c = costs[i];
                int64_t whole = c.forward_ns + c.input_ns + c.weight_ns;

                TEST_CASE("%d ranks, %d micro-batches, costs %zu", p, m, i);
                make("gpipe", &(struct dsc_pipe_shape){p, 1, m}, false, &lists);
                CHECK_EQ(makespan_of(&lists, c, 0, usage), (m + p - 1) * whole);
                CHECK_EQ(usage[0].peak_live, m);
                make("1f1b", &(struct dsc_pipe_shape){p, 1, m}, false, &lists);
                CHECK_EQ(makespan_of(&lists, c, 0, usage), (m + p - 1) * whole);
                for (int32_t rank = 0; rank < p; rank++)
                    CHECK_EQ(usage[rank].peak_live, p - rank);
                for (int32_t v = 1; v <= 4; v++) {
                    make("interleaved", &(struct dsc_pipe_shape){p, v, m}, false, &lists);
                    CHECK_EQ(makespan_of(&lists, c, 0, usage), ((int64_t)v * m + p - 1) * whole);
                }
                /* (p - 1)(F + I - W) holds while that is the longest path through the last two ranks. */
                make("zb_h1", &(struct dsc_pipe_shape){p, 1, m}, false, &lists);
                CHECK_EQ(makespan_of(&lists, c, 0, usage),
                         m * whole + (p - 1) * larger(larger(c.forward_ns, c.input_ns), c.forward_ns + c.input_ns - c.weight_ns));
                for (int32_t rank = 0; rank < p; rank++)
                    CHECK(usage[rank].peak_live <= p);
            }
}

/* With F = I = W, the last rank of a V-shaped schedule waits for the first output. No rank waits after that. */
static void test_v(void)
{
    struct dsc_pipe_cost cost = {100, 100, 100, 1, 0};
    struct dsc_pipe_usage usage[MAX_RANKS];
    struct lists lists;

    for (int32_t p = 1; p <= MAX_RANKS; p++)
        for (int32_t m = 2 * p; m <= 64; m++) {
            TEST_CASE("%d ranks, %d micro-batches", p, m);
            make("zb_v", &(struct dsc_pipe_shape){p, 2, m}, false, &lists);
            CHECK_EQ(makespan_of(&lists, cost, 0, usage), 2 * m * 300 + (p - 1) * 100);
            for (int32_t rank = 0; rank < p; rank++)
                CHECK(usage[rank].peak_live <= 2 * p);
            /* The idle time is that of the schedule's formula, plus the wait for the first output. */
            make("dualpipe_v", &(struct dsc_pipe_shape){p, 2, m}, false, &lists);
            CHECK_EQ(makespan_of(&lists, cost, 0, usage), 2 * m * 300 + (p > 1 ? p * 100 : 0));
            for (int32_t rank = 0; rank < p; rank++)
                CHECK(usage[rank].peak_live <= 2 * p + 1);
        }
}

static void test_inference_never_waits(void)
{
    struct dsc_pipe_cost cost = {100, 0, 0, 0, 0};
    struct dsc_pipe_usage usage[MAX_RANKS];
    struct lists lists;

    for (int32_t p = 1; p <= MAX_RANKS; p++)
        for (int32_t v = 1; v <= 3; v++) {
            TEST_CASE("%d ranks, %d stages each", p, v);
            make("inference", &(struct dsc_pipe_shape){p, v, 3 * p}, false, &lists);
            CHECK_EQ(makespan_of(&lists, cost, 0, usage), (3 * p * v + p - 1) * 100);
        }
}

/* Times do not depend on whether the table contains messages. A transfer delays the rank that waits for it. */
static void test_transfers(void)
{
    struct dsc_pipe_cost cost = {100, 100, 100, 1, 0};
    struct dsc_pipe_usage usage[MAX_RANKS];
    struct lists lists;

    make("1f1b", &(struct dsc_pipe_shape){4, 1, 1}, false, &lists);
    CHECK_EQ(makespan_of(&lists, cost, 7, usage), 4 * 300 + 6 * 7);
    make("1f1b", &(struct dsc_pipe_shape){4, 1, 1}, true, &lists);
    CHECK_EQ(makespan_of(&lists, cost, 7, usage), 4 * 300 + 6 * 7);
    CHECK_EQ(usage[0].busy_ns, 300);
}

static void test_bytes(void)
{
    struct dsc_pipe_cost cost = {100, 100, 100, 1000, 300};
    struct dsc_pipe_usage usage[MAX_RANKS];
    struct lists lists;

    make("zb_h1", &(struct dsc_pipe_shape){1, 1, 5}, false, &lists);
    makespan_of(&lists, cost, 0, usage);
    CHECK_EQ(usage[0].peak_bytes, 1000);
    make("gpipe", &(struct dsc_pipe_shape){2, 1, 5}, false, &lists);
    makespan_of(&lists, cost, 0, usage);
    CHECK_EQ(usage[1].peak_bytes, 5000);
    /*
     * Rank 1 of two postpones one micro-batch's weight gradients: their inputs stay in memory beside the next
     * micro-batch.
     */
    make("zb_h1", &(struct dsc_pipe_shape){2, 1, 5}, false, &lists);
    makespan_of(&lists, cost, 0, usage);
    CHECK_EQ(usage[1].peak_bytes, 1300);
}

static void test_refusals(void)
{
    struct dsc_pipe_action action;
    int64_t n = -7;
    int32_t rank = -7;

    TEST_CASE("refusals");
    CHECK_ERROR(dsc_pipe_check("2f2b", &(struct dsc_pipe_shape){1, 1, 1}), DSC_ENOTFOUND, "zb_h1");
    CHECK_ERROR(dsc_pipe_check("1f1b", &(struct dsc_pipe_shape){0, 1, 1}), DSC_EINVAL, "0 ranks");
    CHECK_ERROR(dsc_pipe_check("1f1b", &(struct dsc_pipe_shape){1, 1, 0}), DSC_EINVAL, "0 micro-batches");
    CHECK_ERROR(dsc_pipe_check("1f1b", &(struct dsc_pipe_shape){2, 2, 4}), DSC_EINVAL, "nearest that it can is 1");
    CHECK_ERROR(dsc_pipe_check("zb_v", &(struct dsc_pipe_shape){2, 3, 4}), DSC_EINVAL, "nearest that it can is 2");
    CHECK_ERROR(dsc_pipe_check("dualpipe_v", &(struct dsc_pipe_shape){4, 2, 7}), DSC_EINVAL, "at least 8");
    CHECK_ERROR(dsc_pipe_check("interleaved", &(struct dsc_pipe_shape){1024, 64, 65536}), DSC_EINVAL, "actions");
    CHECK_ERROR(dsc_pipe_build("1f1b", &(struct dsc_pipe_shape){2, 1, 4}, 2, 0, NULL, &n), DSC_EINVAL, "rank is 2");
    CHECK_ERROR(dsc_pipe_build("1f1b", &(struct dsc_pipe_shape){2, 1, 4}, 0, 1, &action, &n), DSC_ENOSPC, "of 8");
    CHECK_ERROR(dsc_pipe_rank_of("zb_v", &(struct dsc_pipe_shape){2, 2, 4}, 4, &rank), DSC_EINVAL, "stage is 4");
    CHECK_EQ(n, -7);
    CHECK_EQ(rank, -7);
    CHECK(dsc_pipe_schedule_name(-1) == NULL);
}

static void test_choose(void)
{
    struct dsc_pipe_cost whole[4];
    struct dsc_pipe_cost half[8];
    struct dsc_pipe_outcome outcomes[5];
    int32_t index = -7;

    for (int i = 0; i < 8; i++)
        half[i] = (struct dsc_pipe_cost){50, 50, 50, 500, 250};
    for (int i = 0; i < 4; i++)
        whole[i] = (struct dsc_pipe_cost){100, 100, 100, 1000, 500};

    struct dsc_pipe_candidate candidates[] = {
        {"1f1b", {4, 1, 8}, whole},      {"gpipe", {4, 1, 8}, whole},     {"zb_h1", {4, 1, 8}, whole},
        {"dualpipe_v", {4, 2, 7}, half}, {"zb_v", {4, 2, 8}, half},
    };

    TEST_CASE("choose");
    CHECK_STATUS(dsc_pipe_choose(candidates, 5, 0, 1 << 20, outcomes, &index), DSC_OK);
    CHECK_EQ(index, 4);
    CHECK_EQ(outcomes[0].makespan_ns, 11 * 300);
    CHECK_EQ(outcomes[0].peak_bytes, 4000);
    CHECK_EQ(outcomes[1].peak_bytes, 8000);
    CHECK_EQ(outcomes[2].makespan_ns, 8 * 300 + 3 * 100);
    CHECK_EQ(outcomes[3].makespan_ns, -1);
    CHECK_STATUS(dsc_pipe_choose(candidates, 2, 0, 4000, outcomes, &index), DSC_OK);
    CHECK_EQ(index, 0);
    index = -7;
    CHECK_ERROR(dsc_pipe_choose(candidates, 2, 0, 3999, outcomes, &index), DSC_ENOSPC, "1f1b holds least, 4000");
    CHECK_ERROR(dsc_pipe_choose(candidates + 3, 1, 0, 3999, outcomes, &index), DSC_EINVAL, "at least 8");
    CHECK_EQ(index, -7);
}

int main(void)
{
    computed = test_alloc(MAX_ACTIONS * sizeof *computed);
    complete = test_alloc(MAX_ACTIONS * sizeof *complete);
    test_all_are_proved();
    test_formulas();
    test_v();
    test_inference_never_waits();
    test_transfers();
    test_bytes();
    test_refusals();
    test_choose();
    free(computed);
    free(complete);
    return test_finish(__FILE__);
}
