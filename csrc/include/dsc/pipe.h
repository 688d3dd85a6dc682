/*
 * Pipeline schedules as tables of integers: each rank's actions, their order, and their costs.
 *
 * A model is cut into n_ranks * n_virtual *stages*. A *schedule* gives each rank a list of *actions* on its stages and
 * on micro-batches. The life of a schedule:
 *
 *   dsc_pipe_build        each rank's computations, in order.
 *   dsc_pipe_add_comm     the same with a send and a receive wherever a result goes to another rank.
 *   dsc_pipe_add_gathers  the same with gathers and releases of weights, if ranks keep only shards of them.
 *   dsc_pipe_verify       proves such a table complete, ordered and free of deadlock.
 *   dsc_pipe_simulate     the begin and end of each action, and the bytes, forwards and weights that each rank holds
 *                         meanwhile.
 *
 * pipe/schedules.inc lists the schedules. Each schedule decides which rank has which stages: in a *loop* stage s lies
 * on rank s % n_ranks; in a *V* (two stages a rank) the second half of the stages goes back from the last rank to the
 * first.
 *
 * The text of an action is its stage, its letters and its micro-batch: 2F0, 1B3, 0SEND_F5. Gathers and releases have
 * the number of a unit in its place: 2G0, 2R0. All functions are pure, so any thread may call any of them. Planners
 * allocate scratch memory, and return DSC_ENOMEM if there is none.
 */
#ifndef DSC_PIPE_H
#define DSC_PIPE_H

#include "dsc/status.h"
#include "dsc/types.h"

