/* Runs the programs of all ranks from event to event. */
#include "base/fail.h"
#include "plan/simulate.h"

#include <stdio.h>
#include <stdlib.h>

#define NONE (-1)

/* Kinds of events. Their `what` is a rank, a rank's lane, a flow, a flow. */
enum { RANK_GOES_ON, WORK_ENDS, FLOW_JOINS, FLOW_ENDS };

struct rank_state {
    int64_t next;            /* index in step->actions */
    int64_t since_ns;        /* of the wait */
    int64_t pull_ns;         /* when its pull began, or NONE */
    int64_t shown_actions;   /* where its spans begin, or NONE */
    int64_t shown_transfers; /* where its spans begin, or NONE */
    int32_t waits_for;       /* a transfer, or NONE */
};

/* Transfers of a lane begin in the order of START; `head` of them are over, and the next may be under way. */
struct lane_state {
    int64_t since_ns; /* when its head came there */
    int32_t head;
    int32_t n_started;
    bool is_busy; /* its head is under way, or the lane is among those to go on */
    bool is_under_way;
};

/* A transfer of a group. */
struct instance {
    int64_t begin_ns;
    int64_t end_ns;  /* NONE: it is not over */
    int32_t n_ready; /* ranks that have it at the head of a lane, or that have started a pull */
};

struct run {
    struct plan_index index;
    struct plan_router router;
    struct plan_sharing sharing;
    struct plan_heap heap;
    struct rank_state *ranks;
    struct lane_state *lanes; /* n_ranks * n_lanes */
    struct instance *instances;
    bool *is_over;                  /* transfers of all ranks */
    int64_t *exposed_ns;            /* transfers of all ranks */
    int64_t *carried;               /* bytes on each resource */
    struct plan_load *single_loads; /* one stream on each resource */
    struct dsc_plan_usage *usage;
    struct dsc_plan_span *actions;   /* of shown ranks */
    struct dsc_plan_span *transfers; /* of shown ranks */
    int64_t n_shown_actions;
    int64_t n_shown_transfers;
    int32_t *ready; /* a stack of ranks that may go on */
    int64_t *open;  /* a stack of lanes whose next transfer may begin */
    int64_t n_open;
    int64_t now_ns;
    int64_t makespan_ns;
    int32_t n_ready;
    int32_t n_ended; /* programs */
};

/* Flows of groups are owned by instances (counted from 0), others by lanes (counted down from -1). */
static int64_t owner_of_lane(int64_t lane)
{
    return -1 - lane;
}

static dsc_status open_spans(struct run *run)
{
    const struct dsc_plan_step *step = run->index.step;

    for (int32_t i = 0; i < step->n_ranks; i++)
        run->ranks[i].shown_actions = run->ranks[i].shown_transfers = NONE;
    for (int32_t i = 0; i < step->n_shown; i++) {
        struct rank_state *rank = &run->ranks[step->shown[i]];
        int32_t program = step->ranks[step->shown[i]].program;

        if (rank->shown_actions != NONE)
            return dsc_fail(DSC_EINVAL, "rank %d is shown twice", (int)step->shown[i]);
        rank->shown_actions = run->n_shown_actions;
        rank->shown_transfers = run->n_shown_transfers;
        run->n_shown_actions += step->action_begins[program + 1] - step->action_begins[program];
        run->n_shown_transfers += step->transfer_begins[program + 1] - step->transfer_begins[program];
    }
    run->actions = calloc((size_t)run->n_shown_actions + 1, sizeof *run->actions);
    run->transfers = calloc((size_t)run->n_shown_transfers + 1, sizeof *run->transfers);
    if (run->actions == NULL || run->transfers == NULL)
        return dsc_fail(DSC_ENOMEM, "no memory for %lld spans",
                        (long long)(run->n_shown_actions + run->n_shown_transfers));
    for (int64_t i = 0; i < run->n_shown_transfers; i++)
        run->transfers[i] = (struct dsc_plan_span){NONE, NONE};
    return DSC_OK;
}

