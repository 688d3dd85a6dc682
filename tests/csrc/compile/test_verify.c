/* compile/verify.c against a search backwards from each node, on graphs that are right, broken once, or random. */
#include "test.h"

#include "dsc/compile.h"

#define MAX_NODES 1024
#define MAX_UNITS 31
#define MAX_SLOTS 17
#define MAX_LISTED 4096

static int32_t kinds[MAX_NODES];
static int32_t units[MAX_NODES];
static int32_t slots[MAX_NODES];
static int64_t read_starts[MAX_NODES + 1];
static int64_t write_starts[MAX_NODES + 1];
static int32_t reads[MAX_LISTED];
static int32_t writes[MAX_LISTED];
static uint8_t wanted[MAX_SLOTS];
static uint8_t scratch[MAX_UNITS + MAX_SLOTS];
static struct dsc_compile_graph graph;
static int64_t n_found[DSC_COMPILE_N_RULES];

static void begin_graph(int32_t n_units, int32_t n_slots)
{
    graph = (struct dsc_compile_graph){0,     n_units, n_slots, kinds, units,  slots,  read_starts, write_starts,
                                       reads, writes,  0,       0,     wanted, scratch};
    memset(wanted, 0, sizeof wanted);
    read_starts[0] = write_starts[0] = 0;
}

static void add(int32_t kind, int32_t unit, int32_t slot)
{
    int64_t i = graph.n_nodes++;

    kinds[i] = kind;
    units[i] = unit;
    slots[i] = slot;
    read_starts[i + 1] = graph.n_reads;
    write_starts[i + 1] = graph.n_writes;
}

/* The last node reads, or writes to, one more unit. */
static void add_read(int32_t unit)
{
    reads[graph.n_reads++] = unit;
    read_starts[graph.n_nodes] = graph.n_reads;
}

static void add_write(int32_t unit)
{
    writes[graph.n_writes++] = unit;
    write_starts[graph.n_nodes] = graph.n_writes;
}

static void hold(int32_t unit)
{
    add(DSC_COMPILE_GATHER, unit, -1);
    add(DSC_COMPILE_WAIT, unit, -1);
}

/* The kind of the last node before `node` that moves the unit; RELEASE if there is none. */
static int32_t last_move(int64_t node, int32_t unit)
{
    for (int64_t i = node - 1; i >= 0; i--)
        if (units[i] == unit)
            return kinds[i];
    return DSC_COMPILE_RELEASE;
}

static int64_t count_reduced(int64_t node, int32_t slot)
{
    int64_t n = 0;

    for (int64_t i = 0; i < node; i++)
        n += kinds[i] == DSC_COMPILE_REDUCE && slots[i] == slot;
    return n;
}

/* What is wrong with one node, if all nodes before it are right. */
static struct dsc_compile_fault expect_node(int64_t i)
{
    int32_t unit = units[i];
    int32_t before = unit >= 0 ? last_move(i, unit) : -1;

    if (kinds[i] == DSC_COMPILE_PLAIN || kinds[i] == DSC_COMPILE_REDUCE) {
        for (int64_t r = read_starts[i]; r < read_starts[i + 1]; r++)
            if (last_move(i, reads[r]) != DSC_COMPILE_WAIT)
                return (struct dsc_compile_fault){DSC_COMPILE_READ_NOT_HELD, i, reads[r]};
        if (write_starts[i] != write_starts[i + 1])
            return (struct dsc_compile_fault){DSC_COMPILE_WEIGHT_WRITTEN, i, writes[write_starts[i]]};
    }
    if (kinds[i] == DSC_COMPILE_GATHER && before != DSC_COMPILE_RELEASE)
        return (struct dsc_compile_fault){DSC_COMPILE_GATHER_TWICE, i, unit};
    if (kinds[i] == DSC_COMPILE_WAIT && before == DSC_COMPILE_RELEASE)
        return (struct dsc_compile_fault){DSC_COMPILE_WAIT_NOT_GATHERED, i, unit};
    if (kinds[i] == DSC_COMPILE_RELEASE && before == DSC_COMPILE_RELEASE)
        return (struct dsc_compile_fault){DSC_COMPILE_RELEASE_NOT_GATHERED, i, unit};
    if (kinds[i] == DSC_COMPILE_RELEASE && before == DSC_COMPILE_GATHER)
        return (struct dsc_compile_fault){DSC_COMPILE_RELEASE_NOT_WAITED, i, unit};
    if (kinds[i] == DSC_COMPILE_REDUCE && wanted[slots[i]] == 0)
        return (struct dsc_compile_fault){DSC_COMPILE_REDUCE_UNWANTED, i, slots[i]};
    if (kinds[i] == DSC_COMPILE_REDUCE && count_reduced(i, slots[i]) == 1)
        return (struct dsc_compile_fault){DSC_COMPILE_REDUCE_TWICE, i, slots[i]};
    return (struct dsc_compile_fault){DSC_COMPILE_NONE, -1, -1};
}

