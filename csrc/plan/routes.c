/* Streams of a collective over the links of the tree. */
#include "base/fail.h"
#include "plan/simulate.h"

#include <stdlib.h>

/* The branches below a node that turn() has added so far. */
struct plan_branch {
    int64_t sent;      /* the weight of senders */
    int64_t received;  /* the weight of receivers */
    int64_t turned;    /* streams between two branches */
    int64_t height_ns; /* the largest latency from a rank to this node */
    int64_t way_ns;    /* the largest latency between two branches */
    int64_t port_ns;   /* the largest of ranks on this node */
    int32_t n_direct;  /* ranks on this node */
};

dsc_status dsc_plan_open_router(const struct plan_index *index, struct plan_router *out)
{
    size_t n_nodes = (size_t)index->step->n_nodes;
    size_t n_resources = (size_t)plan_n_resources(index->step);

    out->index = index;
    out->parts = calloc(n_resources, sizeof *out->parts);
    out->touched = calloc(n_resources, sizeof *out->touched);
    out->branches = calloc(n_nodes, sizeof *out->branches);
    out->firsts = calloc(n_nodes, sizeof *out->firsts);
    out->lasts = calloc(n_nodes, sizeof *out->lasts);
    if (out->parts == NULL || out->touched == NULL || out->branches == NULL || out->firsts == NULL ||
        out->lasts == NULL)
        return dsc_fail(DSC_ENOMEM, "no memory for the routes over %lld links", (long long)n_resources);
    return DSC_OK;
}

void dsc_plan_close_router(struct plan_router *router)
{
    free(router->parts);
    free(router->touched);
    free(router->branches);
    free(router->firsts);
    free(router->lasts);
}

static void add(struct plan_router *router, int32_t resource, int64_t parts)
{
    if (parts == 0)
        return;
    if (router->parts[resource] == 0)
        router->touched[router->n_touched++] = resource;
    router->parts[resource] += parts;
}

static void add_at_rank(struct plan_router *router, int32_t rank, int64_t up, int64_t down)
{
    add(router, plan_of_rank(rank, PLAN_PORT_UP), up);
    add(router, plan_of_rank(rank, PLAN_PORT_DOWN), down);
}

/* Adds a stream, and raises *step_ns to its latency. */
static void add_stream(struct plan_router *router, int32_t from, int32_t to, int64_t parts, int64_t *step_ns)
{
    const struct dsc_plan_step *step = router->index->step;
    const int32_t *depths = router->index->depths;
    int32_t up = step->ranks[from].node;
    int32_t down = step->ranks[to].node;
    int64_t ns = step->ranks[from].port_latency_ns + step->ranks[to].port_latency_ns;

    add_at_rank(router, from, parts, 0);
    add_at_rank(router, to, 0, parts);
    while (up != down)
        if (depths[up] >= depths[down]) {
            add(router, plan_of_node(step, up, PLAN_LINK_UP), parts);
            ns += step->nodes[up].latency_ns;
            up = step->nodes[up].parent;
        } else {
            add(router, plan_of_node(step, down, PLAN_LINK_DOWN), parts);
            ns += step->nodes[down].latency_ns;
            down = step->nodes[down].parent;
        }
    add(router, plan_of_node(step, up, PLAN_INNER), parts);
    if (ns > *step_ns)
        *step_ns = ns;
}

/* Adds a branch below a node: each sender of a branch sends a stream to each receiver of another branch. */
static void turn(struct plan_branch *node, int64_t sent, int64_t received, int64_t height_ns)
{
    node->turned += node->sent * received + sent * node->received;
    if (node->sent > 0 || node->received > 0)
        if (node->height_ns + height_ns > node->way_ns)
            node->way_ns = node->height_ns + height_ns;
    node->sent += sent;
    node->received += received;
    if (height_ns > node->height_ns)
        node->height_ns = height_ns;
}

static int64_t ceil_div(int64_t a, int64_t b)
{
    return (a + b - 1) / b;
}

static void count_direct(struct plan_router *router, const struct plan_group *group)
{
    for (int32_t i = 0; i < group->n; i++) {
        const struct dsc_plan_rank *rank = &router->index->step->ranks[group->members[i]];
        struct plan_branch *node = &router->branches[rank->node];

        node->n_direct++;
        if (rank->port_latency_ns > node->port_ns)
            node->port_ns = rank->port_latency_ns;
    }
}