static dsc_status open_run(struct run *run, const struct dsc_plan_step *step)
{
    DSC_TRY(dsc_plan_make_index(step, &run->index));

    size_t n_ranks = (size_t)step->n_ranks;
    size_t n_lanes = n_ranks * (size_t)step->n_lanes;
    size_t n_transfers = (size_t)run->index.first_transfer[step->n_ranks];
    int32_t n_resources = plan_n_resources(step);

    run->ranks = calloc(n_ranks, sizeof *run->ranks);
    run->lanes = calloc(n_lanes, sizeof *run->lanes);
    run->instances = calloc((size_t)run->index.n_instances + 1, sizeof *run->instances);
    run->is_over = calloc(n_transfers + 1, sizeof *run->is_over);
    run->exposed_ns = calloc(n_transfers + 1, sizeof *run->exposed_ns);
    run->carried = calloc((size_t)n_resources, sizeof *run->carried);
    run->single_loads = calloc((size_t)n_resources, sizeof *run->single_loads);
    run->usage = calloc(n_ranks, sizeof *run->usage);
    run->ready = calloc(n_ranks, sizeof *run->ready);
    run->open = calloc(n_lanes, sizeof *run->open);
    if (run->ranks == NULL || run->lanes == NULL || run->instances == NULL || run->is_over == NULL ||
        run->exposed_ns == NULL || run->carried == NULL || run->single_loads == NULL || run->usage == NULL ||
        run->ready == NULL || run->open == NULL)
        return dsc_fail(DSC_ENOMEM, "no memory for %zu transfers of %zu ranks", n_transfers, n_ranks);
    DSC_TRY(open_spans(run));
    DSC_TRY(dsc_plan_open_router(&run->index, &run->router));
    DSC_TRY(dsc_plan_open_sharing(run->index.capacities, n_resources, &run->sharing));
    for (int32_t i = 0; i < n_resources; i++)
        run->single_loads[i] = (struct plan_load){PLAN_STREAM, i};
    for (int64_t i = 0; i < run->index.n_instances; i++)
        run->instances[i].end_ns = NONE;
    for (int32_t i = step->n_ranks - 1; i >= 0; i--) {
        run->ranks[i].next = step->action_begins[step->ranks[i].program];
        run->ranks[i].waits_for = NONE;
        run->ranks[i].pull_ns = NONE;
        run->ready[run->n_ready++] = i;
    }
    return DSC_OK;
}

static void close_run(struct run *run)
{
    dsc_plan_close_sharing(&run->sharing);
    dsc_plan_close_router(&run->router);
    dsc_plan_clear_index(&run->index);
    free(run->heap.events);
    free(run->ranks);
    free(run->lanes);
    free(run->instances);
    free(run->is_over);
    free(run->exposed_ns);
    free(run->carried);
    free(run->single_loads);
    free(run->usage);
    free(run->actions);
    free(run->transfers);
    free(run->ready);
    free(run->open);
}

static dsc_status push(struct run *run, __int128 after_ns, int32_t kind, int64_t what, int32_t version)
{
    if (run->now_ns + after_ns > DSC_PLAN_MAX_NS)
        return dsc_fail(DSC_EOVERFLOW, "the step takes more than %lld ns", (long long)DSC_PLAN_MAX_NS);
    return dsc_plan_push_event(&run->heap, (struct plan_event){run->now_ns + (int64_t)after_ns, what, kind, version});
}

static __int128 ceil_div(__int128 a, __int128 b)
{
    return (a + b - 1) / b;
}

/* The place of a rank's transfer in lists of the transfers of all ranks. */
static int64_t place(const struct run *run, int32_t rank, int32_t transfer)
{
    return run->index.first_transfer[rank] + transfer;
}

