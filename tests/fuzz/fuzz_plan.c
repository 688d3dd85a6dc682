/*
 * dsc_plan_simulate on any step: against a simulator that goes from moment to moment in floating point and knows links
 * only as sums over pairs of ranks; and on wild numbers, which must be refused or give times that add up.
 */
#include "fuzz.h"

#include "dsc/plan.h"

#include <math.h>

#define MAX_RANKS 6
#define MAX_NODES 4
#define MAX_AXES 2
#define MAX_LANES 2
#define MAX_TRANSFERS 6
#define MAX_ACTIONS 24
#define MAX_RESOURCES (3 * MAX_RANKS + 5 * MAX_NODES)
#define MAX_PHASES 4

/* One program a rank, so that list i is rank i's. */
struct given {
    struct dsc_plan_node nodes[MAX_NODES];
    struct dsc_plan_rank ranks[MAX_RANKS];
    struct dsc_plan_action actions[MAX_RANKS * MAX_ACTIONS];
    int64_t action_begins[MAX_RANKS + 1];
    struct dsc_plan_transfer transfers[MAX_RANKS * MAX_TRANSFERS];
    int64_t transfer_begins[MAX_RANKS + 1];
    int32_t members[MAX_AXES * MAX_RANKS];
    int64_t member_begins[MAX_AXES * MAX_RANKS + 1];
    int32_t group_of[MAX_RANKS * MAX_AXES];
    int32_t shown[MAX_RANKS];
    struct dsc_plan_step step;
};

struct found {
    struct dsc_plan_usage usage[MAX_RANKS];
    struct dsc_plan_traffic traffic[MAX_NODES];
    int64_t exposed_ns[MAX_RANKS * MAX_TRANSFERS];
    struct dsc_plan_span actions[MAX_RANKS * MAX_ACTIONS];
    struct dsc_plan_span transfers[MAX_RANKS * MAX_TRANSFERS];
    struct dsc_plan_times times;
};

static int64_t take_rate(struct input *input)
{
    return take_byte(input) % 3 == 0 ? 0 : 1000 * (1 + take_below(input, 60000));
}

static void take_places(struct input *input, struct given *given)
{
    struct dsc_plan_step *step = &given->step;

    step->n_nodes = (int32_t)(1 + take_below(input, MAX_NODES));
    step->n_ranks = step->n_programs = step->n_shown = (int32_t)(1 + take_below(input, MAX_RANKS));
    for (int32_t i = 0; i < step->n_nodes; i++)
        given->nodes[i] = (struct dsc_plan_node){i == 0 ? -1 : (int32_t)take_below(input, i),
                                                 take_rate(input),
                                                 take_below(input, 3000),
                                                 take_rate(input),
                                                 1000 + take_below(input, 60000),
                                                 take_below(input, 3000),
                                                 i == 0 ? 1000000 : take_rate(input),
                                                 i == 0 ? 1000000 : take_rate(input),
                                                 take_below(input, 3000)};
    for (int32_t i = 0; i < step->n_ranks; i++) {
        given->ranks[i] = (struct dsc_plan_rank){(int32_t)take_below(input, step->n_nodes), i, 1000000 + take_below(input, 3) * 500000,
                                                 take_rate(input), take_below(input, 3000), take_rate(input)};
        given->shown[i] = i;
    }
}

/* Deals the ranks of an axis to groups of one size or less, in an order of their own. */
static void take_groups(struct input *input, struct given *given, int32_t axis)
{
    struct dsc_plan_step *step = &given->step;
    int32_t size = (int32_t)(1 + take_below(input, step->n_ranks));
    int32_t shift = (int32_t)take_below(input, step->n_ranks);
    bool is_back = take_byte(input) % 2 == 1;

    for (int32_t i = 0; i < step->n_ranks; i++) {
        int32_t rank = ((is_back ? step->n_ranks - 1 - i : i) + shift) % step->n_ranks;

        if (i % size == 0) {
            step->n_groups++;
            given->member_begins[step->n_groups] = given->member_begins[step->n_groups - 1];
        }
        given->members[given->member_begins[step->n_groups]++] = rank;
        given->group_of[rank * step->n_axes + axis] = step->n_groups - 1;
    }
}

/*
 * All ranks have the same transfers with groups in the same order, so that they match; each has its own lanes, waits and
 * computations. A message in a group that is not of two, or lanes that cross, are left to the checks of the core.
 */
