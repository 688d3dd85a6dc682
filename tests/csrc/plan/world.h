/* Builds steps for tests of csrc/plan: ranks, nodes, groups and programs are added one after the other. */
#ifndef TEST_PLAN_WORLD_H
#define TEST_PLAN_WORLD_H

#include "test.h"

#include "dsc/plan.h"

#define GB INT64_C(1000000000)
#define MAX_WORLD_RANKS 1024
#define MAX_WORLD_NODES 160
#define MAX_WORLD_ACTIONS 20000
#define MAX_WORLD_TRANSFERS 4000
#define MAX_WORLD_GROUPS 600
#define MAX_WORLD_PROGRAMS 64
#define WORLD_AXES 4
#define WORLD_LANES 4

struct world {
    struct dsc_plan_node nodes[MAX_WORLD_NODES];
    struct dsc_plan_rank ranks[MAX_WORLD_RANKS];
    struct dsc_plan_action actions[MAX_WORLD_ACTIONS];
    int64_t action_begins[MAX_WORLD_PROGRAMS + 1];
    struct dsc_plan_transfer transfers[MAX_WORLD_TRANSFERS];
    int64_t transfer_begins[MAX_WORLD_PROGRAMS + 1];
    int32_t members[WORLD_AXES * MAX_WORLD_RANKS];
    int64_t member_begins[MAX_WORLD_GROUPS + 1];
    int32_t group_of[WORLD_AXES * MAX_WORLD_RANKS];
    int32_t shown[MAX_WORLD_RANKS];
    struct dsc_plan_step step;
    /* Results */
    struct dsc_plan_usage usage[MAX_WORLD_RANKS];
    struct dsc_plan_traffic traffic[MAX_WORLD_NODES];
    int64_t *exposed_ns;
    struct dsc_plan_span *action_spans;
    struct dsc_plan_span *transfer_spans;
    struct dsc_plan_times times;
};

/* A world is large: one is used again and again. */
static inline void clear_world(struct world *w)
{
    free(w->exposed_ns);
    free(w->action_spans);
    free(w->transfer_spans);
    memset(w, 0, sizeof *w);
    memset(w->group_of, 0xff, sizeof w->group_of);
    w->step = (struct dsc_plan_step){.nodes = w->nodes,
                                     .ranks = w->ranks,
                                     .actions = w->actions,
                                     .action_begins = w->action_begins,
                                     .transfers = w->transfers,
                                     .transfer_begins = w->transfer_begins,
                                     .members = w->members,
                                     .member_begins = w->member_begins,
                                     .group_of = w->group_of,
                                     .shown = w->shown,
                                     .n_axes = WORLD_AXES,
                                     .n_lanes = WORLD_LANES};
}

static inline struct dsc_plan_node *add_node(struct world *w, int32_t parent, int64_t bytes_per_s, int64_t latency_ns)
{
    struct dsc_plan_node *node = &w->nodes[w->step.n_nodes++];

    node->parent = parent;
    node->bytes_per_s = bytes_per_s;
    node->latency_ns = latency_ns;
    return node;
}

static inline struct dsc_plan_rank *add_rank(struct world *w, int32_t node, int32_t program, int64_t bytes_per_s, int64_t latency_ns)
{
    struct dsc_plan_rank *rank = &w->ranks[w->step.n_ranks++];

    *rank = (struct dsc_plan_rank){node, program, 1000000, bytes_per_s, latency_ns, 0};
    return rank;
}

/* n hosts below a root, each with k ranks of program 0. */
static inline void add_hosts(struct world *w, int32_t n, int32_t k, int64_t port_rate, int64_t port_ns, int64_t link_rate, int64_t link_ns)
{
    add_node(w, -1, 0, 0);
    for (int32_t host = 0; host < n; host++) {
        add_node(w, 0, link_rate, link_ns);
        for (int32_t i = 0; i < k; i++)
            add_rank(w, host + 1, 0, port_rate, port_ns);
    }
}

/* A group of n ranks: first, first + stride, ... */
static inline void add_group(struct world *w, int32_t axis, int32_t first, int32_t stride, int32_t n)
{
    int32_t number = w->step.n_groups++;
    int64_t begin = w->member_begins[number];

    for (int32_t i = 0; i < n; i++) {
        w->members[begin + i] = first + i * stride;
        w->group_of[(first + i * stride) * WORLD_AXES + axis] = number;
    }
    w->member_begins[number + 1] = begin + n;
}

static inline void add_program(struct world *w)
{
    int32_t n = ++w->step.n_programs;

    w->action_begins[n] = w->action_begins[n - 1];
    w->transfer_begins[n] = w->transfer_begins[n - 1];
}

/* Adds to the last program. */
static inline void act(struct world *w, int32_t kind, int64_t amount)
{
    w->actions[w->action_begins[w->step.n_programs]++] = (struct dsc_plan_action){kind, amount};
}

/* The number of a new transfer of the last program, which it starts at once. */
static inline int64_t begin(struct world *w, int32_t op, int32_t axis, int32_t lane, int32_t flags, int64_t amount)
{
    int32_t n = w->step.n_programs;
    int64_t number = w->transfer_begins[n] - w->transfer_begins[n - 1];

    w->transfers[w->transfer_begins[n]++] = (struct dsc_plan_transfer){op, axis, lane, flags, amount};
    act(w, DSC_PLAN_START, number);
    return number;
}

/* Starts a transfer, and waits for it. */
static inline void transfer(struct world *w, int32_t op, int32_t axis, int32_t lane, int32_t flags, int64_t amount)
{
    act(w, DSC_PLAN_WAIT, begin(w, op, axis, lane, flags, amount));
}

/* Simulates with spans of the ranks in shown. */
static inline dsc_status simulate(struct world *w)
{
    int64_t n_transfers = 0;
    int64_t n_actions = 0;
    int64_t n_spans = 0;

    for (int32_t i = 0; i < w->step.n_ranks; i++)
        n_transfers += w->transfer_begins[w->ranks[i].program + 1] - w->transfer_begins[w->ranks[i].program];
    for (int32_t i = 0; i < w->step.n_shown; i++) {
        int32_t program = w->ranks[w->shown[i]].program;

        n_actions += w->action_begins[program + 1] - w->action_begins[program];
        n_spans += w->transfer_begins[program + 1] - w->transfer_begins[program];
    }
    free(w->exposed_ns);
    free(w->action_spans);
    free(w->transfer_spans);
    w->exposed_ns = test_alloc((size_t)n_transfers * sizeof *w->exposed_ns);
    w->action_spans = test_alloc((size_t)n_actions * sizeof *w->action_spans);
    w->transfer_spans = test_alloc((size_t)n_spans * sizeof *w->transfer_spans);
    w->times = (struct dsc_plan_times){-1, w->usage, w->traffic, w->exposed_ns, w->action_spans, w->transfer_spans};
    return dsc_plan_simulate(&w->step, &w->times);
}

static inline int64_t ceil_of(__int128 a, __int128 b)
{
    return (int64_t)((a + b - 1) / b);
}

#endif