static struct plan_group *group_of(struct run *run, int32_t rank, const struct dsc_plan_transfer *transfer)
{
    const struct dsc_plan_step *step = run->index.step;

    return &run->index.groups[step->group_of[(int64_t)rank * step->n_axes + transfer->axis]];
}

/* The k of a transfer: the k-th of its axis on all ranks of the group. */
static int32_t number_of(const struct run *run, int32_t rank, int32_t transfer)
{
    const struct dsc_plan_step *step = run->index.step;

    return run->index.numbers[step->transfer_begins[step->ranks[rank].program] + transfer];
}

static struct lane_state *lane_of(struct run *run, int32_t rank, const struct dsc_plan_transfer *transfer)
{
    return &run->lanes[(int64_t)rank * run->index.step->n_lanes + transfer->lane];
}

/* The transfer at the head of a lane, which has started. */
static int32_t head_of(const struct run *run, int64_t lane)
{
    const struct dsc_plan_step *step = run->index.step;
    int64_t rank = lane / step->n_lanes;
    int64_t row = (int64_t)step->ranks[rank].program * step->n_lanes + lane % step->n_lanes;

    return run->index.by_lane[run->index.lane_begins[row] + run->lanes[lane].head];
}

static void show_transfer(struct run *run, int32_t rank, int32_t transfer, int64_t begin_ns)
{
    if (run->ranks[rank].shown_transfers != NONE)
        run->transfers[run->ranks[rank].shown_transfers + transfer] = (struct dsc_plan_span){begin_ns, run->now_ns};
}

/* Ends the rank's present action. */
static void end_action(struct run *run, int32_t rank, int64_t begin_ns, int64_t end_ns)
{
    struct rank_state *state = &run->ranks[rank];
    int64_t begin = run->index.step->action_begins[run->index.step->ranks[rank].program];

    if (state->shown_actions != NONE)
        run->actions[state->shown_actions + state->next - begin] = (struct dsc_plan_span){begin_ns, end_ns};
    state->next++;
}

static void end_wait(struct run *run, int32_t rank)
{
    struct rank_state *state = &run->ranks[rank];
    int64_t ns = run->now_ns - state->since_ns;

    run->exposed_ns[place(run, rank, state->waits_for)] += ns;
    run->usage[rank].waited_ns += ns;
    state->waits_for = NONE;
    end_action(run, rank, state->since_ns, run->now_ns);
    run->ready[run->n_ready++] = rank;
}

/* Ends the transfer at the head of a lane. */
static void end_head(struct run *run, int64_t lane, int64_t begin_ns)
{
    int32_t rank = (int32_t)(lane / run->index.step->n_lanes);
    int32_t transfer = head_of(run, lane);

    run->is_over[place(run, rank, transfer)] = true;
    run->makespan_ns = run->now_ns;
    show_transfer(run, rank, transfer, begin_ns);
    run->lanes[lane].head++;
    run->lanes[lane].is_under_way = false;
    run->open[run->n_open++] = lane;
    if (run->ranks[rank].waits_for == transfer)
        end_wait(run, rank);
}

static dsc_status add_carried(struct run *run, const struct plan_load *loads, int32_t n_loads, int64_t n_bytes)
{
    for (int32_t i = 0; i < n_loads; i++) {
        int64_t *carried = &run->carried[loads[i].resource];
        __int128 total = *carried + ceil_div((__int128)n_bytes * loads[i].parts, PLAN_STREAM);

        if (total > INT64_MAX)
            return dsc_fail(DSC_EOVERFLOW, "a link carries more than %lld bytes", (long long)INT64_MAX);
        *carried = (int64_t)total;
    }
    return DSC_OK;
}

/* The group and the k of an instance. */
static struct plan_group *find_group(struct run *run, int64_t instance, int32_t *out_k)
{
    int32_t low = 0;
    int32_t high = run->index.step->n_groups;

