/* Simulates a table: each action begins when its rank is free and its inputs have arrived. */
#include "base/fail.h"
#include "pipe/pipe.h"

#include <stdlib.h>

/* The two kinds of results that other actions wait for, by stage and micro-batch: outputs, and gradients of inputs. */
enum { OUTPUT, GRADIENT, N_RESULTS };

#define NOT_YET (-1)

struct run {
    const struct dsc_pipe_table *table;
    const struct dsc_pipe_cost *costs;
    int64_t transfer_ns;
    int64_t *ends[N_RESULTS];    /* n_stages * n_micro_batches each: time of the result, or NOT_YET */
    int32_t *waiters[N_RESULTS]; /* the rank that waits for it, or NOT_YET */
    int64_t *next;               /* n_ranks: index of the next action */
    int64_t *now;                /* n_ranks */
    int64_t *held;               /* n_ranks: bytes */
    int32_t *live;               /* n_ranks: forwards */
    int64_t *gathered;           /* n_ranks: the end of the last gather */
    int64_t *whole;              /* n_stages: the end of the last gather of one of its units */
    int64_t *elements;           /* n_ranks: of live units */
    int32_t *ready;              /* n_ranks: a stack of ranks that may go on */
    int32_t n_ready;
};

static int64_t place(const struct run *run, int32_t stage, int32_t micro_batch)
{
    return (int64_t)stage * run->table->n_micro_batches + micro_batch;
}

static dsc_status open_run(struct run *run)
{
    size_t n = (size_t)run->table->n_stages * (size_t)run->table->n_micro_batches;
    size_t n_ranks = (size_t)run->table->n_ranks;

    for (int i = 0; i < N_RESULTS; i++) {
        run->ends[i] = malloc(n * sizeof *run->ends[i]);
        run->waiters[i] = malloc(n * sizeof *run->waiters[i]);
    }
    run->next = malloc(n_ranks * sizeof *run->next);
    run->now = calloc(n_ranks, sizeof *run->now);
    run->held = calloc(n_ranks, sizeof *run->held);
    run->live = calloc(n_ranks, sizeof *run->live);
    run->gathered = calloc(n_ranks, sizeof *run->gathered);
    run->whole = calloc((size_t)run->table->n_stages, sizeof *run->whole);
    run->elements = calloc(n_ranks, sizeof *run->elements);
    run->ready = malloc(n_ranks * sizeof *run->ready);
    for (int i = 0; i < N_RESULTS; i++)
        if (run->ends[i] == NULL || run->waiters[i] == NULL)
            return dsc_fail(DSC_ENOMEM, "no memory for %lld results", (long long)n);
    if (run->next == NULL || run->now == NULL || run->held == NULL || run->live == NULL || run->gathered == NULL ||
        run->whole == NULL || run->elements == NULL || run->ready == NULL)
        return dsc_fail(DSC_ENOMEM, "no memory for %d ranks", (int)n_ranks);
    for (int i = 0; i < N_RESULTS; i++)
        for (size_t j = 0; j < n; j++) {
            run->ends[i][j] = NOT_YET;
            run->waiters[i][j] = NOT_YET;
        }
    for (int32_t rank = run->table->n_ranks - 1; rank >= 0; rank--) {
        run->next[rank] = run->table->begins[rank];
        run->ready[run->n_ready++] = rank;
    }
    return DSC_OK;
}

static void close_run(struct run *run)
{
    for (int i = 0; i < N_RESULTS; i++) {
        free(run->ends[i]);
        free(run->waiters[i]);
    }
    free(run->next);
    free(run->now);
    free(run->held);
    free(run->live);
    free(run->gathered);
    free(run->whole);
    free(run->elements);
    free(run->ready);
}

/*
 * Raises *out_ns to the moment when a result of stage is at rank. False if the result does not exist yet; the rank is
 * then woken when it does.
 */
static bool needs(struct run *run, int32_t rank, int result, int32_t stage, int32_t micro_batch, int64_t *out_ns)
{
    int64_t i = place(run, stage, micro_batch);
    int64_t end = run->ends[result][i];

    if (end == NOT_YET) {
        run->waiters[result][i] = rank;
        return false;
    }
    end += run->table->rank_of[stage] == rank ? 0 : run->transfer_ns;
    if (end > *out_ns)
        *out_ns = end;
    return true;
}

static bool may_begin(struct run *run, int32_t rank, const struct dsc_pipe_action *action, int64_t *out_ns)
{
    int32_t stage = action->stage;
    int32_t k = action->micro_batch;

    switch (action->kind) {
    case DSC_PIPE_FORWARD:
        return stage == 0 || needs(run, rank, OUTPUT, stage - 1, k, out_ns);
    case DSC_PIPE_BACKWARD:
    case DSC_PIPE_INPUT:
        return needs(run, rank, OUTPUT, stage, k, out_ns) &&
               (stage + 1 == run->table->n_stages || needs(run, rank, GRADIENT, stage + 1, k, out_ns));
    case DSC_PIPE_WEIGHT:
        return needs(run, rank, GRADIENT, stage, k, out_ns);
    default:
        return true;
    }
}

