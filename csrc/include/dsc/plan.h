/*
 * The time of a step on many ranks, simulated from each rank's list of actions: no tensor, no process, integers only.
 *
 * A *program* is the list of one rank's actions: it computes (RUN), starts a transfer, or waits for one. Ranks that do
 * the same share a program. A *transfer* is a collective over a group, a copy, a read or write of a file, or work
 * beside the program. Transfers run beside the program in *lanes*: a lane runs one transfer after the other, in the
 * order of their starts.
 *
 * [Note: tree of links] Ranks hang on *nodes* (hosts), each through a port of its own. Nodes hang on other nodes
 * (racks), each by a link. Ports and links have two directions with a rate each. A node has an inner rate too, which
 * all bytes share that turn around at this node: bytes between two of its ranks, between two nodes below it, or between
 * a rank and such a node. The way from one rank to another goes up to the lowest node above both, through its inner
 * rate, and down.
 *
 * [Note: flows] A collective of N ranks with B bytes moves *streams*, each from one rank to another, all at one rate:
 *
 *   all-gather, reduce-scatter  in a ring, each rank to the next: B * (N - 1) / N, in N - 1 steps
 *   all-reduce                  the same, twice the bytes, twice the steps
 *   all-to-all                  each rank to each other: B / N, in one step
 *   broadcast, message          each rank but the last to the next: B, in N - 1 steps
 *   in two levels               see DSC_PLAN_TWO_LEVELS
 *
 * A step has the largest latency of any way that one of its streams takes; a way's latency is the sum over its ports
 * and links. After the latency of all steps the bytes flow, as fast as the slowest shared link allows. Links are shared
 * max-min fairly between streams: the link with the least rate for each of its streams fixes the rate of all flows that
 * cross it; the rest goes to the others. Rates are computed anew whenever a flow begins or ends. Bytes of a stream are
 * rounded up to whole bytes, times to whole ns, and rates down to 1/4096 byte/s.
 *
 * The functions are pure, so any thread may call them. They return DSC_ENOMEM if there is no scratch memory.
 */
#ifndef DSC_PLAN_H
#define DSC_PLAN_H

#include "dsc/status.h"
#include "dsc/types.h"