    while (high - low > 1) {
        int32_t middle = low + (high - low) / 2;

        if (run->index.groups[middle].first_instance <= instance)
            low = middle;
        else
            high = middle;
    }
    *out_k = (int32_t)(instance - run->index.groups[low].first_instance);
    return &run->index.groups[low];
}

static void end_instance(struct run *run, int64_t number)
{
    struct instance *instance = &run->instances[number];
    int32_t k;
    struct plan_group *group = find_group(run, number, &k);

    instance->end_ns = run->now_ns;
    run->makespan_ns = run->now_ns;
    for (int32_t i = 0; i < group->n; i++) {
        int32_t rank = group->members[i];
        int32_t transfer = plan_kth(&run->index, rank, group->axis, k);
        int64_t lane = (int64_t)rank * run->index.step->n_lanes + plan_transfer(run->index.step, rank, transfer)->lane;

        /* The receiver of a message may not have it at the head yet. */
        if (run->lanes[lane].is_under_way && head_of(run, lane) == transfer)
            end_head(run, lane, instance->begin_ns);
    }
}

/* The next flow of a group's transfer, or its end. */
static dsc_status go_on_with_flow(struct run *run, int32_t number)
{
    struct plan_flow *flow = &run->sharing.flows[number];
    const struct plan_route *route;
    struct plan_phase phase;

    if (flow->owner < 0) {
        dsc_plan_drop_flow(&run->sharing, number);
        end_head(run, -1 - flow->owner, run->lanes[-1 - flow->owner].since_ns);
        return DSC_OK;
    }

    int32_t k;
    struct plan_group *group = find_group(run, flow->owner, &k);
    int32_t rank = group->members[0];
    const struct dsc_plan_transfer *transfer =
        plan_transfer(run->index.step, rank, plan_kth(&run->index, rank, group->axis, k));

    if (!dsc_plan_phase_of(group, transfer, flow->phase, &phase)) {
        dsc_plan_drop_flow(&run->sharing, number);
        end_instance(run, flow->owner);
        return DSC_OK;
    }
    DSC_TRY(dsc_plan_route(&run->router, group, phase.shape, &route));
    DSC_TRY(add_carried(run, route->loads, route->n_loads, phase.n_bytes));
    flow->phase++;
    flow->loads = route->loads;
    flow->n_loads = route->n_limited;
    flow->work = phase.n_bytes * PLAN_WORK_OF_A_BYTE;
    return push(run, (__int128)phase.n_steps * route->step_ns, FLOW_JOINS, number, 0);
}

static dsc_status begin_instance(struct run *run, int64_t instance)
{
    int32_t flow;

    run->instances[instance].begin_ns = run->now_ns;
    DSC_TRY(dsc_plan_take_flow(&run->sharing, &flow));
    run->sharing.flows[flow].owner = instance;
    run->sharing.flows[flow].phase = 0;
    return go_on_with_flow(run, flow);
}

/* A flow over one resource. */
static dsc_status begin_single(struct run *run, int64_t lane, int32_t resource, int64_t n_bytes, int64_t latency_ns)
{
    int32_t number;

    DSC_TRY(add_carried(run, &run->single_loads[resource], 1, n_bytes));
    DSC_TRY(dsc_plan_take_flow(&run->sharing, &number));

    struct plan_flow *flow = &run->sharing.flows[number];

    flow->owner = owner_of_lane(lane);
    flow->loads = &run->single_loads[resource];
    flow->n_loads = run->index.capacities[resource] > 0;
    flow->work = n_bytes * PLAN_WORK_OF_A_BYTE;
    return push(run, latency_ns, FLOW_JOINS, number, 0);
}

static dsc_status join(struct run *run, int32_t number)
{
    const struct plan_flow *flow = &run->sharing.flows[number];

    if (flow->work == 0 || flow->n_loads == 0)
        return go_on_with_flow(run, number);
    return dsc_plan_join(&run->sharing, number, flow->loads, flow->n_loads, flow->work, run->now_ns);
}