static void clear_branches(struct plan_router *router)
{
    for (int32_t i = 0; i < router->index->step->n_nodes; i++)
        router->branches[i] = (struct plan_branch){0};
}

/*
 * Adds the streams at the ports of all ranks, and adds the ranks to their nodes as branches.
 *
 * Each to each: each rank is a branch that sends a stream to each other. Between nodes, a stream carries the slice of
 * one rank: of sums, a node's ranks send a slice to each rank of other nodes, and share in sending; of slices, each
 * rank sends its own to each other node, whose ranks share in receiving.
 */
static void add_ports(struct plan_router *router, const struct plan_group *group, enum plan_shape shape)
{
    const struct dsc_plan_step *step = router->index->step;

    for (int32_t i = 0; i < group->n; i++) {
        int32_t rank = group->members[i];
        struct plan_branch *node = &router->branches[step->ranks[rank].node];
        int64_t whole = (int64_t)(group->n_hosts - 1) * PLAN_STREAM;
        int64_t shared = ceil_div((int64_t)(group->n - node->n_direct) * PLAN_STREAM, node->n_direct);

        if (shape == PLAN_EACH_TO_EACH) {
            add_at_rank(router, rank, (int64_t)(group->n - 1) * PLAN_STREAM, (int64_t)(group->n - 1) * PLAN_STREAM);
            turn(node, 1, 1, step->ranks[rank].port_latency_ns);
        } else if (shape == PLAN_SUMS_BETWEEN) {
            add_at_rank(router, rank, shared, whole);
        } else {
            add_at_rank(router, rank, whole, shared);
        }
    }
    if (shape == PLAN_EACH_TO_EACH)
        return;
    for (int32_t i = 0; i < step->n_nodes; i++) {
        struct plan_branch *node = &router->branches[i];

        if (node->n_direct > 0)
            turn(node, shape == PLAN_SUMS_BETWEEN ? 1 : node->n_direct, shape == PLAN_SUMS_BETWEEN ? node->n_direct : 1,
                 node->port_ns);
    }
}

/* Adds streams from each to each, or between nodes. They are counted, because there are many. */
static void add_crossing(struct plan_router *router, const struct plan_group *group, enum plan_shape shape,
                         int64_t *step_ns)
{
    const struct dsc_plan_step *step = router->index->step;
    int64_t sent = shape == PLAN_SUMS_BETWEEN ? group->n_hosts : group->n;
    int64_t received = shape == PLAN_SLICES_BETWEEN ? group->n_hosts : group->n;

    count_direct(router, group);
    add_ports(router, group, shape);
    for (int32_t i = step->n_nodes - 1; i >= 0; i--) { /* parents come before their children */
        const struct plan_branch *node = &router->branches[i];

        if (node->sent == 0)
            continue;
        add(router, plan_of_node(step, i, PLAN_INNER), node->turned * PLAN_STREAM);
        if (node->way_ns > *step_ns)
            *step_ns = node->way_ns;
        if (i == group->root)
            break;
        add(router, plan_of_node(step, i, PLAN_LINK_UP), node->sent * (received - node->received) * PLAN_STREAM);
        add(router, plan_of_node(step, i, PLAN_LINK_DOWN), (sent - node->sent) * node->received * PLAN_STREAM);
        turn(&router->branches[step->nodes[i].parent], node->sent, node->received,
             node->height_ns + step->nodes[i].latency_ns);
    }
    clear_branches(router);
}

/* Adds a ring on each node. Streams are as large as on the node with most ranks; smaller nodes count parts of a stream.
 */
static void add_inside(struct plan_router *router, const struct plan_group *group, int64_t *step_ns)
{
    const struct dsc_plan_step *step = router->index->step;
    int64_t most = group->most_on_host;

    count_direct(router, group);
    for (int32_t i = 0; i < group->n; i++)
        router->firsts[step->ranks[group->members[i]].node] = -1;
    for (int32_t i = 0; i < 2 * group->n; i++) { /* the second time closes the rings */
        int32_t rank = group->members[i % group->n];
        int32_t node = step->ranks[rank].node;
        int64_t n = router->branches[node].n_direct;

        if (router->firsts[node] < 0)
            router->firsts[node] = rank;
        else if (n > 1 && (i < group->n || router->firsts[node] == rank))
            add_stream(router, router->lasts[node], rank, ceil_div(PLAN_STREAM * (n - 1) * most, n * (most - 1)),
                       step_ns);
        router->lasts[node] = rank;
    }
    clear_branches(router);
}