static void take_programs(struct input *input, struct given *given)
{
    struct dsc_plan_step *step = &given->step;
    int32_t n_transfers = (int32_t)take_below(input, MAX_TRANSFERS + 1);
    struct dsc_plan_transfer common[MAX_TRANSFERS];
    bool has_own_lanes = take_byte(input) % 4 == 0;

    for (int32_t i = 0; i < n_transfers; i++) {
        int32_t op = (int32_t)take_below(input, DSC_PLAN_N_OPS);
        uint8_t flags = take_byte(input) % 4;

        common[i] = (struct dsc_plan_transfer){op, (int32_t)take_below(input, MAX_AXES), (int32_t)take_below(input, MAX_LANES), 0,
                                               take_below(input, 50000)};
        if (flags == 1 && op <= DSC_PLAN_MESSAGE)
            common[i].flags = DSC_PLAN_PULL;
        if (flags == 2 && op <= DSC_PLAN_ALL_REDUCE)
            common[i].flags = DSC_PLAN_TWO_LEVELS;
    }
    for (int32_t rank = 0; rank < step->n_ranks; rank++) {
        int64_t *n = &given->action_begins[rank + 1];
        uint8_t waits = 0;

        *n = given->action_begins[rank];
        given->transfer_begins[rank + 1] = given->transfer_begins[rank] + n_transfers;
        for (int32_t i = 0; i < n_transfers; i++) {
            struct dsc_plan_transfer *transfer = &given->transfers[given->transfer_begins[rank] + i];

            *transfer = common[i];
            if (has_own_lanes)
                transfer->lane = (int32_t)take_below(input, MAX_LANES);
            if (take_byte(input) % 2 == 0)
                given->actions[(*n)++] = (struct dsc_plan_action){DSC_PLAN_RUN, take_below(input, 5000)};
            given->actions[(*n)++] = (struct dsc_plan_action){DSC_PLAN_START, i};
            for (int32_t j = i; j >= 0 && take_byte(input) % 3 == 0; j--)
                if ((waits >> j & 1) == 0) {
                    given->actions[(*n)++] = (struct dsc_plan_action){DSC_PLAN_WAIT, j};
                    waits |= (uint8_t)(1 << j);
                }
        }
    }
}

static void take_step(struct input *input, struct given *given)
{
    memset(given, 0, sizeof *given);
    given->step = (struct dsc_plan_step){.nodes = given->nodes,
                                         .ranks = given->ranks,
                                         .actions = given->actions,
                                         .action_begins = given->action_begins,
                                         .transfers = given->transfers,
                                         .transfer_begins = given->transfer_begins,
                                         .members = given->members,
                                         .member_begins = given->member_begins,
                                         .group_of = given->group_of,
                                         .shown = given->shown,
                                         .n_axes = MAX_AXES,
                                         .n_lanes = MAX_LANES};
    take_places(input, given);
    for (int32_t axis = 0; axis < MAX_AXES; axis++)
        take_groups(input, given, axis);
    take_programs(input, given);
}

/* ---- the other simulator: everything is looked for anew at each moment ---- */

struct naive_phase {
    double bytes[MAX_RESOURCES]; /* on each resource */
    double streams[MAX_RESOURCES];
    double latency_ns;
    double stream_bytes;
};

/* A transfer of a group, or of a rank. It keeps its entry when it is over. */
struct naive_flow {
    struct naive_phase phases[MAX_PHASES + 1]; /* the last one is empty: of a flow that is over */
    int n_phases;
    int phase;
    double latency_left;
    double bytes_left; /* of each stream */
    double rate;       /* bytes/ns */
    double begin_ns;
    double end_ns; /* -1 before */
    bool has_begun;
};

struct naive {
    const struct given *given;
    double rates[MAX_RESOURCES]; /* bytes/ns; 0: no limit */
    double carried[MAX_RESOURCES];
    struct naive_flow flows[MAX_RANKS][MAX_TRANSFERS]; /* a group's flow is its first rank's */
    double run_left[MAX_RANKS];
    double pull_left[MAX_RANKS];
    double exposed[MAX_RANKS][MAX_TRANSFERS];
    double ends[MAX_RANKS];
    double over[MAX_RANKS][MAX_TRANSFERS]; /* -1 before */
    int next[MAX_RANKS];
    bool has_started[MAX_RANKS][MAX_TRANSFERS];
    double now;
    double last; /* the end of the last transfer or action */
};

static const struct dsc_plan_transfer *transfer_of(const struct given *given, int32_t rank, int32_t i)
{
    return &given->transfers[given->transfer_begins[rank] + i];
}