/* Begins the head of a lane as far as this rank is concerned. */
static dsc_status begin_in_group(struct run *run, int64_t lane, int32_t rank, int32_t number)
{
    const struct dsc_plan_transfer *transfer = plan_transfer(run->index.step, rank, number);
    struct plan_group *group = group_of(run, rank, transfer);
    int64_t i = group->first_instance + number_of(run, rank, number);
    struct instance *instance = &run->instances[i];
    bool is_message = transfer->op == DSC_PLAN_MESSAGE;

    instance->n_ready++;
    if (instance->end_ns != NONE)
        end_head(run, lane, instance->begin_ns);
    else if (is_message ? group->members[0] == rank : instance->n_ready == group->n)
        return begin_instance(run, i);
    return DSC_OK;
}

static dsc_status begin_head(struct run *run, int64_t lane)
{
    const struct dsc_plan_step *step = run->index.step;
    int32_t rank = (int32_t)(lane / step->n_lanes);
    int32_t number = head_of(run, lane);
    int32_t node = step->ranks[rank].node;
    const struct dsc_plan_transfer *transfer = plan_transfer(step, rank, number);

    run->lanes[lane].is_under_way = true;
    run->lanes[lane].since_ns = run->now_ns;
    switch (transfer->op) {
    case DSC_PLAN_WORK:
        return push(run, transfer->amount, WORK_ENDS, lane, 0);
    case DSC_PLAN_COPY:
        return begin_single(run, lane, plan_of_rank(rank, PLAN_COPIED), transfer->amount, 0);
    case DSC_PLAN_READ:
        node = run->index.read_nodes[node];
        return begin_single(run, lane, plan_of_node(step, node, PLAN_READ), transfer->amount,
                            step->nodes[node].file_latency_ns);
    case DSC_PLAN_WRITE:
        node = run->index.write_nodes[node];
        return begin_single(run, lane, plan_of_node(step, node, PLAN_WRITTEN), transfer->amount,
                            step->nodes[node].file_latency_ns);
    default:
        return begin_in_group(run, lane, rank, number);
    }
}

static dsc_status go_on_with_lane(struct run *run, int64_t lane)
{
    struct lane_state *state = &run->lanes[lane];

    state->is_busy = state->head < state->n_started;
    return state->is_busy ? begin_head(run, lane) : DSC_OK;
}

/* Bytes that a rank moves in a pull. */
static int64_t pulled_bytes(const struct plan_group *group, const struct dsc_plan_transfer *transfer, int32_t rank)
{
    switch (transfer->op) {
    case DSC_PLAN_BROADCAST:
    case DSC_PLAN_MESSAGE:
        return rank == group->members[0] ? 0 : transfer->amount;
    case DSC_PLAN_ALL_REDUCE:
        return dsc_plan_part(transfer->amount, 2 * ((int64_t)group->n - 1), group->n);
    default:
        return dsc_plan_part(transfer->amount, group->n - 1, group->n);
    }
}

/* All that a waiting rank needs for its pull is there. */
static dsc_status begin_pull(struct run *run, int32_t rank)
{
    const struct dsc_plan_step *step = run->index.step;
    struct rank_state *state = &run->ranks[rank];
    const struct dsc_plan_transfer *transfer = plan_transfer(step, rank, state->waits_for);
    const struct plan_group *group = group_of(run, rank, transfer);
    const struct dsc_plan_node *root = &step->nodes[group->root];
    bool is_sender = transfer->op == DSC_PLAN_BROADCAST || transfer->op == DSC_PLAN_MESSAGE;
    int64_t n_bytes = pulled_bytes(group, transfer, rank);
    __int128 ns = 0;

    state->pull_ns = run->now_ns;
    if (group->n > 1 && !(is_sender && rank == group->members[0])) {
        const struct plan_load load = {PLAN_STREAM, plan_of_node(step, group->root, PLAN_INNER)};

        ns = root->pull_latency_ns + ceil_div((__int128)n_bytes * 1000000000, root->pull_bytes_per_s);
        DSC_TRY(add_carried(run, &load, 1, n_bytes));
    }
    return push(run, ns, RANK_GOES_ON, rank, 0);
}