static void finish(struct run *run, int32_t rank, const struct dsc_pipe_action *action, int64_t end_ns,
                   struct dsc_pipe_usage *usage)
{
    const struct dsc_pipe_cost *cost = &run->costs[action->stage];
    int result = action->kind == DSC_PIPE_FORWARD ? OUTPUT : GRADIENT;

    switch (action->kind) {
    case DSC_PIPE_FORWARD:
        run->held[rank] += cost->kept_bytes;
        run->live[rank]++;
        break;
    case DSC_PIPE_BACKWARD:
        run->held[rank] -= cost->kept_bytes;
        run->live[rank]--;
        break;
    case DSC_PIPE_INPUT:
        run->held[rank] += cost->weight_bytes - cost->kept_bytes;
        break;
    case DSC_PIPE_WEIGHT:
        run->held[rank] -= cost->weight_bytes;
        run->live[rank]--;
        break;
    default:
        return;
    }
    if (run->held[rank] > usage->peak_bytes)
        usage->peak_bytes = run->held[rank];
    if (run->live[rank] > usage->peak_live)
        usage->peak_live = run->live[rank];
    if (action->kind == DSC_PIPE_WEIGHT)
        return;

    int64_t i = place(run, action->stage, action->micro_batch);

    run->ends[result][i] = end_ns;
    if (run->waiters[result][i] != NOT_YET)
        run->ready[run->n_ready++] = run->waiters[result][i];
    run->waiters[result][i] = NOT_YET;
}

static int64_t duration(const struct dsc_pipe_cost *cost, int32_t kind)
{
    switch (kind) {
    case DSC_PIPE_FORWARD:
        return cost->forward_ns;
    case DSC_PIPE_BACKWARD:
        return cost->input_ns + cost->weight_ns;
    case DSC_PIPE_INPUT:
        return cost->input_ns;
    case DSC_PIPE_WEIGHT:
        return cost->weight_ns;
    default:
        return 0;
    }
}

/*
 * Gathers or releases a unit. A gather runs beside the rank, after its earlier gathers. A release waits for nothing,
 * since a computation has used the unit: dsc_pipe_check_gathers refuses any other.
 */
static struct dsc_pipe_span act_on_unit(struct run *run, int32_t rank, const struct dsc_pipe_action *action,
                                        struct dsc_pipe_usage *usage)
{
    const struct dsc_pipe_table *table = run->table;
    const struct dsc_pipe_unit *unit = &table->units[pipe_first_unit(table, action->stage) + action->micro_batch];
    int64_t now = run->now[rank];

    if (action->kind == DSC_PIPE_RELEASE) {
        run->elements[rank] -= unit->numel;
        return (struct dsc_pipe_span){now, now};
    }

    int64_t begin_ns = now > run->gathered[rank] ? now : run->gathered[rank];

    run->gathered[rank] = begin_ns + unit->gather_ns;
    run->whole[action->stage] = run->gathered[rank];
    run->elements[rank] += unit->numel;
    if (run->elements[rank] > usage->peak_live_elements)
        usage->peak_live_elements = run->elements[rank];
    usage->n_gathers++;
    usage->gathered_elements += unit->numel;
    usage->link_ns += unit->gather_ns;
    return (struct dsc_pipe_span){begin_ns, run->gathered[rank]};
}

static dsc_status run_all(struct run *run, struct dsc_pipe_span *out_spans, struct dsc_pipe_usage *out_usage)
{
    const struct dsc_pipe_table *table = run->table;
    int64_t n_done = 0;

    while (run->n_ready > 0) {
        int32_t rank = run->ready[--run->n_ready];

        for (; run->next[rank] < table->begins[rank + 1]; run->next[rank]++, n_done++) {
            const struct dsc_pipe_action *action = &table->actions[run->next[rank]];
            int64_t begin_ns = run->now[rank];

            if (pipe_has_unit(action->kind)) {
                struct dsc_pipe_span span = act_on_unit(run, rank, action, &out_usage[rank]);

                if (out_spans != NULL)
                    out_spans[run->next[rank]] = span;
                continue;
            }
            if (pipe_computes(action->kind) && run->whole[action->stage] > begin_ns)
                begin_ns = run->whole[action->stage];
            if (!may_begin(run, rank, action, &begin_ns))
                break;

            int64_t ns = duration(&run->costs[action->stage], action->kind);

            run->now[rank] = begin_ns + ns;
            out_usage[rank].busy_ns += ns;
            if (out_spans != NULL)
                out_spans[run->next[rank]] = (struct dsc_pipe_span){begin_ns, run->now[rank]};
            finish(run, rank, action, run->now[rank], &out_usage[rank]);
        }
    }
    if (n_done == table->begins[table->n_ranks])
        return DSC_OK;
    for (int32_t rank = 0; rank < table->n_ranks; rank++)
        if (run->next[rank] < table->begins[rank + 1]) {
            char text[40] = "";

            dsc_pipe_format(&table->actions[run->next[rank]], sizeof text, text);
            return dsc_fail(DSC_EINVAL, "rank %d waits for ever at %s, action %lld of its list", (int)rank, text,
                            (long long)(run->next[rank] - table->begins[rank]));
        }
    return DSC_OK;
}