static bool has_group(int32_t op)
{
    return op <= DSC_PLAN_MESSAGE;
}

static int32_t group_size(const struct given *given, int32_t rank, int32_t axis, const int32_t **members)
{
    int32_t group = given->group_of[rank * MAX_AXES + axis];

    *members = given->members + given->member_begins[group];
    return (int32_t)(given->member_begins[group + 1] - given->member_begins[group]);
}

static int32_t lowest_above(const struct given *given, int32_t a, int32_t b)
{
    for (; a >= 0; a = given->nodes[a].parent)
        for (int32_t v = b; v >= 0; v = given->nodes[v].parent)
            if (v == a)
                return a;
    return -1;
}

static int node_resource(const struct given *given, int32_t node, int which)
{
    return 3 * given->step.n_ranks + 5 * node + which;
}

/* A stream from a to b that counts as `streams`, and is the part `share` of n_bytes. */
static double way(const struct given *given, struct naive_phase *phase, int32_t a, int32_t b, double streams)
{
    int32_t top = lowest_above(given, given->ranks[a].node, given->ranks[b].node);
    double ns = (double)(given->ranks[a].port_latency_ns + given->ranks[b].port_latency_ns);

    phase->streams[3 * a] += streams;
    phase->streams[3 * b + 1] += streams;
    for (int32_t v = given->ranks[a].node; v != top; v = given->nodes[v].parent) {
        phase->streams[node_resource(given, v, 0)] += streams;
        ns += (double)given->nodes[v].latency_ns;
    }
    for (int32_t v = given->ranks[b].node; v != top; v = given->nodes[v].parent) {
        phase->streams[node_resource(given, v, 1)] += streams;
        ns += (double)given->nodes[v].latency_ns;
    }
    phase->streams[node_resource(given, top, 2)] += streams;
    return ns;
}

static void ring(const struct given *given, struct naive_phase *phase, const int32_t *members, int32_t n, int32_t n_streams, double streams,
                 double *step_ns)
{
    for (int32_t i = 0; i < n_streams; i++)
        *step_ns = fmax(*step_ns, way(given, phase, members[i], members[(i + 1) % n], streams));
}

/* Ranks of a group on one node, in their order. */
static int32_t on_node(const struct given *given, const int32_t *members, int32_t n, int32_t node, int32_t *out)
{
    int32_t n_found = 0;

    for (int32_t i = 0; i < n; i++)
        if (given->ranks[members[i]].node == node)
            out[n_found++] = members[i];
    return n_found;
}

static void two_levels(const struct given *given, struct naive_flow *flow, int32_t op, int64_t n_bytes, const int32_t *members, int32_t n,
                       int32_t most)
{
    struct naive_phase inside = {.latency_ns = 0};
    struct naive_phase between[2] = {{.latency_ns = 0}, {.latency_ns = 0}};
    double step_ns = 0;
    int32_t here[MAX_RANKS];
    int32_t there[MAX_RANKS];

    inside.stream_bytes = ceil((double)n_bytes * (most - 1) / most);
    for (int32_t v = 0; v < given->step.n_nodes; v++) {
        int32_t k = on_node(given, members, n, v, here);

        if (k > 1)
            ring(given, &inside, here, k, k, (double)(k - 1) / k * most / (most - 1), &step_ns);
        for (int32_t u = 0; u < given->step.n_nodes; u++) {
            int32_t m = on_node(given, members, n, u, there);

            /* To another node: the slices of its m ranks, from k ranks in equal parts; and the slices of k ranks, to m. */
            for (int32_t i = 0; i < k && u != v; i++)
                for (int32_t j = 0; j < m; j++) {
                    between[0].latency_ns = fmax(between[0].latency_ns, way(given, &between[0], here[i], there[j], 1.0 / k));
                    between[1].latency_ns = fmax(between[1].latency_ns, way(given, &between[1], here[i], there[j], 1.0 / m));
                }
        }
    }
    inside.latency_ns = (most - 1) * step_ns;
    between[0].stream_bytes = between[1].stream_bytes = ceil((double)n_bytes / n);
    if (op != DSC_PLAN_ALL_GATHER) {
        flow->phases[flow->n_phases++] = inside;
        flow->phases[flow->n_phases++] = between[0];
    }
    if (op != DSC_PLAN_REDUCE_SCATTER) {
        flow->phases[flow->n_phases++] = between[1];
        flow->phases[flow->n_phases++] = inside;
    }
}

