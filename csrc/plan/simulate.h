/* Shared by the files of this folder: the index of a step, the loads of collectives, shared links.
 */
#ifndef DSC_PLAN_SIMULATE_H
#define DSC_PLAN_SIMULATE_H

#include "dsc/plan.h"

/* Limits of rates, in the order of struct dsc_plan_usage and struct dsc_plan_traffic. */
enum { PLAN_PORT_UP, PLAN_PORT_DOWN, PLAN_COPIED, PLAN_OF_A_RANK };
enum { PLAN_LINK_UP, PLAN_LINK_DOWN, PLAN_INNER, PLAN_READ, PLAN_WRITTEN, PLAN_OF_A_NODE };

static inline int32_t plan_of_rank(int32_t rank, int32_t which)
{
    return rank * PLAN_OF_A_RANK + which;
}

static inline int32_t plan_of_node(const struct dsc_plan_step *step, int32_t node, int32_t which)
{
    return step->n_ranks * PLAN_OF_A_RANK + node * PLAN_OF_A_NODE + which;
}

static inline int32_t plan_n_resources(const struct dsc_plan_step *step)
{
    return plan_of_node(step, step->n_nodes, 0);
}

/*
 * Streams are counted in parts, so that the equal parts of a host's ranks are whole numbers for up to 10, and for 12,
 * 14, 15 and 16 ranks. Other fractions are rounded up.
 */
#define PLAN_STREAM 5040

/* Parts of streams that cross a resource. */
struct plan_load {
    int64_t parts;
    int32_t resource;
};

/* The streams that a group moves in one go. */
enum plan_shape {
    PLAN_RING,
    PLAN_EACH_TO_EACH,
    PLAN_CHAIN,          /* a ring without its last stream */
    PLAN_RINGS_INSIDE,   /* a ring on each node */
    PLAN_SUMS_BETWEEN,   /* to each rank of another node, its slice of that node's sums */
    PLAN_SLICES_BETWEEN, /* from each rank of another node, its slice */
    PLAN_N_SHAPES
};

/* A shape on the links of one group. */
struct plan_route {
    struct plan_load *loads; /* owned; NULL until someone asks. Loads on resources with a limit come first */
    int32_t n_limited;
    int32_t n_loads;
    int64_t step_ns; /* the largest latency of a stream's way */
};

struct plan_group {
    const int32_t *members;
    int64_t first_instance; /* the number of its first transfer */
    int32_t n;
    int32_t axis;
    int32_t root;         /* the lowest node above all ranks */
    int32_t n_hosts;      /* nodes that ranks hang on */
    int32_t most_on_host; /* ranks of one node */
    struct plan_route routes[PLAN_N_SHAPES];
};

/* All that a step says before it runs. */
struct plan_index {
    const struct dsc_plan_step *step;
    struct plan_group *groups;
    int64_t *capacities;     /* each resource's rate in bytes/s, 0: no limit */
    int32_t *depths;         /* each node's distance from the root */
    int64_t *first_transfer; /* n_ranks + 1: begins of the ranks in lists of the transfers of all ranks */
    int32_t *numbers;        /* each transfer's place on its axis, in the order of START */
    int32_t *by_lane;        /* transfers of each program's lanes, in the order of START, pulls left out */
    int64_t *lane_begins;    /* n_programs * n_lanes + 1 */
    int32_t *by_axis;        /* transfers of each program's axes, in the order of START */
    int64_t *axis_begins;    /* n_programs * n_axes + 1 */
    int32_t *read_nodes;     /* each node's nearest node with a file to read, or -1 */
    int32_t *write_nodes;
    int64_t n_instances;
    int32_t *node_counts; /* n_nodes, scratch */
    int32_t *rank_marks;  /* n_ranks, scratch */
};

/* Checks a step, and sets up the index. The caller clears the index, also after a failure. */
dsc_status dsc_plan_make_index(const struct dsc_plan_step *step, struct plan_index *out);
void dsc_plan_clear_index(struct plan_index *index);

static inline const struct dsc_plan_transfer *plan_transfer(const struct dsc_plan_step *step, int32_t rank,
                                                            int32_t transfer)
{
    return &step->transfers[step->transfer_begins[step->ranks[rank].program] + transfer];
}

/* The transfer of a rank that is the k-th on an axis. */
static inline int32_t plan_kth(const struct plan_index *index, int32_t rank, int32_t axis, int64_t k)
{
    int64_t row = (int64_t)index->step->ranks[rank].program * index->step->n_axes + axis;

    return index->by_axis[index->axis_begins[row] + k];
}

