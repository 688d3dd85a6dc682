/* Schedules of any shape are proved and run; a table that was changed in one place is refused, or still right. */
#include "fuzz.h"

#include "dsc/pipe.h"

#define MAX_RANKS 16
#define MAX_STAGES (MAX_RANKS * 4)
#define MAX_ACTIONS (MAX_STAGES * 64 * 7)
#define MAX_GATHERED (MAX_ACTIONS + MAX_STAGES * 64 * 3 * 2 * 3)

static struct dsc_pipe_action computed[MAX_ACTIONS];
static struct dsc_pipe_action complete[MAX_ACTIONS];
static struct dsc_pipe_span spans[MAX_ACTIONS];
static struct dsc_pipe_action gathered[MAX_GATHERED];
static struct dsc_pipe_span gathered_spans[MAX_GATHERED];
static struct dsc_pipe_unit units[MAX_STAGES * 3];

/* An accepted table also ran in simulation, in an order that never uses missing data. */
static void check_times(const struct dsc_pipe_table *table, struct input *input)
{
    struct dsc_pipe_cost costs[MAX_STAGES];
    struct dsc_pipe_usage usage[MAX_RANKS];
    int64_t transfer = take_below(input, 50);
    int64_t busy = 0;
    int64_t most = 0;
    int64_t makespan;

    for (int32_t stage = 0; stage < table->n_stages; stage++)
        costs[stage] = (struct dsc_pipe_cost){take_below(input, 200), take_below(input, 200), take_below(input, 200), take_below(input, 999), 0};
    REQUIRE(dsc_pipe_simulate(table, costs, transfer, spans, usage, &makespan) == DSC_OK);
    for (int32_t rank = 0; rank < table->n_ranks; rank++) {
        int64_t end = 0;

        for (int64_t i = table->begins[rank]; i < table->begins[rank + 1]; i++) {
            REQUIRE(spans[i].begin_ns >= end && spans[i].end_ns >= spans[i].begin_ns);
            end = spans[i].end_ns;
        }
        busy += usage[rank].busy_ns;
        most = end > most ? end : most;
        REQUIRE(usage[rank].busy_ns <= end && usage[rank].peak_live >= 0);
    }
    REQUIRE(most == makespan);
    for (int32_t stage = 0; stage < table->n_stages; stage++)
        busy -= table->n_micro_batches * (costs[stage].forward_ns + (table->has_backward ? costs[stage].input_ns + costs[stage].weight_ns : 0));
    REQUIRE(busy == 0);
}

/* A table with gathers of units of any size is proved. Two of its actions change places: it is refused, or can be run. */
static void check_gathers(const struct dsc_pipe_table *given, struct input *input)
{
    struct dsc_pipe_table table = *given;
    struct dsc_pipe_cost costs[MAX_STAGES] = {{0}};
    struct dsc_pipe_usage usage[MAX_RANKS];
    int64_t begins[MAX_RANKS + 1] = {-7};
    int64_t makespan;

    table.units = units;
    for (int32_t stage = 0; stage < table.n_stages; stage++)
        for (int64_t i = take_below(input, 4); i > 0; i--)
            units[table.n_units++] = (struct dsc_pipe_unit){stage, take_below(input, 100), take_below(input, 9)};
    table.limit_elements = take_below(input, 1200) - 1;
    if (dsc_pipe_add_gathers(&table, (int32_t)take_below(input, 5), MAX_GATHERED, gathered, begins) != DSC_OK) {
        REQUIRE(begins[0] == -7);
        return;
    }
    table.actions = gathered;
    table.begins = begins;
    REQUIRE(dsc_pipe_verify(&table) == DSC_OK);
    REQUIRE(dsc_pipe_simulate(&table, costs, 0, gathered_spans, usage, &makespan) == DSC_OK);
    for (int32_t rank = 0; rank < table.n_ranks; rank++)
        REQUIRE(table.limit_elements < 0 || usage[rank].peak_live_elements <= table.limit_elements);

    int64_t n = begins[table.n_ranks];
    int64_t i = take_below(input, n);
    int64_t j = take_below(input, n);
    struct dsc_pipe_action action = gathered[i];

    gathered[i] = gathered[j];
    gathered[j] = action;
    if (dsc_pipe_verify(&table) == DSC_OK)
        REQUIRE(dsc_pipe_simulate(&table, costs, 0, gathered_spans, usage, &makespan) == DSC_OK);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes)
{
    struct input input = {data, n_bytes};
    int32_t n_schedules = 0;
    int64_t begins[MAX_RANKS + 1] = {0};
    int64_t all_begins[MAX_RANKS + 1];
    int32_t rank_of[MAX_STAGES];
    struct dsc_pipe_traits traits;

    while (dsc_pipe_schedule_name(n_schedules) != NULL)
        n_schedules++;

    const char *name = dsc_pipe_schedule_name((int32_t)take_below(&input, n_schedules));
    struct dsc_pipe_shape shape = {(int32_t)(1 + take_below(&input, MAX_RANKS)), (int32_t)(1 + take_below(&input, 4)),
                                   (int32_t)(1 + take_below(&input, 64))};

    if (take_byte(&input) % 8 == 0) {
        struct dsc_pipe_shape wild = {(int32_t)take_wild(&input), (int32_t)take_wild(&input), (int32_t)take_wild(&input)};
        int32_t rank = -7;

        if (dsc_pipe_rank_of(name, &wild, (int32_t)take_wild(&input), &rank) != DSC_OK)
            REQUIRE(rank == -7);
        return 0;
    }
    if (dsc_pipe_check(name, &shape) != DSC_OK)
        return 0;
    REQUIRE(dsc_pipe_traits_of(name, &traits) == DSC_OK);
    for (int32_t rank = 0; rank < shape.n_ranks; rank++) {
        int64_t n;

        REQUIRE(dsc_pipe_build(name, &shape, rank, MAX_ACTIONS - begins[rank], computed + begins[rank], &n) == DSC_OK);
        begins[rank + 1] = begins[rank] + n;
    }
    for (int32_t stage = 0; stage < shape.n_ranks * shape.n_virtual; stage++)
        REQUIRE(dsc_pipe_rank_of(name, &shape, stage, &rank_of[stage]) == DSC_OK);

    struct dsc_pipe_table table = {computed, begins, rank_of, shape.n_ranks, shape.n_ranks * shape.n_virtual,
                                   shape.n_micro_batches, traits.has_backward, NULL, 0, -1};

    REQUIRE(dsc_pipe_add_comm(&table, MAX_ACTIONS, complete, all_begins) == DSC_OK);
    table.actions = complete;
    table.begins = all_begins;
    REQUIRE(dsc_pipe_verify(&table) == DSC_OK);
    check_times(&table, &input);
    if (take_byte(&input) % 2 == 0)
        check_gathers(&table, &input);

    /* Two actions of the whole table change places: a table that is still accepted can be run. */
    int64_t n = all_begins[shape.n_ranks];
    int64_t i = take_below(&input, n);
    int64_t j = take_below(&input, n);
    struct dsc_pipe_action action = complete[i];

    complete[i] = complete[j];
    complete[j] = action;
    if (dsc_pipe_verify(&table) == DSC_OK)
        check_times(&table, &input);
    return 0;
}