static void lay_out(struct naive *naive, struct naive_flow *flow, int32_t rank, const struct dsc_plan_transfer *transfer)
{
    const struct given *given = naive->given;
    struct naive_phase *phase = &flow->phases[0];
    const int32_t *members;
    int32_t node = given->ranks[rank].node;
    int32_t n_hosts = 0;
    int32_t most = 0;
    double step_ns = 0;
    int32_t here[MAX_RANKS];
    int32_t n;

    memset(flow, 0, sizeof *flow);
    flow->end_ns = -1;
    if (!has_group(transfer->op)) {
        int resource = 3 * rank + 2;

        flow->n_phases = 1;
        phase->stream_bytes = transfer->op == DSC_PLAN_WORK ? 0 : (double)transfer->amount;
        phase->latency_ns = transfer->op == DSC_PLAN_WORK ? (double)transfer->amount : 0;
        if (transfer->op == DSC_PLAN_READ || transfer->op == DSC_PLAN_WRITE) {
            bool is_read = transfer->op == DSC_PLAN_READ;

            while ((is_read ? given->nodes[node].read_bytes_per_s : given->nodes[node].write_bytes_per_s) == 0)
                node = given->nodes[node].parent;
            resource = node_resource(given, node, is_read ? 3 : 4);
            phase->latency_ns = (double)given->nodes[node].file_latency_ns;
        }
        if (transfer->op != DSC_PLAN_WORK)
            phase->streams[resource] = 1;
        return;
    }
    n = group_size(given, rank, transfer->axis, &members);
    if (n == 1)
        return;
    for (int32_t v = 0; v < given->step.n_nodes; v++) {
        int32_t k = on_node(given, members, n, v, here);

        n_hosts += k > 0;
        most = k > most ? k : most;
    }
    if (transfer->flags == DSC_PLAN_TWO_LEVELS && n_hosts > 1 && most > 1) {
        two_levels(given, flow, transfer->op, transfer->amount, members, n, most);
        return;
    }
    flow->n_phases = 1;
    if (transfer->op == DSC_PLAN_ALL_TO_ALL) {
        for (int32_t i = 0; i < n; i++)
            for (int32_t j = 0; j < n; j++)
                if (i != j)
                    phase->latency_ns = fmax(phase->latency_ns, way(given, phase, members[i], members[j], 1));
        phase->stream_bytes = ceil((double)transfer->amount / n);
    } else if (transfer->op == DSC_PLAN_BROADCAST || transfer->op == DSC_PLAN_MESSAGE) {
        ring(given, phase, members, n, n - 1, 1, &step_ns);
        phase->latency_ns = (n - 1) * step_ns;
        phase->stream_bytes = (double)transfer->amount;
    } else {
        int32_t rounds = transfer->op == DSC_PLAN_ALL_REDUCE ? 2 * (n - 1) : n - 1;

        ring(given, phase, members, n, n, 1, &step_ns);
        phase->latency_ns = rounds * step_ns;
        phase->stream_bytes = ceil((double)transfer->amount * rounds / n);
    }
}

/* The owner of a flow: the first rank of the group, or the rank. */
static int32_t owner_of(const struct given *given, int32_t rank, int32_t i)
{
    const struct dsc_plan_transfer *transfer = transfer_of(given, rank, i);
    const int32_t *members;

    if (!has_group(transfer->op))
        return rank;
    group_size(given, rank, transfer->axis, &members);
    return members[0];
}

/* Whether all earlier transfers of the lane are over, and this one has started. */
static bool is_at_head(const struct naive *naive, int32_t rank, int32_t i)
{
    const struct dsc_plan_transfer *transfer = transfer_of(naive->given, rank, i);

    if (!naive->has_started[rank][i])
        return false;
    for (int32_t j = 0; j < i; j++) {
        const struct dsc_plan_transfer *other = transfer_of(naive->given, rank, j);

        if (other->lane == transfer->lane && other->flags != DSC_PLAN_PULL && naive->over[rank][j] < 0)
            return false;
    }
    return true;
}

static bool all_ready(const struct naive *naive, int32_t rank, int32_t i, bool (*is_ready)(const struct naive *, int32_t, int32_t))
{
    const struct dsc_plan_transfer *transfer = transfer_of(naive->given, rank, i);
    const int32_t *members;
    int32_t n;

    if (!has_group(transfer->op))
        return is_ready(naive, rank, i);
    n = group_size(naive->given, rank, transfer->axis, &members);
    for (int32_t j = 0; j < (transfer->op == DSC_PLAN_MESSAGE ? 1 : n); j++)
        if (!is_ready(naive, members[j], i))
            return false;
    return true;
}