static struct dsc_compile_fault expect(void)
{
    int64_t n = graph.n_nodes;
    int64_t end = n > 0 && kinds[n - 1] == DSC_COMPILE_OUTPUT ? n - 1 : n;

    for (int64_t i = 0; i < n; i++) {
        struct dsc_compile_fault fault = expect_node(i);

        if (fault.rule != DSC_COMPILE_NONE)
            return fault;
    }
    for (int32_t unit = 0; unit < graph.n_units; unit++)
        if (last_move(n, unit) != DSC_COMPILE_RELEASE)
            return (struct dsc_compile_fault){DSC_COMPILE_NEVER_RELEASED, end, unit};
    for (int32_t slot = 0; slot < graph.n_slots; slot++)
        if (wanted[slot] == 1 && count_reduced(n, slot) == 0)
            return (struct dsc_compile_fault){DSC_COMPILE_NEVER_REDUCED, end, slot};
    return (struct dsc_compile_fault){DSC_COMPILE_NONE, -1, -1};
}

static void *copy_of(const void *data, size_t n_bytes)
{
    void *copy = test_alloc(n_bytes);

    memcpy(copy, data, n_bytes);
    return copy;
}

/* Verifies a copy in arrays of exactly the documented lengths, so that the sanitizer sees each access beyond them. */
static void check_fault(struct dsc_compile_fault expected)
{
    struct dsc_compile_fault got = {-7, -7, -7};
    struct dsc_compile_graph g = graph;
    size_t n = (size_t)graph.n_nodes;
    void *copies[] = {copy_of(kinds, n * sizeof *kinds),
                      copy_of(units, n * sizeof *units),
                      copy_of(slots, n * sizeof *slots),
                      copy_of(read_starts, (n + 1) * sizeof *read_starts),
                      copy_of(write_starts, (n + 1) * sizeof *write_starts),
                      copy_of(reads, (size_t)graph.n_reads * sizeof *reads),
                      copy_of(writes, (size_t)graph.n_writes * sizeof *writes),
                      copy_of(wanted, (size_t)graph.n_slots),
                      test_alloc((size_t)graph.n_units + (size_t)graph.n_slots)};

    g.kinds = copies[0];
    g.units = copies[1];
    g.slots = copies[2];
    g.read_starts = copies[3];
    g.write_starts = copies[4];
    g.reads = copies[5];
    g.writes = copies[6];
    g.wanted = copies[7];
    g.scratch = copies[8];
    memset(g.scratch, 0xa5, (size_t)graph.n_units + (size_t)graph.n_slots);
    CHECK_STATUS(dsc_compile_verify(&g, &got), DSC_OK);
    CHECK_EQ(got.rule, expected.rule);
    CHECK_EQ(got.node, expected.node);
    CHECK_EQ(got.unit_or_slot, expected.unit_or_slot);
    n_found[expected.rule]++;
    for (size_t i = 0; i < sizeof copies / sizeof copies[0]; i++)
        free(copies[i]);
}

