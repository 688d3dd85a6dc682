/* Adds sends and receives to a table that has none. */
#include "base/fail.h"
#include "pipe/pipe.h"

#include <stdlib.h>

/* An action's key in the order of all actions: the end of its turn, then its rank, then its place in the list. */
struct turn {
    int64_t end;
    int64_t index;
    int32_t rank;
};

static int compare(const void *a, const void *b)
{
    const struct turn *left = a;
    const struct turn *right = b;

    if (left->end != right->end)
        return left->end < right->end ? -1 : 1;
    if (left->rank != right->rank)
        return left->rank < right->rank ? -1 : 1;
    return left->index < right->index ? -1 : 1;
}

/*
 * Orders all actions by a simulation with turns of equal length. Messages need some common order; real times do not
 * matter for it.
 */
static dsc_status order(const struct dsc_pipe_table *table, struct turn *turns)
{
    size_t n_actions = (size_t)table->begins[table->n_ranks];
    struct dsc_pipe_cost *costs = calloc((size_t)table->n_stages, sizeof *costs);
    struct dsc_pipe_span *spans = calloc(n_actions + 1, sizeof *spans);
    struct dsc_pipe_usage *usage = calloc((size_t)table->n_ranks, sizeof *usage);
    int64_t makespan;
    struct dsc_pipe_table whole = *table;
    dsc_status status = DSC_OK;

    whole.n_units = 0; /* gathers come later */
    if (costs == NULL || spans == NULL || usage == NULL)
        status = dsc_fail(DSC_ENOMEM, "no memory for %lld actions", (long long)n_actions);
    for (int32_t stage = 0; status == DSC_OK && stage < table->n_stages; stage++)
        costs[stage] = (struct dsc_pipe_cost){.forward_ns = 1, .input_ns = 1, .weight_ns = 1};
    if (status == DSC_OK)
        status = dsc_pipe_simulate(&whole, costs, 0, spans, usage, &makespan);
    for (int32_t rank = 0; status == DSC_OK && rank < table->n_ranks; rank++)
        for (int64_t i = table->begins[rank]; i < table->begins[rank + 1]; i++)
            turns[i] = (struct turn){spans[i].end_ns, i, rank};
    if (status == DSC_OK)
        qsort(turns, n_actions, sizeof *turns, compare);
    free(costs);
    free(spans);
    free(usage);
    return status;
}

dsc_status dsc_pipe_add_comm(const struct dsc_pipe_table *table, int64_t capacity, struct dsc_pipe_action *out_actions,
                             int64_t *out_begins)
{
    if (out_begins == NULL || capacity < 0)
        return dsc_fail(DSC_EINVAL, "out_begins is NULL, or capacity is %lld", (long long)capacity);
    DSC_TRY(dsc_pipe_check_table(table));

    int64_t n_actions = table->begins[table->n_ranks];
    int64_t *ends =
        calloc((size_t)table->n_ranks + 1, sizeof *ends); /* entry r + 1 is for rank r: its count, later its cursor */
    struct turn *turns = calloc((size_t)n_actions + 1, sizeof *turns);
    dsc_status status = DSC_OK;

    if (ends == NULL || turns == NULL)
        status = dsc_fail(DSC_ENOMEM, "no memory for %lld actions", (long long)n_actions);
    for (int32_t rank = 0; status == DSC_OK && rank < table->n_ranks; rank++)
        for (int64_t i = table->begins[rank]; i < table->begins[rank + 1]; i++) {
            int32_t next = pipe_next_stage(table, &table->actions[i]);

            if (!pipe_computes(table->actions[i].kind)) {
                status =
                    dsc_fail(DSC_EINVAL, "the table has sends, receives, gathers or releases: action %lld of rank %d",
                             (long long)(i - table->begins[rank]), (int)rank);
                break;
            }
            ends[rank + 1]++;
            if (next >= 0 && table->rank_of[next] != rank) {
                ends[rank + 1]++;
                ends[table->rank_of[next] + 1]++;
            }
        }
    if (status == DSC_OK)
        status = order(table, turns);
    for (int32_t rank = 0; status == DSC_OK && rank < table->n_ranks; rank++)
        ends[rank + 1] += ends[rank];
    if (status == DSC_OK && out_actions != NULL && ends[table->n_ranks] > capacity)
        status =
            dsc_fail(DSC_ENOSPC, "room for %lld actions of %lld", (long long)capacity, (long long)ends[table->n_ranks]);
    if (status == DSC_OK) {
        for (int32_t rank = 0; rank <= table->n_ranks; rank++)
            out_begins[rank] = ends[rank];
        for (int64_t i = 0; out_actions != NULL && i < n_actions; i++) {
            struct dsc_pipe_action action = table->actions[turns[i].index];
            int32_t rank = turns[i].rank;
            int32_t next = pipe_next_stage(table, &action);
            bool is_output = action.kind == DSC_PIPE_FORWARD;

            out_actions[ends[rank]++] = action;
            if (next < 0 || table->rank_of[next] == rank)
                continue;
            action.kind = is_output ? DSC_PIPE_SEND_F : DSC_PIPE_SEND_B;
            out_actions[ends[rank]++] = action;
            action.kind = is_output ? DSC_PIPE_RECV_F : DSC_PIPE_RECV_B;
            action.stage = next;
            out_actions[ends[table->rank_of[next]]++] = action;
        }
    }
    free(ends);
    free(turns);
    return status;
}