/* Moves the loads into a list, first the loads on resources with a limit. */
static dsc_status collect(struct plan_router *router, struct plan_route *route)
{
    struct plan_load *loads = malloc(((size_t)router->n_touched + 1) * sizeof *loads);
    int32_t n = 0;

    for (int limited = 1; limited >= 0; limited--) {
        for (int32_t i = 0; loads != NULL && i < router->n_touched; i++) {
            int32_t resource = router->touched[i];

            if ((router->index->capacities[resource] > 0) == limited)
                loads[n++] = (struct plan_load){router->parts[resource], resource};
        }
        if (limited == 1)
            route->n_limited = n;
    }
    for (int32_t i = 0; i < router->n_touched; i++)
        router->parts[router->touched[i]] = 0;
    route->n_loads = router->n_touched;
    router->n_touched = 0;
    route->loads = loads;
    return loads == NULL ? dsc_fail(DSC_ENOMEM, "no memory for %d loads", (int)route->n_loads) : DSC_OK;
}

dsc_status dsc_plan_route(struct plan_router *router, struct plan_group *group, enum plan_shape shape,
                          const struct plan_route **out)
{
    struct plan_route *route = &group->routes[shape];

    *out = route;
    if (route->loads != NULL)
        return DSC_OK;
    switch (shape) {
    case PLAN_RING:
    case PLAN_CHAIN:
        for (int32_t i = 0; i < group->n - (shape == PLAN_CHAIN); i++)
            add_stream(router, group->members[i], group->members[(i + 1) % group->n], PLAN_STREAM, &route->step_ns);
        break;
    case PLAN_RINGS_INSIDE:
        add_inside(router, group, &route->step_ns);
        break;
    default:
        add_crossing(router, group, shape, &route->step_ns);
    }
    return collect(router, route);
}

int64_t dsc_plan_part(int64_t n_bytes, int64_t numerator, int64_t denominator)
{
    return (int64_t)(((__int128)n_bytes * numerator + denominator - 1) / denominator);
}

static bool two_level_phase(const struct plan_group *group, const struct dsc_plan_transfer *transfer, int32_t number,
                            struct plan_phase *out)
{
    static const enum plan_shape shapes[] = {PLAN_RINGS_INSIDE, PLAN_SUMS_BETWEEN, PLAN_SLICES_BETWEEN,
                                             PLAN_RINGS_INSIDE};
    int32_t i = number + (transfer->op == DSC_PLAN_ALL_GATHER ? 2 : 0);
    int64_t most = group->most_on_host;

    if (i >= (transfer->op == DSC_PLAN_REDUCE_SCATTER ? 2 : 4))
        return false;
    if (shapes[i] == PLAN_RINGS_INSIDE)
        *out = (struct plan_phase){shapes[i], dsc_plan_part(transfer->amount, most - 1, most), most - 1};
    else
        *out = (struct plan_phase){shapes[i], dsc_plan_part(transfer->amount, 1, group->n), 1};
    return true;
}

bool dsc_plan_phase_of(const struct plan_group *group, const struct dsc_plan_transfer *transfer, int32_t number,
                       struct plan_phase *out)
{
    int64_t n = group->n;
    int64_t n_bytes = transfer->amount;

    if (n == 1)
        return false;
    if ((transfer->flags & DSC_PLAN_TWO_LEVELS) != 0 && group->n_hosts > 1 && group->most_on_host > 1)
        return two_level_phase(group, transfer, number, out);
    switch (transfer->op) {
    case DSC_PLAN_ALL_REDUCE:
        *out = (struct plan_phase){PLAN_RING, dsc_plan_part(n_bytes, 2 * (n - 1), n), 2 * (n - 1)};
        break;
    case DSC_PLAN_ALL_TO_ALL:
        *out = (struct plan_phase){PLAN_EACH_TO_EACH, dsc_plan_part(n_bytes, 1, n), 1};
        break;
    case DSC_PLAN_BROADCAST:
    case DSC_PLAN_MESSAGE:
        *out = (struct plan_phase){PLAN_CHAIN, n_bytes, n - 1};
        break;
    default:
        *out = (struct plan_phase){PLAN_RING, dsc_plan_part(n_bytes, n - 1, n), n - 1};
    }
    return number == 0;
}