static void check_text(const char *text, const char *name)
{
    struct dsc_compile_fault got = {-7, -7, -7};
    char sentence[160];
    char cut[8];

    check_fault(expect());
    CHECK_STATUS(dsc_compile_verify(&graph, &got), DSC_OK);
    CHECK_STATUS(dsc_compile_format(&got, sizeof sentence, sentence), DSC_OK);
    CHECK_STR(sentence, text);
    CHECK_STR(dsc_compile_rule_name(got.rule), name);
    CHECK_STATUS(dsc_compile_format(&got, sizeof cut, cut), DSC_OK);
    CHECK(strncmp(cut, text, sizeof cut - 1) == 0 && strlen(cut) == (strlen(text) < 7 ? strlen(text) : 7));
}

/* Each rule broken once: the node and the number are written here by hand. */
static void test_each_rule(void)
{
    TEST_CASE("each rule");
    begin_graph(3, 2);
    wanted[1] = 1;
    hold(2);
    add(DSC_COMPILE_PLAIN, -1, -1);
    add_read(2);
    add_read(2);
    add(DSC_COMPILE_WAIT, 2, -1);
    add(DSC_COMPILE_REDUCE, -1, 1);
    add(DSC_COMPILE_RELEASE, 2, -1);
    add_read(0); /* these kinds name weights and do not read them */
    add_write(0);
    add(DSC_COMPILE_OUTPUT, -1, -1);
    add_read(1);
    check_text("", "");

    read_starts[2] = read_starts[3] = read_starts[1] = 2; /* node 0 has the reads of node 2 */
    check_text("", "");
    kinds[0] = DSC_COMPILE_PLAIN;
    units[0] = -1;
    check_text("node 0: unit 2 is read, but not between its wait and its release", "read_not_held");

    begin_graph(3, 0);
    add(DSC_COMPILE_GATHER, 2, -1);
    add(DSC_COMPILE_PLAIN, -1, -1);
    add_read(2);
    check_text("node 1: unit 2 is read, but not between its wait and its release", "read_not_held");

    begin_graph(3, 0);
    hold(2);
    add(DSC_COMPILE_RELEASE, 2, -1);
    add(DSC_COMPILE_PLAIN, -1, -1);
    add_read(2);
    check_text("node 3: unit 2 is read, but not between its wait and its release", "read_not_held");

    begin_graph(3, 1);
    wanted[0] = 1;
    add(DSC_COMPILE_REDUCE, -1, 0);
    add_read(1);
    check_text("node 0: unit 1 is read, but not between its wait and its release", "read_not_held");

    begin_graph(3, 0);
    hold(2);
    add(DSC_COMPILE_WAIT, 1, -1);
    check_text("node 2: unit 1 is waited for, but not gathered", "wait_not_gathered");

    begin_graph(3, 0);
    hold(2);
    hold(2);
    check_text("node 2: unit 2 is gathered again before its release", "gather_twice");

    begin_graph(3, 0);
    hold(2);
    add(DSC_COMPILE_RELEASE, 0, -1);
    check_text("node 2: unit 0 is released, but not gathered", "release_not_gathered");

    begin_graph(3, 0);
    add(DSC_COMPILE_GATHER, 1, -1);
    add(DSC_COMPILE_RELEASE, 1, -1);
    check_text("node 1: unit 1 is released, but was gathered without a wait", "release_not_waited");

    begin_graph(3, 0);
    hold(2);
    hold(1);
    check_text("node 4: unit 1 is still gathered at the end", "never_released");
    add(DSC_COMPILE_OUTPUT, -1, -1);
    check_text("node 4: unit 1 is still gathered at the end", "never_released");

    begin_graph(0, 2);
    wanted[0] = 1;
    add(DSC_COMPILE_REDUCE, -1, 0);
    add(DSC_COMPILE_REDUCE, -1, 0);
    check_text("node 1: slot 0 is reduced a second time", "reduce_twice");

    wanted[0] = 0;
    check_text("node 0: slot 0 is reduced, but not wanted", "reduce_unwanted");

    begin_graph(0, 3);
    wanted[0] = wanted[2] = 1;
    add(DSC_COMPILE_REDUCE, -1, 0);
    check_text("node 1: slot 2 is wanted, but never reduced", "never_reduced");

    begin_graph(2, 0);
    hold(1);
    add(DSC_COMPILE_PLAIN, -1, -1);
    add_read(1);
    add_write(1);
    check_text("node 2: unit 1 has a weight that is written to", "weight_written");
}

