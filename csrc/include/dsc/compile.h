/*
 * The proof of a rewritten graph (torch.compile with ZeRO): each weight is read while it is held, and each gradient is
 * reduced once.
 *
 * Nodes are numbered 0..n_nodes-1 in the order in which they run. A *unit* is the group of parameters that one GATHER
 * gathers, a *slot* is the number of a parameter whose gradient a REDUCE reduces. A unit is *gathered* from its GATHER
 * to its RELEASE, and *held* from its WAIT to its RELEASE. When a graph begins, no unit is gathered.
 *
 * Everything here works on numbers only: it touches no tensor, and nothing allocates. Any thread may call anything.
 */
#ifndef DSC_COMPILE_H
#define DSC_COMPILE_H

#include "dsc/status.h"
#include "dsc/types.h"

#ifdef __cplusplus
extern "C" {
#endif

#define DSC_COMPILE_KIND_MAP(X)                                        \
    X(PLAIN) /* reads and writes memory */                             \
    X(GATHER)                                                          \
    X(WAIT) /* one more WAIT of a unit that is held changes nothing */ \
    X(RELEASE)                                                         \
    X(REDUCE)                                                          \
    X(OUTPUT) /* only the last node; a graph may have none */

enum dsc_compile_kind {
#define DSC_COMPILE_ENUM(name) DSC_COMPILE_##name,
    DSC_COMPILE_KIND_MAP(DSC_COMPILE_ENUM)
#undef DSC_COMPILE_ENUM
        DSC_COMPILE_N_KINDS
};

/* What a graph may not do: name, its text, and the sentence about a unit or slot. The values are part of the ABI. */
#define DSC_COMPILE_RULE_MAP(X)                                                                            \
    X(NONE, 0, "", "", "")                                                                                 \
    X(READ_NOT_HELD, 1, "read_not_held", "unit", "is read, but not between its wait and its release")      \
    X(WAIT_NOT_GATHERED, 2, "wait_not_gathered", "unit", "is waited for, but not gathered")                \
    X(GATHER_TWICE, 3, "gather_twice", "unit", "is gathered again before its release")                     \
    X(RELEASE_NOT_GATHERED, 4, "release_not_gathered", "unit", "is released, but not gathered")            \
    X(RELEASE_NOT_WAITED, 5, "release_not_waited", "unit", "is released, but was gathered without a wait") \
    X(NEVER_RELEASED, 6, "never_released", "unit", "is still gathered at the end")                         \
    X(REDUCE_TWICE, 7, "reduce_twice", "slot", "is reduced a second time")                                 \
    X(REDUCE_UNWANTED, 8, "reduce_unwanted", "slot", "is reduced, but not wanted")                         \
    X(NEVER_REDUCED, 9, "never_reduced", "slot", "is wanted, but never reduced")                           \
    X(WEIGHT_WRITTEN, 10, "weight_written", "unit", "has a weight that is written to")

enum dsc_compile_rule {
#define DSC_COMPILE_ENUM(name, value, text, noun, sentence) DSC_COMPILE_##name = value,
    DSC_COMPILE_RULE_MAP(DSC_COMPILE_ENUM)
#undef DSC_COMPILE_ENUM
        DSC_COMPILE_N_RULES
};

/*
 * A graph. reads and writes are lists of units, one list a node: those of node i are [starts[i], starts[i + 1]). They
 * count for PLAIN and REDUCE nodes, which work on memory, and not for the others: these name weights as tensors only.
 * A unit may be listed more than once.
 */
struct dsc_compile_graph {
    int64_t n_nodes;
    int32_t n_units;
    int32_t n_slots;
    const int32_t *kinds;        /* [n_nodes]: enum dsc_compile_kind */
    const int32_t *units;        /* [n_nodes]: the unit of a GATHER, WAIT or RELEASE, else -1 */
    const int32_t *slots;        /* [n_nodes]: the slot of a REDUCE, else -1 */
    const int64_t *read_starts;  /* [n_nodes + 1]: from 0 to n_reads */
    const int64_t *write_starts; /* [n_nodes + 1]: from 0 to n_writes */
    const int32_t *reads;        /* [n_reads]: units whose weights the node reads, directly or through views */
    const int32_t *writes;       /* [n_writes]: units whose weights the node writes to, directly or through views */
    int64_t n_reads;
    int64_t n_writes;
    const uint8_t *wanted; /* [n_slots]: how often the slot has to be reduced, 0 or 1 */
    uint8_t *scratch;      /* n_units + n_slots bytes */
};

struct dsc_compile_fault {
    int32_t rule;         /* enum dsc_compile_rule; 0: the graph is right */
    int64_t node;         /* -1 without a fault; n_nodes: the end of a graph without OUTPUT */
    int32_t unit_or_slot; /* -1 without a fault */
};

/*
 * Finds the first fault of a graph in O(n_nodes + n_reads + n_writes + n_units + n_slots): that of the lowest node,
 * reads before writes, each in the order of its list. At the end, units come before slots, the lowest number first.
 *
 * DSC_OK: the graph was checked. DSC_EINVAL names the first argument that describes no graph, such as a unit or slot
 * out of range, or starts that decrease; *out is untouched then.
 */
DSC_API dsc_status dsc_compile_verify(const struct dsc_compile_graph *graph, struct dsc_compile_fault *out);

/* The text of a rule ("read_not_held"); "" for NONE, NULL for a value that is not in the map. Static storage. */
DSC_API const char *dsc_compile_rule_name(int32_t rule);

/*
 * Writes the sentence of a fault, "node 5: unit 2 is read, ...", cut at n_bytes - 1; "" for no fault. DSC_EINVAL: the
 * rule is not in the map, or n_bytes is 0.
 */
DSC_API dsc_status dsc_compile_format(const struct dsc_compile_fault *fault, size_t n_bytes, char *out);

#ifdef __cplusplus
}
#endif
#endif