bool dsc_plan_has_group(int32_t op);
const char *dsc_plan_op_name(int32_t op);

/* A flow of a transfer: streams of n_bytes each, after some steps of latency. */
struct plan_phase {
    enum plan_shape shape;
    int64_t n_bytes;
    int64_t n_steps;
};

/* False: the transfer has no phase of that number. */
bool dsc_plan_phase_of(const struct plan_group *group, const struct dsc_plan_transfer *transfer, int32_t number,
                       struct plan_phase *out);

/* ceil(n_bytes * numerator / denominator) */
int64_t dsc_plan_part(int64_t n_bytes, int64_t numerator, int64_t denominator);

/* Scratch memory for routes: zeros between calls. */
struct plan_router {
    const struct plan_index *index;
    int64_t *parts;               /* of each resource */
    int32_t *touched;             /* resources with parts */
    struct plan_branch *branches; /* of each node */
    int32_t *firsts;              /* of each node */
    int32_t *lasts;               /* of each node */
    int32_t n_touched;
};

dsc_status dsc_plan_open_router(const struct plan_index *index, struct plan_router *out);
void dsc_plan_close_router(struct plan_router *router);

/* The group's route of a shape, made at the first call. */
dsc_status dsc_plan_route(struct plan_router *router, struct plan_group *group, enum plan_shape shape,
                          const struct plan_route **out);

/* A rate counts 1/4096 byte/s, so work of one byte counts 4096 * 10^9: rate * ns. */
#define PLAN_RATE_UNITS 4096
#define PLAN_WORK_OF_A_BYTE ((__int128)1000000000 * PLAN_RATE_UNITS)

struct plan_flow {
    __int128 work; /* left of each stream at since_ns */
    __int128 rate; /* a stream's; 0 before the first share */
    int64_t since_ns;
    const struct plan_load *loads; /* with a limit */
    int32_t n_loads;
    int32_t version; /* the rate's: ends computed for another version are void */
    int64_t owner;   /* the simulator's */
    int32_t phase;   /* the simulator's */
    int32_t mark;
    bool is_fixed;
};

struct plan_link {
    __int128 left; /* rate times parts */
    __int128 share;
    int64_t parts;
    int32_t *flows; /* owned: flows that cross it */
    int32_t n_flows;
    int32_t capacity;
    int32_t mark;
    bool is_changed;
};

/* The flows under way, and the links that they share. */
struct plan_sharing {
    const int64_t *capacities;
    struct plan_link *links;
    struct plan_flow *flows;
    int32_t *free_flows;
    int32_t *touched;   /* links with another set of flows, then all links that this concerns */
    int32_t *concerned; /* flows under computation, then flows with another rate */
    int32_t n_links;
    int32_t n_flows;
    int32_t n_free;
    int32_t capacity;
    int32_t n_touched;
    int32_t n_concerned;
    int32_t mark;
};

dsc_status dsc_plan_open_sharing(const int64_t *capacities, int32_t n_links, struct plan_sharing *out);
void dsc_plan_close_sharing(struct plan_sharing *sharing);

/* A flow that crosses nothing yet. Its number is used again after dsc_plan_drop_flow. */
dsc_status dsc_plan_take_flow(struct plan_sharing *sharing, int32_t *out_flow);
void dsc_plan_drop_flow(struct plan_sharing *sharing, int32_t flow);

/* loads is kept until the flow leaves; it must have a load, all on links with a limit. */
dsc_status dsc_plan_join(struct plan_sharing *sharing, int32_t flow, const struct plan_load *loads, int32_t n_loads,
                         __int128 work, int64_t now_ns);
void dsc_plan_leave(struct plan_sharing *sharing, int32_t flow);

/* Computes rates anew. sharing->concerned then has the flows with another rate. */
void dsc_plan_share(struct plan_sharing *sharing, int64_t now_ns);

struct plan_event {
    int64_t ns;
    int64_t what; /* the simulator's */
    int32_t kind;
    int32_t version;
};

/* Events, the earliest first. */
struct plan_heap {
    struct plan_event *events; /* owned */
    int64_t n;
    int64_t capacity;
};

dsc_status dsc_plan_push_event(struct plan_heap *heap, struct plan_event event);
struct plan_event dsc_plan_pop_event(struct plan_heap *heap);

#endif