static void test_small_sizes(void)
{
    static const int32_t sizes[] = {0, 1, 2, 7, 13, MAX_UNITS};

    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        TEST_CASE("%d units, no node", (int)sizes[i]);
        begin_graph(sizes[i], 0);
        check_fault((struct dsc_compile_fault){DSC_COMPILE_NONE, -1, -1});
        add(DSC_COMPILE_OUTPUT, -1, -1);
        check_fault((struct dsc_compile_fault){DSC_COMPILE_NONE, -1, -1});
    }
    begin_graph(0, 1);
    wanted[0] = 1;
    check_fault((struct dsc_compile_fault){DSC_COMPILE_NEVER_REDUCED, 0, 0});

    /* Without nodes, units and slots, only the starts have an entry. */
    begin_graph(0, 0);
    graph = (struct dsc_compile_graph){.read_starts = read_starts, .write_starts = write_starts};
    struct dsc_compile_fault got = {-7, -7, -7};
    CHECK_STATUS(dsc_compile_verify(&graph, &got), DSC_OK);
    CHECK_EQ(got.rule, DSC_COMPILE_NONE);
}

/* Any legal arguments: nearly every graph has a fault. */
static void make_random(uint64_t *random, int64_t n_nodes, int32_t n_units, int32_t n_slots)
{
    begin_graph(n_units, n_slots);
    for (int32_t slot = 0; slot < n_slots; slot++)
        wanted[slot] = (uint8_t)test_below(random, 2);
    for (int64_t i = 0; i < n_nodes; i++) {
        int32_t kind = (int32_t)test_below(random, DSC_COMPILE_OUTPUT);
        bool has_unit = kind == DSC_COMPILE_GATHER || kind == DSC_COMPILE_WAIT || kind == DSC_COMPILE_RELEASE;

        if ((has_unit && n_units == 0) || (kind == DSC_COMPILE_REDUCE && n_slots == 0))
            kind = DSC_COMPILE_PLAIN;
        has_unit = has_unit && n_units > 0;
        add(kind, has_unit ? (int32_t)test_below(random, n_units) : -1,
            kind == DSC_COMPILE_REDUCE ? (int32_t)test_below(random, n_slots) : -1);
        for (int64_t n = n_units > 0 ? test_below(random, 3) : 0; n > 0; n--)
            add_read((int32_t)test_below(random, n_units));
        if (n_units > 0 && test_below(random, 9) == 0)
            add_write((int32_t)test_below(random, n_units));
    }
}

/* A right graph: units are taken up and put down at random, read only while they are held, and all put down at last. */
static void make_right(uint64_t *random, int64_t n_steps, int32_t n_units, int32_t n_slots)
{
    begin_graph(n_units, n_slots);
    for (int64_t i = 0; i < n_steps; i++) {
        int32_t unit = n_units > 0 ? (int32_t)test_below(random, n_units) : -1;
        int32_t slot = n_slots > 0 ? (int32_t)test_below(random, n_slots) : -1;
        int32_t state = unit >= 0 ? last_move(graph.n_nodes, unit) : -1;

        if (slot >= 0 && wanted[slot] == 0 && test_below(random, 4) == 0) {
            add(DSC_COMPILE_REDUCE, -1, slot);
            wanted[slot] = 1;
        } else if (state == DSC_COMPILE_RELEASE) {
            add(DSC_COMPILE_GATHER, unit, -1);
        } else if (state == DSC_COMPILE_GATHER) {
            add(DSC_COMPILE_WAIT, unit, -1);
        } else if (state == DSC_COMPILE_WAIT && test_below(random, 3) == 0) {
            add(DSC_COMPILE_RELEASE, unit, -1);
        } else {
            add(DSC_COMPILE_PLAIN, -1, -1);
            if (state == DSC_COMPILE_WAIT)
                add_read(unit);
        }
    }
    for (int32_t unit = 0; unit < n_units; unit++) {
        if (last_move(graph.n_nodes, unit) == DSC_COMPILE_GATHER)
            add(DSC_COMPILE_WAIT, unit, -1);
        if (last_move(graph.n_nodes, unit) == DSC_COMPILE_WAIT)
            add(DSC_COMPILE_RELEASE, unit, -1);
    }
    if (test_below(random, 2) == 0)
        add(DSC_COMPILE_OUTPUT, -1, -1);
}