static bool may_pull(const struct plan_group *group, const struct dsc_plan_transfer *transfer,
                     const struct instance *instance)
{
    return instance->n_ready == (transfer->op == DSC_PLAN_MESSAGE ? 1 : group->n);
}

/* Counts a rank's start of a pull. The last start that a pull needs wakes the ranks that wait for it. */
static dsc_status start_pull(struct run *run, int32_t rank, int32_t number)
{
    const struct dsc_plan_transfer *transfer = plan_transfer(run->index.step, rank, number);
    struct plan_group *group = group_of(run, rank, transfer);
    int32_t k = number_of(run, rank, number);
    struct instance *instance = &run->instances[group->first_instance + k];

    if (transfer->op == DSC_PLAN_MESSAGE && rank != group->members[0])
        return DSC_OK;
    instance->n_ready++;
    if (!may_pull(group, transfer, instance))
        return DSC_OK;
    for (int32_t i = 0; i < group->n; i++) {
        int32_t other = group->members[i];

        if (run->ranks[other].waits_for != NONE &&
            run->ranks[other].waits_for == plan_kth(&run->index, other, group->axis, k))
            DSC_TRY(begin_pull(run, other));
    }
    return DSC_OK;
}

static dsc_status start(struct run *run, int32_t rank, int32_t number)
{
    const struct dsc_plan_transfer *transfer = plan_transfer(run->index.step, rank, number);
    struct lane_state *lane = lane_of(run, rank, transfer);

    if ((transfer->flags & DSC_PLAN_PULL) != 0)
        return start_pull(run, rank, number);
    lane->n_started++;
    if (!lane->is_busy) {
        lane->is_busy = true;
        run->open[run->n_open++] = lane - run->lanes;
    }
    return DSC_OK;
}

/* True: the rank goes on at once. */
static dsc_status wait_for(struct run *run, int32_t rank, int32_t number, bool *out_is_over)
{
    const struct dsc_plan_transfer *transfer = plan_transfer(run->index.step, rank, number);

    *out_is_over = run->is_over[place(run, rank, number)];
    if (*out_is_over)
        return DSC_OK;
    run->ranks[rank].waits_for = number;
    run->ranks[rank].since_ns = run->now_ns;
    if ((transfer->flags & DSC_PLAN_PULL) == 0)
        return DSC_OK;

    struct plan_group *group = group_of(run, rank, transfer);
    struct instance *instance = &run->instances[group->first_instance + number_of(run, rank, number)];

    return may_pull(group, transfer, instance) ? begin_pull(run, rank) : DSC_OK;
}

/* Runs a rank's actions until it has to wait. */
static dsc_status go_on_with_rank(struct run *run, int32_t rank)
{
    const struct dsc_plan_step *step = run->index.step;
    const struct dsc_plan_rank *place = &step->ranks[rank];
    struct rank_state *state = &run->ranks[rank];

    while (state->next < step->action_begins[place->program + 1]) {
        const struct dsc_plan_action *action = &step->actions[state->next];
        bool goes_on = true;
        int64_t ns = 0;

        if (action->kind == DSC_PLAN_RUN) {
            ns = (int64_t)ceil_div((__int128)action->amount * place->slow_ppm, 1000000);
            goes_on = ns == 0;
            run->usage[rank].busy_ns += ns;
            if (!goes_on)
                DSC_TRY(push(run, ns, RANK_GOES_ON, rank, 0));
        } else if (action->kind == DSC_PLAN_START) {
            DSC_TRY(start(run, rank, (int32_t)action->amount));
        } else {
            DSC_TRY(wait_for(run, rank, (int32_t)action->amount, &goes_on));
            if (!goes_on)
                return DSC_OK;
        }
        end_action(run, rank, run->now_ns, run->now_ns + ns);
        if (!goes_on)
            return DSC_OK;
    }
    run->n_ended++;
    run->usage[rank].end_ns = run->now_ns;
    run->makespan_ns = run->now_ns;
    return DSC_OK;
}