#ifdef __cplusplus
extern "C" {
#endif

#define DSC_PIPE_MAX_RANKS 1024
#define DSC_PIPE_MAX_VIRTUAL 64
#define DSC_PIPE_MAX_MICRO_BATCHES (1 << 16)
/* Limit for all ranks together, without sends and receives. */
#define DSC_PIPE_MAX_ACTIONS (1 << 24)
#define DSC_PIPE_MAX_UNITS (1 << 20)
#define DSC_PIPE_MAX_UNIT_ELEMENTS ((int64_t)1 << 40)

/*
 * kind, its letters. The first four compute. The next four move data: _F carries an output and _B a gradient. The last
 * two act on a unit of weights, and their micro_batch is the number of the unit within its stage.
 */
#define DSC_PIPE_KIND_MAP(X)                                                         \
    X(FORWARD, "F")     /* the stage's forward */                                    \
    X(BACKWARD, "B")    /* the whole backward: gradients of inputs and of weights */ \
    X(INPUT, "I")       /* the backward's gradients of inputs; WEIGHT follows */     \
    X(WEIGHT, "W")      /* the gradients of weights that INPUT left */               \
    X(SEND_F, "SEND_F") /* the output of stage goes to stage + 1 */                  \
    X(RECV_F, "RECV_F") /* the input of stage comes from stage - 1 */                \
    X(SEND_B, "SEND_B") /* the gradient of stage's input goes to stage - 1 */        \
    X(RECV_B, "RECV_B") /* the gradient of stage's output comes from stage + 1 */    \
    X(GATHER, "G")      /* the unit becomes live: whole on this rank */              \
    X(RELEASE, "R")     /* the unit's whole weights are freed */

enum dsc_pipe_kind {
#define DSC_PIPE_ENUM(name, letters) DSC_PIPE_##name,
    DSC_PIPE_KIND_MAP(DSC_PIPE_ENUM)
#undef DSC_PIPE_ENUM
        DSC_PIPE_N_KINDS
};

struct dsc_pipe_action {
    int32_t kind; /* enum dsc_pipe_kind */
    int32_t stage;
    int32_t micro_batch; /* of GATHER and RELEASE: the unit, 0 for the first of the stage */
};

struct dsc_pipe_shape {
    int32_t n_ranks;         /* 1 to DSC_PIPE_MAX_RANKS */
    int32_t n_virtual;       /* stages a rank, 1 to DSC_PIPE_MAX_VIRTUAL */
    int32_t n_micro_batches; /* 1 to DSC_PIPE_MAX_MICRO_BATCHES */
};

/* A schedule's requirements and properties. */
struct dsc_pipe_traits {
    int32_t min_virtual;
    int32_t max_virtual;
    int32_t min_micro_batches_per_rank; /* n_micro_batches is at least this times n_ranks; 0: any number */
    bool is_v;                          /* stages lie in a V, not in a loop */
    bool splits_backward;               /* it has INPUT and WEIGHT actions */
    bool has_backward;
};

/*
 * Weights that are gathered together, for example those of a layer. The data-parallel ranks of a stage each keep a
 * shard; a computation on the stage (F, B, I, W) needs all units of the stage whole.
 */
struct dsc_pipe_unit {
    int32_t stage;
    int64_t numel;     /* elements of the whole unit, 0 to DSC_PIPE_MAX_UNIT_ELEMENTS */
    int64_t gather_ns; /* at least 0; only dsc_pipe_simulate looks at it */
};

/* The lists of all ranks. Everything is the caller's, and borrowed. */
struct dsc_pipe_table {
    const struct dsc_pipe_action *actions; /* rank r's: [begins[r], begins[r + 1]) */
    const int64_t *begins;                 /* n_ranks + 1 */
    const int32_t *rank_of;                /* n_stages: the rank of each stage */
    int32_t n_ranks;
    int32_t n_stages;
    int32_t n_micro_batches;
    bool has_backward;
    const struct dsc_pipe_unit *units; /* by stage, each stage's in the order of its forward; NULL without units */
    int32_t n_units;                   /* 0: weights are always whole, and no action gathers */
    int64_t limit_elements;            /* the most elements of live units on a rank; -1: no limit */
};

/* The time and memory of one stage for one micro-batch. All are at least 0. */
struct dsc_pipe_cost {
    int64_t forward_ns;
    int64_t input_ns; /* the gradients of inputs; BACKWARD takes input_ns + weight_ns */
    int64_t weight_ns;
    int64_t kept_bytes;   /* held from the stage's forward to the end of its BACKWARD or INPUT */
    int64_t weight_bytes; /* held from the end of INPUT to the end of WEIGHT */
};

struct dsc_pipe_span {
    int64_t begin_ns;
    int64_t end_ns;
};

struct dsc_pipe_usage {
    int64_t busy_ns;
    int64_t peak_bytes;
    int32_t peak_live; /* the largest number of forwards, over all its stages, whose BACKWARD or WEIGHT is still to
                          come */
    int64_t peak_live_elements; /* of units; each counts from its gather in the list to its release */
    int64_t n_gathers;
    int64_t gathered_elements; /* the sum over all gathers */
    int64_t link_ns;           /* the time of its gathers */
};

/* The schedules, in the order of schedules.inc. NULL past the last. */
DSC_API const char *dsc_pipe_schedule_name(int32_t index);

/* DSC_ENOTFOUND lists the schedules. */
DSC_API dsc_status dsc_pipe_traits_of(const char *schedule, struct dsc_pipe_traits *out_traits);

/* DSC_EINVAL names the number that the schedule does not allow, and the nearest allowed number. */
DSC_API dsc_status dsc_pipe_check(const char *schedule, const struct dsc_pipe_shape *shape);

/* The rank of a stage, 0 <= stage < n_ranks * n_virtual. */
DSC_API dsc_status dsc_pipe_rank_of(const char *schedule, const struct dsc_pipe_shape *shape, int32_t stage,
                                    int32_t *out_rank);

/*
 * Lists the computations of rank. Call with out_actions NULL for the count, then with an array of capacity entries;
 * DSC_ENOSPC if capacity is too small.
 */
DSC_API dsc_status dsc_pipe_build(const char *schedule, const struct dsc_pipe_shape *shape, int32_t rank,
                                  int64_t capacity, struct dsc_pipe_action *out_actions, int64_t *out_n);

/*
 * Adds sends and receives to a table. A send follows directly after the action that makes a result for another rank.
 * The matching receive stands at the corresponding point of the other rank's list. All sends and receives come from one
 * order of all actions. So even sends that wait for their receiver do not deadlock, and messages between two ranks
 * arrive in the expected order and need no tags.
 *
 * out_begins has n_ranks + 1 entries. If out_actions is NULL, only out_begins is set, and its last entry is the
 * required capacity. DSC_EINVAL if the table already has sends, receives, gathers or releases, or cannot run to its
 * end; then the sentence names an action that waits for ever. Units do not matter for it.
 */
DSC_API dsc_status dsc_pipe_add_comm(const struct dsc_pipe_table *table, int64_t capacity,
                                     struct dsc_pipe_action *out_actions, int64_t *out_begins);

/*
 * Adds gathers and releases of table->units to a table, with or without sends and receives. Live elements never exceed
 * limit_elements (ZeRO's stage3_max_live_parameters).
 *
 * A unit is gathered before its first use and released after its last use. It stays live in between as long as the
 * limit allows. If a computation needs more room, the rank gives up units of the stage whose next use is farthest (L.
 * A. Belady, A study of replacement algorithms for a virtual-storage computer, 1966): these are released after their
 * last use before that computation, and gathered again for their next use. With units of equal size no placement
 * gathers fewer elements. With a limit that holds all units of a rank, each is gathered once. With a limit that holds
 * only the stage that computes, a stage is gathered once for each uninterrupted run of its computations. WEIGHT uses
 * the weights again, so units that were released since INPUT are gathered for it.
 *
 * A gather stands as early as the limit allows, but at most `ahead` (>= 0) computations before its use, so that it runs
 * beside them. It follows the sends of the computation before it and precedes the receives of the next one, so that it
 * also runs while the rank waits for a message. A rank's gathers stand in the order of their uses. Within a
 * stage that is the reverse order of units for BACKWARD and INPUT, and their order for FORWARD and WEIGHT. A release
 * directly follows the computation.
 *
 * The lists depend only on the table and on ahead. So all data-parallel ranks of a stage have the same list, and take
 * part in the same gathers in the same order; a rank that waits in a bubble is at the same place of its list as its
 * peers. A gather may even block until all peers have reached it: the copies of the pipeline have one common order of
 * all actions, in which a gather of the copies is one step.
 *
 * out_begins has n_ranks + 1 entries. If out_actions is NULL, only out_begins is set, and its last entry is the
 * required capacity. DSC_EINVAL if the table already has gathers, or if a computation needs more than the limit: the
 * sentence names the stage and both numbers.
 */
DSC_API dsc_status dsc_pipe_add_gathers(const struct dsc_pipe_table *table, int32_t ahead, int64_t capacity,
                                        struct dsc_pipe_action *out_actions, int64_t *out_begins);

/*
 * Verifies a table. DSC_OK means that five rules hold. Every stage forwards every micro-batch once, on the rank that
 * has the stage, and with has_backward goes backward once (whole, or input before weight). Each result that another
 * rank needs is sent once, and received once, before its use. Messages between two ranks are received in the order in
 * which they are sent. The lists run to their end even if a send returns only when the other rank has reached the
 * receive. All units of a stage are live when it computes, each gather serves at least one computation, only units that
 * are not live are gathered and only live units are released, nothing is live at the end, and live elements never
 * exceed limit_elements. Otherwise the call returns DSC_EINVAL, and the sentence names the first action that breaks a
 * rule, or a cycle of ranks that wait for one another.
 */
DSC_API dsc_status dsc_pipe_verify(const struct dsc_pipe_table *table);

/*
 * Simulates the table. costs has n_stages entries. A result reaches another rank transfer_ns (>= 0) after it was made;
 * sends and receives themselves take no time. The times are the same for a table with sends and receives and for a
 * table without them. A gather begins when the rank reaches it and its earlier gathers have ended; it takes the unit's
 * gather_ns, and the rank goes on meanwhile. A computation waits for the gathers of its stage's units. out_spans has an
 * entry for each action, or is NULL. out_usage has an entry for each rank. The makespan is the end of the last action.
 * DSC_EINVAL if the lists wait for ever or break a rule for units, DSC_EOVERFLOW if times or bytes do not fit int64_t.
 */
DSC_API dsc_status dsc_pipe_simulate(const struct dsc_pipe_table *table, const struct dsc_pipe_cost *costs,
                                     int64_t transfer_ns, struct dsc_pipe_span *out_spans,
                                     struct dsc_pipe_usage *out_usage, int64_t *out_makespan_ns);

/* One way to run a model: its schedule, its shape, and the costs of the stages that this shape cuts it into. */
struct dsc_pipe_candidate {
    const char *schedule;
    struct dsc_pipe_shape shape;
    const struct dsc_pipe_cost *costs; /* n_ranks * n_virtual, borrowed */
};

struct dsc_pipe_outcome {
    int64_t makespan_ns; /* -1: dsc_pipe_check refuses the candidate */
    int64_t peak_bytes;  /* the largest of any rank */
};

/*
 * Chooses the candidate with the least makespan whose ranks each hold at most limit_bytes; of equals the earlier.
 * out_outcomes has an entry for each candidate. DSC_ENOSPC if all candidates need more: the sentence names the
 * candidate that needs least, and only out_outcomes is set. DSC_EINVAL if dsc_pipe_check refuses all candidates; the
 * sentence is about the last candidate.
 */
DSC_API dsc_status dsc_pipe_choose(const struct dsc_pipe_candidate *candidates, int32_t n_candidates,
                                   int64_t transfer_ns, int64_t limit_bytes, struct dsc_pipe_outcome *out_outcomes,
                                   int32_t *out_index);

/* The text of an action with a final 0: at most 40 bytes. DSC_ENOSPC if n_bytes is too small. */
DSC_API dsc_status dsc_pipe_format(const struct dsc_pipe_action *action, size_t n_bytes, char *out_text);

/*
 * Parses the text of an action. Numbers are decimal, without sign or leading zeros. DSC_EINVAL if the text is not an
 * action.
 */
DSC_API dsc_status dsc_pipe_parse(const char *text, struct dsc_pipe_action *out_action);

#ifdef __cplusplus
}
#endif
#endif