/* Changes one thing of a graph, so that it is still a legal argument. */
static void break_once(uint64_t *random)
{
    int64_t i = test_below(random, graph.n_nodes);

    switch (test_below(random, 5)) {
    case 0: /* the node is gone, except for its reads */
        if (kinds[i] != DSC_COMPILE_OUTPUT) {
            kinds[i] = DSC_COMPILE_PLAIN;
            units[i] = slots[i] = -1;
        }
        break;
    case 1: /* another unit or slot */
        if (units[i] >= 0)
            units[i] = (int32_t)test_below(random, graph.n_units);
        if (slots[i] >= 0)
            slots[i] = (int32_t)test_below(random, graph.n_slots);
        break;
    case 2: /* another of the kinds with a unit */
        if (units[i] >= 0)
            kinds[i] = DSC_COMPILE_GATHER + (int32_t)test_below(random, 3);
        break;
    case 3: /* other needs */
        if (graph.n_slots > 0)
            wanted[test_below(random, graph.n_slots)] ^= 1;
        break;
    default: /* another read, or a write */
        if (graph.n_reads > 0)
            reads[test_below(random, graph.n_reads)] = (int32_t)test_below(random, graph.n_units);
        if (graph.n_units > 0 && test_below(random, 4) == 0) {
            writes[graph.n_writes++] = (int32_t)test_below(random, graph.n_units);
            for (int64_t node = i; node < graph.n_nodes; node++)
                write_starts[node + 1]++;
        }
        break;
    }
}

static void test_many_graphs(void)
{
    static const int64_t lengths[] = {1, 2, 3, 7, 31, 127};
    static const int32_t counts[] = {0, 1, 2, 7, 17};
    uint64_t random = 1;

    memset(n_found, 0, sizeof n_found);
    for (size_t l = 0; l < sizeof lengths / sizeof lengths[0]; l++)
        for (size_t u = 0; u < 5; u++)
            for (size_t s = 0; s < 5; s++)
                for (int trial = 0; trial < 20; trial++) {
                    TEST_CASE("%d nodes, %d units, %d slots, trial %d", (int)lengths[l], (int)counts[u], (int)counts[s],
                              trial);
                    make_random(&random, lengths[l], counts[u], counts[s]);
                    check_fault(expect());
                    make_right(&random, lengths[l], counts[u], counts[s]);
                    CHECK_EQ(expect().rule, DSC_COMPILE_NONE);
                    check_fault((struct dsc_compile_fault){DSC_COMPILE_NONE, -1, -1});
                    break_once(&random);
                    check_fault(expect());
                }
    for (int32_t rule = 0; rule < DSC_COMPILE_N_RULES; rule++) {
        TEST_CASE("rule %s", dsc_compile_rule_name(rule));
        CHECK(n_found[rule] >= 20);
    }
}

#define BAD(word) (CHECK_ERROR(dsc_compile_verify(&graph, &got), DSC_EINVAL, word), CHECK_EQ(got.rule, -7))

/* A graph of one gather, one read, one reduction and an output, and what is changed in it. */
static void begin_small(void)
{
    begin_graph(2, 1);
    wanted[0] = 1;
    hold(1);
    add(DSC_COMPILE_PLAIN, -1, -1);
    add_read(1);
    add(DSC_COMPILE_REDUCE, -1, 0);
    add(DSC_COMPILE_RELEASE, 1, -1);
    add(DSC_COMPILE_OUTPUT, -1, -1);
}