static dsc_status on_event(struct run *run, const struct plan_event *event)
{
    int32_t number = (int32_t)event->what;

    switch (event->kind) {
    case RANK_GOES_ON:
        if (run->ranks[number].waits_for == NONE) {
            run->ready[run->n_ready++] = number;
            return DSC_OK;
        }
        run->is_over[place(run, number, run->ranks[number].waits_for)] = true;
        show_transfer(run, number, run->ranks[number].waits_for, run->ranks[number].pull_ns);
        end_wait(run, number);
        return DSC_OK;
    case WORK_ENDS:
        end_head(run, event->what, run->lanes[event->what].since_ns);
        return DSC_OK;
    case FLOW_JOINS:
        return join(run, number);
    default:
        if (run->sharing.flows[number].version != event->version)
            return DSC_OK;
        dsc_plan_leave(&run->sharing, number);
        return go_on_with_flow(run, number);
    }
}

/* Computes rates after all that happens at this ns, and when flows end at these rates. */
static dsc_status share(struct run *run)
{
    dsc_plan_share(&run->sharing, run->now_ns);
    for (int32_t i = 0; i < run->sharing.n_concerned; i++) {
        const struct plan_flow *flow = &run->sharing.flows[run->sharing.concerned[i]];

        DSC_TRY(push(run, ceil_div(flow->work, flow->rate), FLOW_ENDS, run->sharing.concerned[i], flow->version));
    }
    return DSC_OK;
}

static dsc_status run_all(struct run *run)
{
    for (;;) {
        while (run->n_ready > 0 || run->n_open > 0)
            if (run->n_open > 0)
                DSC_TRY(go_on_with_lane(run, run->open[--run->n_open]));
            else
                DSC_TRY(go_on_with_rank(run, run->ready[--run->n_ready]));
        if (run->heap.n == 0 || run->heap.events[0].ns > run->now_ns)
            DSC_TRY(share(run));
        if (run->heap.n == 0)
            return DSC_OK;

        struct plan_event event = dsc_plan_pop_event(&run->heap);

        run->now_ns = event.ns;
        DSC_TRY(on_event(run, &event));
    }
}

/* Why a transfer of a rank, which has started, is not over. */
static void explain(struct run *run, int32_t rank, int32_t number, size_t n_bytes, char *out)
{
    const struct dsc_plan_step *step = run->index.step;
    const struct dsc_plan_transfer *transfer = plan_transfer(step, rank, number);
    bool is_pull = (transfer->flags & DSC_PLAN_PULL) != 0;
    int64_t lane = (int64_t)rank * step->n_lanes + transfer->lane;

    if (!is_pull && head_of(run, lane) != number) {
        snprintf(out, n_bytes, "transfer %d is before it on lane %d", (int)head_of(run, lane), (int)transfer->lane);
        return;
    }

    struct plan_group *group = group_of(run, rank, transfer);

    for (int32_t i = 0; i < group->n; i++) {
        int32_t other = group->members[i];
        int32_t theirs = plan_kth(&run->index, other, group->axis, number_of(run, rank, number));
        int64_t their_lane = (int64_t)other * step->n_lanes + plan_transfer(step, other, theirs)->lane;
        const struct lane_state *state = &run->lanes[their_lane];
        bool has_started = false;

        for (int64_t j = step->action_begins[step->ranks[other].program]; j < run->ranks[other].next; j++)
            has_started |= step->actions[j].kind == DSC_PLAN_START && step->actions[j].amount == theirs;
        if (has_started && (is_pull || (state->is_under_way && head_of(run, their_lane) == theirs)))
            continue;
        snprintf(out, n_bytes,
                 has_started ? "rank %d has other transfers before it on its lane" : "rank %d has not started it",
                 (int)other);
        return;
    }
}