static bool has_begun(const struct naive *naive, int32_t rank, int32_t i)
{
    return naive->has_started[rank][i];
}

static void enter_phase(struct naive *naive, struct naive_flow *flow)
{
    const struct naive_phase *phase = &flow->phases[flow->phase];

    if (flow->phase == flow->n_phases) {
        flow->end_ns = naive->now;
        naive->last = naive->now;
        return;
    }
    flow->latency_left = phase->latency_ns;
    flow->bytes_left = phase->stream_bytes;
    for (int r = 0; r < MAX_RESOURCES; r++)
        naive->carried[r] += phase->streams[r] * phase->stream_bytes;
}

/* All that happens at this moment without time. False: nothing. */
static bool happen(struct naive *naive)
{
    const struct given *given = naive->given;
    bool has_changed = false;

    for (int32_t rank = 0; rank < given->step.n_ranks; rank++) {
        int64_t n_transfers = given->transfer_begins[rank + 1] - given->transfer_begins[rank];

        for (int32_t i = 0; i < n_transfers; i++) {
            const struct dsc_plan_transfer *transfer = transfer_of(given, rank, i);
            struct naive_flow *flow = &naive->flows[rank][i];

            if (transfer->flags == DSC_PLAN_PULL)
                continue;
            if (owner_of(given, rank, i) == rank && !flow->has_begun && all_ready(naive, rank, i, is_at_head)) {
                lay_out(naive, flow, rank, transfer);
                flow->has_begun = true;
                flow->begin_ns = naive->now;
                enter_phase(naive, flow);
                has_changed = true;
            }
            if (flow->has_begun && flow->end_ns < 0 && flow->latency_left <= 0) {
                bool is_limited = false;

                for (int r = 0; r < MAX_RESOURCES; r++)
                    is_limited |= flow->phases[flow->phase].streams[r] > 0 && naive->rates[r] > 0;
                if (flow->bytes_left <= 0 || !is_limited) {
                    flow->phase++;
                    enter_phase(naive, flow);
                    has_changed = true;
                }
            }
            flow = &naive->flows[owner_of(given, rank, i)][i];
            if (naive->over[rank][i] < 0 && flow->has_begun && flow->end_ns >= 0 && is_at_head(naive, rank, i)) {
                naive->over[rank][i] = naive->last = naive->now;
                has_changed = true;
            }
        }
        while (naive->next[rank] < given->action_begins[rank + 1] - given->action_begins[rank]) {
            const struct dsc_plan_action *action = &given->actions[given->action_begins[rank] + naive->next[rank]];
            int32_t i = (int32_t)action->amount;

            if (action->kind == DSC_PLAN_RUN) {
                if (naive->run_left[rank] < 0)
                    naive->run_left[rank] = ceil((double)action->amount * (double)given->ranks[rank].slow_ppm / 1e6);
                if (naive->run_left[rank] > 0)
                    break;
                naive->run_left[rank] = -1;
            } else if (action->kind == DSC_PLAN_START) {
                naive->has_started[rank][i] = true;
            } else if (naive->over[rank][i] < 0) {
                const struct dsc_plan_transfer *transfer = transfer_of(given, rank, i);
                const int32_t *members;
                int32_t n;

                if (transfer->flags != DSC_PLAN_PULL || !all_ready(naive, rank, i, has_begun))
                    break;
                n = group_size(given, rank, transfer->axis, &members);
                if (naive->pull_left[rank] < 0) {
                    bool is_sent = transfer->op == DSC_PLAN_BROADCAST || transfer->op == DSC_PLAN_MESSAGE;
                    int32_t top = given->ranks[members[0]].node;
                    double n_bytes = is_sent                                ? (double)transfer->amount
                                     : transfer->op == DSC_PLAN_ALL_REDUCE ? ceil(2.0 * (double)transfer->amount * (n - 1) / n)
                                                                           : ceil((double)transfer->amount * (n - 1) / n);

                    for (int32_t j = 1; j < n; j++)
                        top = lowest_above(given, top, given->ranks[members[j]].node);
                    naive->pull_left[rank] = 0;
                    if (n > 1 && !(is_sent && members[0] == rank)) {
                        naive->pull_left[rank] =
                            (double)given->nodes[top].pull_latency_ns + ceil(n_bytes * 1e9 / (double)given->nodes[top].pull_bytes_per_s);
                        naive->carried[node_resource(given, top, 2)] += n_bytes;
                    }
                }
                if (naive->pull_left[rank] > 0)
                    break;
                naive->pull_left[rank] = -1;
                naive->over[rank][i] = naive->now;
            }
            naive->next[rank]++;
            naive->ends[rank] = naive->last = naive->now;
            has_changed = true;
        }
    }
    return has_changed;
}

