/* dsc_compile_verify on any numbers: refused, or the first fault that walks of each unit and each slot by themselves
 * find. */
#include "fuzz.h"

#include "dsc/compile.h"

#define MAX_NODES 24
#define MAX_UNITS 4
#define MAX_SLOTS 3
#define MAX_LISTED 32

struct given {
    int32_t kinds[MAX_NODES];
    int32_t units[MAX_NODES];
    int32_t slots[MAX_NODES];
    int64_t read_starts[MAX_NODES + 1];
    int64_t write_starts[MAX_NODES + 1];
    int32_t reads[MAX_LISTED];
    int32_t writes[MAX_LISTED];
    uint8_t wanted[MAX_SLOTS];
    uint8_t scratch[MAX_UNITS + MAX_SLOTS];
    struct dsc_compile_graph graph;
};

static bool has_unit(int32_t kind)
{
    return kind == DSC_COMPILE_GATHER || kind == DSC_COMPILE_WAIT || kind == DSC_COMPILE_RELEASE;
}

static void take_graph(struct input *input, struct given *given)
{
    struct dsc_compile_graph *g = &given->graph;

    memset(given, 0, sizeof *given);
    *g = (struct dsc_compile_graph){take_below(input, MAX_NODES + 1),
                                    (int32_t)take_below(input, MAX_UNITS + 1),
                                    (int32_t)take_below(input, MAX_SLOTS + 1),
                                    given->kinds,
                                    given->units,
                                    given->slots,
                                    given->read_starts,
                                    given->write_starts,
                                    given->reads,
                                    given->writes,
                                    0,
                                    0,
                                    given->wanted,
                                    given->scratch};
    for (int32_t slot = 0; slot < g->n_slots; slot++)
        given->wanted[slot] = (uint8_t)take_below(input, 2);
    for (int64_t i = 0; i < g->n_nodes; i++) {
        int32_t kind = (int32_t)take_below(input, i + 1 == g->n_nodes ? DSC_COMPILE_N_KINDS : DSC_COMPILE_OUTPUT);

        if ((has_unit(kind) && g->n_units == 0) || (kind == DSC_COMPILE_REDUCE && g->n_slots == 0))
            kind = DSC_COMPILE_PLAIN;
        given->kinds[i] = kind;
        given->units[i] = has_unit(kind) ? (int32_t)take_below(input, g->n_units) : -1;
        given->slots[i] = kind == DSC_COMPILE_REDUCE ? (int32_t)take_below(input, g->n_slots) : -1;
        if (g->n_units > 0 && g->n_reads < MAX_LISTED && take_byte(input) % 4 == 1)
            given->reads[g->n_reads++] = (int32_t)take_below(input, g->n_units);
        if (g->n_units > 0 && take_byte(input) % 64 == 1)
            given->writes[g->n_writes++] = (int32_t)take_below(input, g->n_units);
        given->read_starts[i + 1] = g->n_reads;
        given->write_starts[i + 1] = g->n_writes;
    }
}

/* One entry of the arguments becomes any number. */
static void spoil(struct input *input, struct given *given)
{
    int64_t value = take_wild(input);
    int64_t i = take_below(input, MAX_NODES);

    switch (take_byte(input) % 10) {
    case 0:
        given->kinds[i] = (int32_t)value;
        break;
    case 1:
        given->units[i] = (int32_t)value;
        break;
    case 2:
        given->slots[i] = (int32_t)value;
        break;
    case 3:
        given->read_starts[i] = value;
        break;
    case 4:
        given->write_starts[i] = value;
        break;
    case 5:
        given->reads[i] = (int32_t)value;
        break;
    case 6:
        given->writes[i] = (int32_t)value;
        break;
    case 7:
        given->wanted[i % MAX_SLOTS] = (uint8_t)value;
        break;
    case 8: /* fewer than the arrays hold, or a number that is refused */
        given->graph.n_units = value < 0 ? -1 : (int32_t)(value % (MAX_UNITS + 1));
        break;
    default:
        given->graph.n_reads = value < 0 ? value : value % (MAX_LISTED + 1);
        break;
    }
}