static dsc_status check_costs(const struct dsc_pipe_table *table, const struct dsc_pipe_cost *costs,
                              int64_t transfer_ns)
{
    /* An action adds at most two costs and a transfer to any sum. */
    int64_t most = INT64_MAX / (4 * (table->begins[table->n_ranks] + 1));

    if (costs == NULL)
        return dsc_fail(DSC_EINVAL, "costs is NULL");
    for (int32_t stage = -1; stage < table->n_stages; stage++) {
        const struct dsc_pipe_cost *cost = stage < 0 ? NULL : &costs[stage];
        int64_t numbers[5] = {transfer_ns, 0, 0, 0, 0};

        if (cost != NULL) {
            numbers[0] = cost->forward_ns;
            numbers[1] = cost->input_ns;
            numbers[2] = cost->weight_ns;
            numbers[3] = cost->kept_bytes;
            numbers[4] = cost->weight_bytes;
        }
        for (int i = 0; i < 5; i++) {
            if (numbers[i] < 0)
                return dsc_fail(DSC_EINVAL, "%s of stage %d is %lld, must be at least 0",
                                stage < 0 ? "transfer_ns" : "a cost", (int)stage, (long long)numbers[i]);
            if (numbers[i] > most)
                return dsc_fail(DSC_EOVERFLOW, "%s of stage %d is %lld, the most is %lld",
                                stage < 0 ? "transfer_ns" : "a cost", (int)stage, (long long)numbers[i],
                                (long long)most);
        }
    }
    for (int32_t i = 0; i < table->n_units; i++)
        if (table->units[i].numel > most || table->units[i].gather_ns > most)
            return dsc_fail(DSC_EOVERFLOW, "unit %d of stage %d has %lld elements and takes %lld ns, the most is %lld",
                            (int)(i - pipe_first_unit(table, table->units[i].stage)), (int)table->units[i].stage,
                            (long long)table->units[i].numel, (long long)table->units[i].gather_ns, (long long)most);
    return DSC_OK;
}

dsc_status dsc_pipe_simulate(const struct dsc_pipe_table *table, const struct dsc_pipe_cost *costs, int64_t transfer_ns,
                             struct dsc_pipe_span *out_spans, struct dsc_pipe_usage *out_usage,
                             int64_t *out_makespan_ns)
{
    if (out_usage == NULL || out_makespan_ns == NULL)
        return dsc_fail(DSC_EINVAL, "out_usage or out_makespan_ns is NULL");
    DSC_TRY(dsc_pipe_check_table(table));
    DSC_TRY(check_costs(table, costs, transfer_ns));
    DSC_TRY(dsc_pipe_check_gathers(table));

    struct run run = {.table = table, .costs = costs, .transfer_ns = transfer_ns};
    size_t n_ranks = (size_t)table->n_ranks;
    size_t n_actions = (size_t)table->begins[n_ranks];
    struct dsc_pipe_usage *usage = calloc(n_ranks, sizeof *usage);
    struct dsc_pipe_span *spans = out_spans == NULL ? NULL : calloc(n_actions + 1, sizeof *spans);
    dsc_status status = DSC_OK;

    if (usage == NULL || (out_spans != NULL && spans == NULL))
        status = dsc_fail(DSC_ENOMEM, "no memory for the times of %lld actions", (long long)n_actions);
    if (status == DSC_OK)
        status = open_run(&run);
    if (status == DSC_OK)
        status = run_all(&run, spans, usage);
    if (status == DSC_OK) {
        int64_t makespan_ns = 0;

        for (size_t rank = 0; rank < n_ranks; rank++) {
            out_usage[rank] = usage[rank];
            if (run.now[rank] > makespan_ns)
                makespan_ns = run.now[rank];
        }
        for (size_t i = 0; spans != NULL && i < n_actions; i++)
            out_spans[i] = spans[i];
        *out_makespan_ns = makespan_ns;
    }
    close_run(&run);
    free(usage);
    free(spans);
    return status;
}