static bool is_flowing(const struct naive_flow *flow)
{
    return flow->has_begun && flow->end_ns < 0 && flow->latency_left <= 0;
}

/* Raises the rates of all flows together, until each crosses a full link. */
static void fill(struct naive *naive)
{
    double used[MAX_RESOURCES] = {0};
    bool is_fixed[MAX_RANKS][MAX_TRANSFERS] = {{false}};

    for (;;) {
        double least = INFINITY;
        bool is_full[MAX_RESOURCES] = {false};
        double streams[MAX_RESOURCES] = {0};

        for (int rank = 0; rank < MAX_RANKS; rank++)
            for (int i = 0; i < MAX_TRANSFERS; i++)
                if (is_flowing(&naive->flows[rank][i]) && !is_fixed[rank][i])
                    for (int r = 0; r < MAX_RESOURCES; r++)
                        streams[r] += naive->flows[rank][i].phases[naive->flows[rank][i].phase].streams[r];
        for (int r = 0; r < MAX_RESOURCES; r++)
            if (naive->rates[r] > 0 && streams[r] > 1e-9)
                least = fmin(least, (naive->rates[r] - used[r]) / streams[r]);
        if (isinf(least))
            return;
        for (int r = 0; r < MAX_RESOURCES; r++)
            is_full[r] = naive->rates[r] > 0 && streams[r] > 1e-9 && (naive->rates[r] - used[r]) / streams[r] <= least * (1 + 1e-9);
        for (int rank = 0; rank < MAX_RANKS; rank++)
            for (int i = 0; i < MAX_TRANSFERS; i++) {
                struct naive_flow *flow = &naive->flows[rank][i];
                const double *of = flow->phases[flow->phase].streams;
                bool crosses = false;

                if (!is_flowing(flow) || is_fixed[rank][i])
                    continue;
                for (int r = 0; r < MAX_RESOURCES; r++)
                    crosses |= is_full[r] && of[r] > 0;
                if (!crosses)
                    continue;
                is_fixed[rank][i] = true;
                flow->rate = least;
                for (int r = 0; r < MAX_RESOURCES; r++)
                    used[r] += least * of[r];
            }
    }
}

/* Goes to the next whole ns with an end. False: nothing goes on. */
static bool advance(struct naive *naive)
{
    double ns = INFINITY;

    fill(naive);
    for (int rank = 0; rank < MAX_RANKS; rank++) {
        if (naive->run_left[rank] > 0)
            ns = fmin(ns, naive->run_left[rank]);
        if (naive->pull_left[rank] > 0)
            ns = fmin(ns, naive->pull_left[rank]);
        for (int i = 0; i < MAX_TRANSFERS; i++) {
            const struct naive_flow *flow = &naive->flows[rank][i];

            if (flow->has_begun && flow->end_ns < 0)
                ns = fmin(ns, flow->latency_left > 0 ? flow->latency_left : ceil(flow->bytes_left / flow->rate - 1e-6));
        }
    }
    if (isinf(ns))
        return false;
    ns = fmax(ns, 1);
    for (int rank = 0; rank < naive->given->step.n_ranks; rank++) {
        const struct dsc_plan_action *action = &naive->given->actions[naive->given->action_begins[rank] + naive->next[rank]];

        if (naive->next[rank] < naive->given->action_begins[rank + 1] - naive->given->action_begins[rank] && action->kind == DSC_PLAN_WAIT)
            naive->exposed[rank][action->amount] += ns;
        naive->run_left[rank] -= naive->run_left[rank] > 0 ? ns : 0;
        naive->pull_left[rank] -= naive->pull_left[rank] > 0 ? ns : 0;
        for (int i = 0; i < MAX_TRANSFERS; i++) {
            struct naive_flow *flow = &naive->flows[rank][i];

            if (!flow->has_begun || flow->end_ns >= 0)
                continue;
            if (flow->latency_left > 0)
                flow->latency_left -= ns;
            else if ((flow->bytes_left -= ns * flow->rate) < flow->rate * 1e-6)
                flow->bytes_left = 0;
        }
    }
    naive->now += ns;
    return true;
}

