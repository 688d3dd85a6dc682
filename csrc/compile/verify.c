/* Follows each unit and slot through a graph. A first pass over the arguments makes every index safe to use. */
#include "dsc/compile.h"

#include "base/fail.h"

#include <stdio.h>
#include <string.h>

enum { RELEASED, GATHERED, HELD };

static dsc_status check_present(const void *data, const char *name, int64_t n)
{
    if (data == NULL && n > 0)
        return dsc_fail(DSC_EINVAL, "%s is NULL for %lld elements", name, (long long)n);
    return DSC_OK;
}

static dsc_status check_lists(const int64_t *starts, const int32_t *units, int64_t n, const char *name,
                              const struct dsc_compile_graph *graph)
{
    if (n < 0)
        return dsc_fail(DSC_EINVAL, "n_%ss is %lld, must not be negative", name, (long long)n);
    if (starts == NULL || (units == NULL && n > 0))
        return dsc_fail(DSC_EINVAL, "%s%s is NULL", name, starts == NULL ? "_starts" : "s");
    if (starts[0] != 0 || starts[graph->n_nodes] != n)
        return dsc_fail(DSC_EINVAL, "%s_starts goes from %lld to %lld, must go from 0 to %lld", name,
                        (long long)starts[0], (long long)starts[graph->n_nodes], (long long)n);
    for (int64_t i = 0; i < graph->n_nodes; i++)
        if (starts[i] > starts[i + 1])
            return dsc_fail(DSC_EINVAL, "%s_starts[%lld] is %lld after %lld, must not decrease", name,
                            (long long)(i + 1), (long long)starts[i + 1], (long long)starts[i]);
    for (int64_t i = 0; i < n; i++)
        if (units[i] < 0 || units[i] >= graph->n_units)
            return dsc_fail(DSC_EINVAL, "%ss[%lld] is %d of %d units", name, (long long)i, (int)units[i],
                            (int)graph->n_units);
    return DSC_OK;
}

/* number belongs to a node of a kind that has one (in [0, n)), or is -1. */
static dsc_status check_number(int32_t number, bool has_one, int32_t n, const char *name, int64_t node)
{
    if (has_one ? number < 0 || number >= n : number != -1)
        return dsc_fail(DSC_EINVAL, "%ss[%lld] is %d, must be %s %d", name, (long long)node, (int)number,
                        has_one ? "one of" : "exactly", has_one ? (int)n : -1);
    return DSC_OK;
}

static dsc_status check_node(const struct dsc_compile_graph *graph, int64_t i)
{
    int32_t kind = graph->kinds[i];
    bool has_unit = kind == DSC_COMPILE_GATHER || kind == DSC_COMPILE_WAIT || kind == DSC_COMPILE_RELEASE;

    if (kind < 0 || kind >= DSC_COMPILE_N_KINDS)
        return dsc_fail(DSC_EINVAL, "kinds[%lld] is %d, must be a dsc_compile_kind", (long long)i, (int)kind);
    if (kind == DSC_COMPILE_OUTPUT && i + 1 != graph->n_nodes)
        return dsc_fail(DSC_EINVAL, "kinds[%lld] is OUTPUT, must be the last of %lld nodes", (long long)i,
                        (long long)graph->n_nodes);
    DSC_TRY(check_number(graph->units[i], has_unit, graph->n_units, "unit", i));
    return check_number(graph->slots[i], kind == DSC_COMPILE_REDUCE, graph->n_slots, "slot", i);
}

static dsc_status check_graph(const struct dsc_compile_graph *graph)
{
    if (graph == NULL || graph->n_nodes < 0 || graph->n_units < 0 || graph->n_slots < 0)
        return dsc_fail(DSC_EINVAL, "%s", graph == NULL ? "graph is NULL" : "a count of the graph is negative");
    DSC_TRY(check_present(graph->kinds, "kinds", graph->n_nodes));
    DSC_TRY(check_present(graph->units, "units", graph->n_nodes));
    DSC_TRY(check_present(graph->slots, "slots", graph->n_nodes));
    DSC_TRY(check_present(graph->wanted, "wanted", graph->n_slots));
    DSC_TRY(check_present(graph->scratch, "scratch", (int64_t)graph->n_units + graph->n_slots));
    for (int64_t i = 0; i < graph->n_nodes; i++)
        DSC_TRY(check_node(graph, i));
    DSC_TRY(check_lists(graph->read_starts, graph->reads, graph->n_reads, "read", graph));
    DSC_TRY(check_lists(graph->write_starts, graph->writes, graph->n_writes, "write", graph));
    for (int32_t slot = 0; slot < graph->n_slots; slot++)
        if (graph->wanted[slot] > 1)
            return dsc_fail(DSC_EINVAL, "wanted[%d] is %d, must be 0 or 1", (int)slot, (int)graph->wanted[slot]);
    return DSC_OK;
}

static struct dsc_compile_fault fault_of(int32_t rule, int64_t node, int32_t unit_or_slot)
{
    return (struct dsc_compile_fault){rule, node, unit_or_slot};
}

static struct dsc_compile_fault no_fault(void)
{
    return fault_of(DSC_COMPILE_NONE, -1, -1);
}

static struct dsc_compile_fault check_memory(const struct dsc_compile_graph *graph, int64_t node, const uint8_t *state)
{
    for (int64_t r = graph->read_starts[node]; r < graph->read_starts[node + 1]; r++)
        if (state[graph->reads[r]] != HELD)
            return fault_of(DSC_COMPILE_READ_NOT_HELD, node, graph->reads[r]);
    if (graph->write_starts[node] < graph->write_starts[node + 1])
        return fault_of(DSC_COMPILE_WEIGHT_WRITTEN, node, graph->writes[graph->write_starts[node]]);
    return no_fault();
}