/* At the end of all events. */
static dsc_status check_end(struct run *run)
{
    const struct dsc_plan_step *step = run->index.step;
    char why[100] = "";

    for (int32_t rank = 0; rank < step->n_ranks && run->n_ended < step->n_ranks; rank++) {
        const struct rank_state *state = &run->ranks[rank];

        if (state->waits_for == NONE)
            continue;
        explain(run, rank, state->waits_for, sizeof why, why);
        return dsc_fail(DSC_EINVAL, "rank %d waits for ever at action %lld, for transfer %d (%s): %s", (int)rank,
                        (long long)(state->next - step->action_begins[step->ranks[rank].program]),
                        (int)state->waits_for, dsc_plan_op_name(plan_transfer(step, rank, state->waits_for)->op), why);
    }
    for (int64_t lane = 0; lane < (int64_t)step->n_ranks * step->n_lanes; lane++)
        if (run->lanes[lane].head < run->lanes[lane].n_started) {
            int32_t rank = (int32_t)(lane / step->n_lanes);
            int32_t transfer = head_of(run, lane);

            explain(run, rank, transfer, sizeof why, why);
            return dsc_fail(DSC_EINVAL, "transfer %d (%s) of rank %d never begins: %s", (int)transfer,
                            dsc_plan_op_name(plan_transfer(step, rank, transfer)->op), (int)rank, why);
        }
    return DSC_OK;
}

static void copy_out(const struct run *run, struct dsc_plan_times *times)
{
    const struct dsc_plan_step *step = run->index.step;
    const int64_t *carried = run->carried;

    times->makespan_ns = run->makespan_ns;
    for (int32_t i = 0; i < step->n_ranks; i++) {
        times->ranks[i] = run->usage[i];
        times->ranks[i].up_bytes = carried[plan_of_rank(i, PLAN_PORT_UP)];
        times->ranks[i].down_bytes = carried[plan_of_rank(i, PLAN_PORT_DOWN)];
        times->ranks[i].copied_bytes = carried[plan_of_rank(i, PLAN_COPIED)];
    }
    for (int32_t i = 0; i < step->n_nodes; i++)
        times->nodes[i] = (struct dsc_plan_traffic){
            carried[plan_of_node(step, i, PLAN_LINK_UP)], carried[plan_of_node(step, i, PLAN_LINK_DOWN)],
            carried[plan_of_node(step, i, PLAN_INNER)], carried[plan_of_node(step, i, PLAN_READ)],
            carried[plan_of_node(step, i, PLAN_WRITTEN)]};
    for (int64_t i = 0; times->exposed_ns != NULL && i < run->index.first_transfer[step->n_ranks]; i++)
        times->exposed_ns[i] = run->exposed_ns[i];
    for (int64_t i = 0; times->actions != NULL && i < run->n_shown_actions; i++)
        times->actions[i] = run->actions[i];
    for (int64_t i = 0; times->transfers != NULL && i < run->n_shown_transfers; i++)
        times->transfers[i] = run->transfers[i];
}

dsc_status dsc_plan_simulate(const struct dsc_plan_step *step, struct dsc_plan_times *times)
{
    struct run run = {.now_ns = 0};
    dsc_status status;

    if (times == NULL || times->ranks == NULL || times->nodes == NULL)
        return dsc_fail(DSC_EINVAL, "times, or its ranks or nodes, is NULL");
    status = open_run(&run, step);
    if (status == DSC_OK)
        status = run_all(&run);
    if (status == DSC_OK)
        status = check_end(&run);
    if (status == DSC_OK)
        copy_out(&run, times);
    close_run(&run);
    return status;
}