/* False: some rank waits for ever, or a transfer never begins. */
static bool run_naive(struct naive *naive, const struct given *given)
{
    memset(naive, 0, sizeof *naive);
    naive->given = given;
    for (int32_t rank = 0; rank < MAX_RANKS; rank++) {
        naive->run_left[rank] = naive->pull_left[rank] = -1;
        for (int i = 0; i < MAX_TRANSFERS; i++)
            naive->over[rank][i] = naive->flows[rank][i].end_ns = -1;
    }
    for (int32_t i = 0; i < given->step.n_ranks; i++) {
        naive->rates[3 * i] = naive->rates[3 * i + 1] = (double)given->ranks[i].port_bytes_per_s / 1e9;
        naive->rates[3 * i + 2] = (double)given->ranks[i].copy_bytes_per_s / 1e9;
    }
    for (int32_t i = 0; i < given->step.n_nodes; i++) {
        double *rates = &naive->rates[node_resource(given, i, 0)];

        rates[0] = rates[1] = (double)given->nodes[i].bytes_per_s / 1e9;
        rates[2] = (double)given->nodes[i].inner_bytes_per_s / 1e9;
        rates[3] = (double)given->nodes[i].read_bytes_per_s / 1e9;
        rates[4] = (double)given->nodes[i].write_bytes_per_s / 1e9;
    }
    do
        while (happen(naive))
            ;
    while (advance(naive));
    for (int32_t rank = 0; rank < given->step.n_ranks; rank++) {
        if (naive->next[rank] < given->action_begins[rank + 1] - given->action_begins[rank])
            return false;
        for (int32_t i = 0; i < given->transfer_begins[rank + 1] - given->transfer_begins[rank]; i++)
            if (transfer_of(given, rank, i)->flags != DSC_PLAN_PULL && naive->over[rank][i] < 0)
                return false;
    }
    return true;
}

/* Rates are rounded down and times up, so that a time may be later by a part in 10^6 and by some ns an event. */
static bool is_near(int64_t got, double wanted)
{
    return fabs((double)got - wanted) <= 1e-5 * wanted + 200;
}

static bool has_bytes(int64_t got, double wanted)
{
    return fabs((double)got - wanted) <= 1e-9 * wanted + MAX_PHASES * MAX_TRANSFERS * MAX_RANKS;
}

static void compare(const struct naive *naive, const struct found *found)
{
    const struct given *given = naive->given;

    REQUIRE(is_near(found->times.makespan_ns, naive->last));
    for (int32_t rank = 0; rank < given->step.n_ranks; rank++) {
        REQUIRE(is_near(found->usage[rank].end_ns, naive->ends[rank]));
        REQUIRE(has_bytes(found->usage[rank].up_bytes, naive->carried[3 * rank]));
        REQUIRE(has_bytes(found->usage[rank].down_bytes, naive->carried[3 * rank + 1]));
        REQUIRE(has_bytes(found->usage[rank].copied_bytes, naive->carried[3 * rank + 2]));
        for (int64_t i = given->transfer_begins[rank]; i < given->transfer_begins[rank + 1]; i++) {
            REQUIRE(is_near(found->exposed_ns[i], naive->exposed[rank][i - given->transfer_begins[rank]]));
            if (naive->over[rank][i - given->transfer_begins[rank]] >= 0)
                REQUIRE(is_near(found->transfers[i].end_ns, naive->over[rank][i - given->transfer_begins[rank]]));
        }
    }
    for (int32_t i = 0; i < given->step.n_nodes; i++) {
        const double *carried = &naive->carried[node_resource(given, i, 0)];

        REQUIRE(has_bytes(found->traffic[i].up_bytes, carried[0]));
        REQUIRE(has_bytes(found->traffic[i].down_bytes, carried[1]));
        REQUIRE(has_bytes(found->traffic[i].inner_bytes, carried[2]));
        REQUIRE(has_bytes(found->traffic[i].read_bytes, carried[3]));
        REQUIRE(has_bytes(found->traffic[i].written_bytes, carried[4]));
    }
}

/* Exactly: a rank's actions follow one another, and its computations and waits fill its time. */
static void check_sums(const struct given *given, const struct found *found)
{
    for (int32_t rank = 0; rank < given->step.n_ranks; rank++) {
        const struct dsc_plan_usage *usage = &found->usage[rank];
        int64_t now = 0;
        int64_t exposed = 0;

        for (int64_t i = given->action_begins[rank]; i < given->action_begins[rank + 1]; i++) {
            REQUIRE(found->actions[i].begin_ns == now && found->actions[i].end_ns >= now);
            now = found->actions[i].end_ns;
        }
        for (int64_t i = given->transfer_begins[rank]; i < given->transfer_begins[rank + 1]; i++)
            exposed += found->exposed_ns[i];
        REQUIRE(usage->end_ns == now && usage->waited_ns == exposed && usage->busy_ns + usage->waited_ns == now);
        REQUIRE(now <= found->times.makespan_ns);
    }
}