#ifdef __cplusplus
extern "C" {
#endif

#define DSC_PLAN_MAX_RANKS (1 << 14)
#define DSC_PLAN_MAX_NODES (1 << 14)
#define DSC_PLAN_MAX_AXES 64
#define DSC_PLAN_MAX_LANES 64
/* Limit for the actions of all programs together, and for the transfers of all ranks together. */
#define DSC_PLAN_MAX_ACTIONS ((int64_t)1 << 30)
/* Bytes or ns of an action or transfer. */
#define DSC_PLAN_MAX_AMOUNT ((int64_t)1 << 48)
#define DSC_PLAN_MAX_BYTES_PER_S ((int64_t)1 << 50)
#define DSC_PLAN_MAX_LATENCY_NS ((int64_t)1 << 40)
#define DSC_PLAN_MAX_SLOW_PPM ((int64_t)1000000000)
/* A later moment is DSC_EOVERFLOW. */
#define DSC_PLAN_MAX_NS ((int64_t)1 << 60)

enum dsc_plan_action_kind {
    DSC_PLAN_RUN,   /* amount ns, times the rank's slow_ppm */
    DSC_PLAN_START, /* transfer `amount` of the program, at most once; takes no time */
    DSC_PLAN_WAIT,  /* until transfer `amount`, started before, is over for this rank */
    DSC_PLAN_N_ACTION_KINDS
};

/* name, text in errors, whether it has a group */
#define DSC_PLAN_OP_MAP(X)                                                                              \
    X(ALL_GATHER, "all-gather", true)         /* bytes: the whole buffer, as each rank has it after */  \
    X(REDUCE_SCATTER, "reduce-scatter", true) /* bytes: the whole buffer, as each rank has it before */ \
    X(ALL_REDUCE, "all-reduce", true)         /* bytes: the buffer */                                   \
    X(ALL_TO_ALL, "all-to-all", true)         /* bytes: the buffer of one rank */                       \
    X(BROADCAST, "broadcast", true)           /* from the group's first rank */                         \
    X(MESSAGE, "message", true)               /* a group of two: its first rank sends to its second */  \
    X(COPY, "copy", false)                    /* between a rank's device and its host */                \
    X(READ, "read", false)                    /* from the nearest node with a read rate */              \
    X(WRITE, "write", false)                  /* to the nearest node with a write rate */               \
    X(WORK, "work", false)                    /* runs on its lane; amount is ns, and slow_ppm has no effect */

enum dsc_plan_op {
#define DSC_PLAN_ENUM(name, text, has_group) DSC_PLAN_##name,
    DSC_PLAN_OP_MAP(DSC_PLAN_ENUM)
#undef DSC_PLAN_ENUM
        DSC_PLAN_N_OPS
};

/* Flags of a transfer with a group. Without a flag it is a flow, beside the programs. */
enum {
    /*
     * Each rank moves its bytes itself, inside its first WAIT, after all ranks of the group (of a message: the sender)
     * have started the transfer: in pull_latency_ns, and at pull_bytes_per_s, of the lowest node above all ranks of the
     * group. Nothing is shared, and lanes do not matter. Senders of messages and broadcasts move nothing.
     */
    DSC_PLAN_PULL = 1,
    /*
     * All-gather, reduce-scatter and all-reduce in two levels, one after the other: inside each node that ranks of the
     * group hang on, in a ring; and between these nodes, where each rank of a node sends, or receives, an equal part of
     * what the other node needs, in one step. Each byte leaves a node once for each other node that needs it. A
     * reduce-scatter begins inside, an all-gather ends inside, and an all-reduce is both. A group on one node, or with
     * no two ranks on one node, takes a ring.
     */
    DSC_PLAN_TWO_LEVELS = 2,
};

/* Rates of 0 have no limit, latencies are of one step. */
struct dsc_plan_node {
    int32_t parent; /* an earlier node; -1 for the first node, the root */
    int64_t bytes_per_s;
    int64_t latency_ns;
    int64_t inner_bytes_per_s;
    int64_t pull_bytes_per_s; /* 0: a pull below this node is an error */
    int64_t pull_latency_ns;
    int64_t read_bytes_per_s;  /* 0: no file to read here */
    int64_t write_bytes_per_s; /* 0: no file to write here */
    int64_t file_latency_ns;
};

struct dsc_plan_rank {
    int32_t node;
    int32_t program;
    int64_t slow_ppm; /* 1,000,000: RUN takes its amount */
    int64_t port_bytes_per_s;
    int64_t port_latency_ns;
    int64_t copy_bytes_per_s; /* 0: a copy takes no time */
};

struct dsc_plan_action {
    int32_t kind;
    int64_t amount;
};

struct dsc_plan_transfer {
    int32_t op;
    int32_t axis; /* the group's; ignored for a transfer without a group */
    int32_t lane;
    int32_t flags;
    int64_t amount; /* bytes, or ns of WORK */
};

/* Everything belongs to the caller. Lists of lists lie one after the other, list i from begins[i] to begins[i + 1]. */
struct dsc_plan_step {
    const struct dsc_plan_node *nodes;
    const struct dsc_plan_rank *ranks;
    const struct dsc_plan_action *actions;
    const int64_t *action_begins; /* n_programs + 1 */
    const struct dsc_plan_transfer *transfers;
    const int64_t *transfer_begins; /* n_programs + 1 */
    const int32_t *members;         /* ranks of each group in the order of its ring */
    const int64_t *member_begins;   /* n_groups + 1 */
    const int32_t *group_of;        /* n_ranks * n_axes: the rank's group on an axis, or -1 */
    const int32_t *shown;           /* ranks whose spans are wanted */
    int32_t n_nodes;
    int32_t n_ranks;
    int32_t n_programs;
    int32_t n_groups;
    int32_t n_axes;
    int32_t n_lanes;
    int32_t n_shown;
};

struct dsc_plan_span {
    int64_t begin_ns;
    int64_t end_ns;
};

struct dsc_plan_usage {
    int64_t end_ns;       /* of the program */
    int64_t busy_ns;      /* of RUN */
    int64_t waited_ns;    /* of WAIT, pulls included */
    int64_t up_bytes;     /* through the port */
    int64_t down_bytes;   /* through the port */
    int64_t copied_bytes; /* between device and host */
};

struct dsc_plan_traffic {
    int64_t up_bytes;
    int64_t down_bytes;
    int64_t inner_bytes; /* pulls included */
    int64_t read_bytes;
    int64_t written_bytes;
};

/* The arrays are the caller's. A NULL array is not written, if it may be NULL. */
struct dsc_plan_times {
    int64_t makespan_ns;             /* the end of the last program and the last transfer that was not a pull */
    struct dsc_plan_usage *ranks;    /* n_ranks */
    struct dsc_plan_traffic *nodes;  /* n_nodes */
    int64_t *exposed_ns;             /* may be NULL: each transfer of rank 0, of rank 1...: the ns that its
                                        waits took */
    struct dsc_plan_span *actions;   /* may be NULL: each action of each shown rank */
    struct dsc_plan_span *transfers; /* may be NULL: each transfer of each shown rank: from its first byte's latency
                                        to its end; {-1, -1} if it never ran */
};

/*
 * Simulates a step. The k-th transfer that a rank starts on an axis belongs to the k-th of each other rank of the
 * group, which must have the same op, bytes and flags. The transfer begins when it is at the head of its lane on all
 * ranks of the group; a message when it is on the sender, and it is over for the receiver when it is at the head there
 * too.
 *
 * DSC_EINVAL names the first thing that is out of range, a group whose ranks start different transfers, or a rank that
 * waits for ever, with its action and what it waits for. DSC_EOVERFLOW: a time or a sum of bytes is too large. *times
 * is untouched after a failure.
 */
DSC_API dsc_status dsc_plan_simulate(const struct dsc_plan_step *step, struct dsc_plan_times *times);

#ifdef __cplusplus
}
#endif
#endif