static void test_bad_input(void)
{
    struct dsc_compile_fault got = {-7, -7, -7};
    char text[4];

    TEST_CASE("bad input");
    begin_small();
    check_text("", "");
    units[0] = 2, BAD("units[0] is 2, must be one of 2");
    units[0] = -1, BAD("units[0] is -1");
    units[0] = 1, units[2] = 0, BAD("units[2] is 0, must be exactly -1");
    units[2] = -1, slots[3] = 1, BAD("slots[3] is 1, must be one of 1");
    slots[3] = -1, BAD("slots[3] is -1");
    slots[3] = 0, slots[0] = 0, BAD("slots[0] is 0");
    slots[0] = -1, kinds[2] = 6, BAD("kinds[2] is 6");
    kinds[2] = -1, BAD("kinds[2] is -1");
    kinds[2] = DSC_COMPILE_OUTPUT, BAD("kinds[2] is OUTPUT, must be the last of 6");
    kinds[2] = DSC_COMPILE_PLAIN, reads[0] = 2, BAD("reads[0] is 2 of 2 units");
    reads[0] = -1, BAD("reads[0] is -1");
    reads[0] = 1, wanted[0] = 2, BAD("wanted[0] is 2");
    wanted[0] = 1, read_starts[0] = 1, BAD("read_starts goes from 1 to 1, must go from 0 to 1");
    read_starts[0] = 0, read_starts[6] = 2, BAD("read_starts goes from 0 to 2");
    read_starts[6] = 1, read_starts[4] = 0, BAD("read_starts[4] is 0 after 1");
    read_starts[4] = INT64_MAX, BAD("read_starts[5] is 1 after 9223372036854775807");
    read_starts[4] = INT64_MIN, BAD("read_starts[4] is -9223372036854775808 after 1");
    read_starts[4] = 1, write_starts[3] = 1, BAD("write_starts[4] is 0 after 1");
    write_starts[3] = 0, graph.n_writes = 1, BAD("write_starts goes from 0 to 0");
    graph.n_writes = -1, BAD("n_writes is -1");
    graph.n_writes = 0, graph.n_units = -1, BAD("negative");
    graph.n_units = 1, BAD("units[0] is 1, must be one of 1");
    begin_small(), graph.n_nodes = -1, BAD("negative");
    begin_small(), graph.n_slots = -1, BAD("negative");
    begin_small(), graph.kinds = NULL, BAD("kinds is NULL");
    begin_small(), graph.units = NULL, BAD("units is NULL");
    begin_small(), graph.slots = NULL, BAD("slots is NULL");
    begin_small(), graph.read_starts = NULL, BAD("read_starts is NULL");
    begin_small(), graph.write_starts = NULL, BAD("write_starts is NULL");
    begin_small(), graph.reads = NULL, BAD("reads is NULL");
    begin_small(), graph.wanted = NULL, BAD("wanted is NULL");
    begin_small(), graph.scratch = NULL, BAD("scratch is NULL");
    begin_small(), graph.writes = NULL, check_text("", "");
    CHECK_ERROR(dsc_compile_verify(NULL, &got), DSC_EINVAL, "graph is NULL");
    CHECK_ERROR(dsc_compile_verify(&graph, NULL), DSC_EINVAL, "out is NULL");

    CHECK(dsc_compile_rule_name(-1) == NULL && dsc_compile_rule_name(DSC_COMPILE_N_RULES) == NULL);
    CHECK_ERROR(dsc_compile_format(&got, sizeof text, text), DSC_EINVAL, "rule is -7");
    CHECK_ERROR(dsc_compile_format(&got, 0, text), DSC_EINVAL, "no bytes");
    CHECK_ERROR(dsc_compile_format(&got, sizeof text, NULL), DSC_EINVAL, "NULL");
    CHECK_ERROR(dsc_compile_format(NULL, sizeof text, text), DSC_EINVAL, "NULL");
}

int main(void)
{
    test_each_rule();
    test_small_sizes();
    test_many_graphs();
    test_bad_input();
    return test_finish("compile/test_verify");
}