/* One number of the step becomes any other. */
static void make_wild(struct input *input, struct given *given)
{
    struct dsc_plan_step *step = &given->step;
    int64_t wild = take_wild(input);
    int64_t i = take_below(input, 1 << 12);
    struct dsc_plan_node *node = &given->nodes[i % step->n_nodes];
    struct dsc_plan_rank *rank = &given->ranks[i % step->n_ranks];

    switch (take_below(input, 16)) {
    case 0:
        node->parent = (int32_t)wild;
        break;
    case 1:
        node->bytes_per_s = node->pull_bytes_per_s = wild;
        break;
    case 2:
        node->latency_ns = node->pull_latency_ns = wild;
        break;
    case 3:
        node->read_bytes_per_s = node->file_latency_ns = wild;
        break;
    case 4:
        rank->node = (int32_t)wild;
        break;
    case 5:
        rank->program = (int32_t)wild;
        break;
    case 6:
        rank->slow_ppm = wild;
        break;
    case 7:
        rank->port_bytes_per_s = rank->copy_bytes_per_s = wild;
        break;
    case 8:
        given->actions[i % (MAX_RANKS * MAX_ACTIONS)].kind = (int32_t)wild;
        break;
    case 9:
        given->actions[i % (MAX_RANKS * MAX_ACTIONS)].amount = wild;
        break;
    case 10:
        given->transfers[i % (MAX_RANKS * MAX_TRANSFERS)].amount = wild;
        break;
    case 11:
        given->transfers[i % (MAX_RANKS * MAX_TRANSFERS)].flags = (int32_t)wild;
        break;
    case 12:
        given->transfers[i % (MAX_RANKS * MAX_TRANSFERS)].op = (int32_t)wild;
        break;
    case 13:
        given->members[i % (MAX_AXES * MAX_RANKS)] = (int32_t)wild;
        break;
    case 14:
        given->group_of[i % (MAX_AXES * MAX_RANKS)] = (int32_t)wild;
        break;
    default:
        given->transfers[i % (MAX_RANKS * MAX_TRANSFERS)].lane = given->transfers[i % (MAX_RANKS * MAX_TRANSFERS)].axis = (int32_t)wild;
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes)
{
    static struct given given;
    static struct found found;
    static struct naive naive;
    struct input input = {data, n_bytes};
    bool is_wild = take_byte(&input) % 4 == 0;
    dsc_status status;

    take_step(&input, &given);
    if (is_wild)
        make_wild(&input, &given);
    memset(&found, 0x5a, sizeof found);
    found.times = (struct dsc_plan_times){-1, found.usage, found.traffic, found.exposed_ns, found.actions, found.transfers};
    status = dsc_plan_simulate(&given.step, &found.times);
    REQUIRE(status == DSC_OK || found.times.makespan_ns == -1);
    if (status == DSC_OK)
        for (int32_t rank = 0; rank < given.step.n_ranks; rank++)
            if (given.ranks[rank].program != rank) /* spans lie elsewhere */
                return 0;
    if (status == DSC_OK)
        check_sums(&given, &found);
    if (is_wild) {
        REQUIRE(status == DSC_OK || status == DSC_EINVAL || status == DSC_EOVERFLOW);
        return 0;
    }
    for (int32_t rank = 0; rank < given.step.n_ranks; rank++)
        for (int32_t i = 0; i < given.transfer_begins[rank + 1] - given.transfer_begins[rank]; i++) {
            const int32_t *members;

            if (transfer_of(&given, rank, i)->op == DSC_PLAN_MESSAGE &&
                group_size(&given, rank, transfer_of(&given, rank, i)->axis, &members) != 2) {
                REQUIRE(status == DSC_EINVAL && strstr(dsc_last_error(), "message in group") != NULL);
                return 0;
            }
        }
    if (run_naive(&naive, &given)) {
        REQUIRE(status == DSC_OK);
        compare(&naive, &found);
    } else {
        REQUIRE(status == DSC_EINVAL);
        REQUIRE(strstr(dsc_last_error(), "for ever") != NULL || strstr(dsc_last_error(), "never begins") != NULL);
    }
    return 0;
}