static bool works_on_memory(const struct dsc_compile_graph *g, int64_t i)
{
    return g->kinds[i] == DSC_COMPILE_PLAIN || g->kinds[i] == DSC_COMPILE_REDUCE;
}

static int64_t end_of(const struct dsc_compile_graph *g)
{
    return g->n_nodes - (g->n_nodes > 0 && g->kinds[g->n_nodes - 1] == DSC_COMPILE_OUTPUT);
}

static bool lists(const int64_t *starts, const int32_t *units, int64_t node, int32_t unit)
{
    bool found = false;

    for (int64_t i = starts[node]; i < starts[node + 1]; i++)
        found |= units[i] == unit;
    return found;
}

/* The first node at which the unit breaks a rule; INT64_MAX if it breaks none. */
static int64_t walk_unit(const struct dsc_compile_graph *g, int32_t unit)
{
    bool is_gathered = false;
    bool is_held = false;

    for (int64_t i = 0; i < g->n_nodes; i++) {
        if (works_on_memory(g, i) &&
            ((lists(g->read_starts, g->reads, i, unit) && !is_held) || lists(g->write_starts, g->writes, i, unit)))
            return i;
        if (g->units[i] != unit)
            continue;
        if (g->kinds[i] == DSC_COMPILE_GATHER ? is_gathered : g->kinds[i] == DSC_COMPILE_WAIT ? !is_gathered : !is_held)
            return i;
        is_gathered = g->kinds[i] != DSC_COMPILE_RELEASE;
        is_held = g->kinds[i] == DSC_COMPILE_WAIT;
    }
    return is_gathered ? end_of(g) : INT64_MAX;
}

static int64_t walk_slot(const struct dsc_compile_graph *g, int32_t slot)
{
    int32_t n_left = g->wanted[slot];

    for (int64_t i = 0; i < g->n_nodes; i++)
        if (g->kinds[i] == DSC_COMPILE_REDUCE && g->slots[i] == slot && n_left-- == 0)
            return i;
    return n_left > 0 ? end_of(g) : INT64_MAX;
}

static void compare(const struct dsc_compile_graph *g, const struct dsc_compile_fault *fault)
{
    bool is_slot = fault->rule == DSC_COMPILE_REDUCE_TWICE || fault->rule == DSC_COMPILE_REDUCE_UNWANTED ||
                   fault->rule == DSC_COMPILE_NEVER_REDUCED;
    int64_t first = INT64_MAX;
    char text[160];

    for (int32_t unit = 0; unit < g->n_units; unit++)
        first = walk_unit(g, unit) < first ? walk_unit(g, unit) : first;
    for (int32_t slot = 0; slot < g->n_slots; slot++)
        first = walk_slot(g, slot) < first ? walk_slot(g, slot) : first;
    REQUIRE(dsc_compile_format(fault, sizeof text, text) == DSC_OK);
    REQUIRE((fault->rule == DSC_COMPILE_NONE) == (first == INT64_MAX) &&
            (fault->rule == DSC_COMPILE_NONE) == (text[0] == '\0'));
    if (first == INT64_MAX) {
        REQUIRE(fault->node == -1 && fault->unit_or_slot == -1);
        return;
    }
    REQUIRE(fault->node == first);
    REQUIRE(fault->unit_or_slot >= 0 && fault->unit_or_slot < (is_slot ? g->n_slots : g->n_units));
    REQUIRE((is_slot ? walk_slot(g, fault->unit_or_slot) : walk_unit(g, fault->unit_or_slot)) == first);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes)
{
    struct input input = {data, n_bytes};
    bool is_wild = take_byte(&input) % 4 == 3;
    struct given given;
    struct dsc_compile_fault fault = {-7, -7, -7};
    dsc_status status;

    take_graph(&input, &given);
    if (is_wild)
        spoil(&input, &given);
    status = dsc_compile_verify(&given.graph, &fault);
    if (status == DSC_OK)
        compare(&given.graph, &fault);
    else
        REQUIRE(is_wild && status == DSC_EINVAL && fault.rule == -7);
    return 0;
}