/* The rule that a GATHER, WAIT or RELEASE breaks in this state of its unit. */
static int32_t move_unit(int32_t kind, uint8_t *state)
{
    uint8_t before = *state;

    switch (kind) {
    case DSC_COMPILE_GATHER:
        *state = GATHERED;
        return before == RELEASED ? DSC_COMPILE_NONE : DSC_COMPILE_GATHER_TWICE;
    case DSC_COMPILE_WAIT:
        *state = HELD;
        return before == RELEASED ? DSC_COMPILE_WAIT_NOT_GATHERED : DSC_COMPILE_NONE;
    default:
        *state = RELEASED;
        if (before == RELEASED)
            return DSC_COMPILE_RELEASE_NOT_GATHERED;
        return before == GATHERED ? DSC_COMPILE_RELEASE_NOT_WAITED : DSC_COMPILE_NONE;
    }
}

static struct dsc_compile_fault run_node(const struct dsc_compile_graph *graph, int64_t node, uint8_t *state,
                                         uint8_t *n_reduced)
{
    int32_t kind = graph->kinds[node];
    struct dsc_compile_fault fault = no_fault();
    int32_t rule;
    int32_t slot;

    switch (kind) {
    case DSC_COMPILE_PLAIN:
        return check_memory(graph, node, state);
    case DSC_COMPILE_GATHER:
    case DSC_COMPILE_WAIT:
    case DSC_COMPILE_RELEASE:
        rule = move_unit(kind, &state[graph->units[node]]);
        return rule == DSC_COMPILE_NONE ? fault : fault_of(rule, node, graph->units[node]);
    case DSC_COMPILE_REDUCE:
        fault = check_memory(graph, node, state);
        slot = graph->slots[node];
        if (fault.rule != DSC_COMPILE_NONE)
            return fault;
        if (graph->wanted[slot] == 0)
            return fault_of(DSC_COMPILE_REDUCE_UNWANTED, node, slot);
        return n_reduced[slot]++ == 0 ? fault : fault_of(DSC_COMPILE_REDUCE_TWICE, node, slot);
    default:
        return fault; /* OUTPUT is the last node: the end of the graph follows */
    }
}

static struct dsc_compile_fault end_graph(const struct dsc_compile_graph *graph, const uint8_t *state,
                                          const uint8_t *n_reduced)
{
    int64_t n = graph->n_nodes;
    int64_t node = n > 0 && graph->kinds[n - 1] == DSC_COMPILE_OUTPUT ? n - 1 : n;

    for (int32_t unit = 0; unit < graph->n_units; unit++)
        if (state[unit] != RELEASED)
            return fault_of(DSC_COMPILE_NEVER_RELEASED, node, unit);
    for (int32_t slot = 0; slot < graph->n_slots; slot++)
        if (n_reduced[slot] < graph->wanted[slot])
            return fault_of(DSC_COMPILE_NEVER_REDUCED, node, slot);
    return no_fault();
}

dsc_status dsc_compile_verify(const struct dsc_compile_graph *graph, struct dsc_compile_fault *out)
{
    struct dsc_compile_fault fault = no_fault();
    uint8_t *n_reduced;

    DSC_TRY(check_graph(graph));
    if (out == NULL)
        return dsc_fail(DSC_EINVAL, "out is NULL");
    if (graph->n_units + (int64_t)graph->n_slots > 0)
        memset(graph->scratch, RELEASED, (size_t)graph->n_units + (size_t)graph->n_slots);
    n_reduced = graph->n_slots > 0 ? graph->scratch + graph->n_units : NULL;
    for (int64_t node = 0; node < graph->n_nodes && fault.rule == DSC_COMPILE_NONE; node++)
        fault = run_node(graph, node, graph->scratch, n_reduced);
    *out = fault.rule == DSC_COMPILE_NONE ? end_graph(graph, graph->scratch, n_reduced) : fault;
    return DSC_OK;
}

static const struct {
    const char *name, *noun, *sentence;
} rules[DSC_COMPILE_N_RULES] = {
#define DSC_COMPILE_ENTRY(name, value, text, noun, sentence) [value] = {text, noun, sentence},
    DSC_COMPILE_RULE_MAP(DSC_COMPILE_ENTRY)
#undef DSC_COMPILE_ENTRY
};

const char *dsc_compile_rule_name(int32_t rule)
{
    return rule >= 0 && rule < DSC_COMPILE_N_RULES ? rules[rule].name : NULL;
}

dsc_status dsc_compile_format(const struct dsc_compile_fault *fault, size_t n_bytes, char *out)
{
    if (fault == NULL || out == NULL || n_bytes == 0)
        return dsc_fail(DSC_EINVAL, "fault or out is NULL, or out has no bytes");
    if (dsc_compile_rule_name(fault->rule) == NULL)
        return dsc_fail(DSC_EINVAL, "rule is %d, must be a dsc_compile_rule", (int)fault->rule);
    if (fault->rule == DSC_COMPILE_NONE)
        out[0] = '\0';
    else
        snprintf(out, n_bytes, "node %lld: %s %d %s", (long long)fault->node, rules[fault->rule].noun,
                 (int)fault->unit_or_slot, rules[fault->rule].sentence);
    return DSC_OK;
}
