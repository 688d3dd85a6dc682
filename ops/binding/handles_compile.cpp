/* The proof of rewritten graphs as Python functions. All arguments are lists of numbers, and nothing keeps them. */
#include "handles.h"

#include "dsc/compile.h"
#include "status.h"

#include <cstdint>
#include <limits>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace py = pybind11;

namespace {

using Numbers = std::vector<int32_t>;
using Starts = std::vector<int64_t>;
using Fault = std::tuple<std::string, int64_t, int32_t>;

void check_length(const char *op, const char *name, size_t n, size_t n_wanted)
{
    if (n != n_wanted)
        dsc::fail(DSC_EINVAL, std::string(op) + ": " + name + " has " + std::to_string(n) + " entries, must have " +
                                  std::to_string(n_wanted));
}

Fault compile_verify(const Numbers &kinds, const Numbers &units, const Numbers &slots, const Starts &read_starts,
                     const Numbers &reads, const Starts &write_starts, const Numbers &writes, int32_t n_units,
                     const std::vector<bool> &wanted)
{
    const char *const op = "compile_verify";
    const std::vector<uint8_t> is_wanted(wanted.begin(), wanted.end());
    std::vector<uint8_t> scratch;
    struct dsc_compile_graph graph {};
    struct dsc_compile_fault fault {};

    check_length(op, "units", units.size(), kinds.size());
    check_length(op, "slots", slots.size(), kinds.size());
    check_length(op, "read_starts", read_starts.size(), kinds.size() + 1);
    check_length(op, "write_starts", write_starts.size(), kinds.size() + 1);
    if (wanted.size() > static_cast<size_t>(std::numeric_limits<int32_t>::max()))
        dsc::fail(DSC_EOVERFLOW, std::string(op) + ": the number of slots does not fit int32_t");
    scratch.resize((n_units > 0 ? static_cast<size_t>(n_units) : 0) + wanted.size());
    graph.n_nodes = static_cast<int64_t>(kinds.size());
    graph.n_units = n_units;
    graph.n_slots = static_cast<int32_t>(wanted.size());
    graph.kinds = kinds.data();
    graph.units = units.data();
    graph.slots = slots.data();
    graph.read_starts = read_starts.data();
    graph.write_starts = write_starts.data();
    graph.reads = reads.data();
    graph.writes = writes.data();
    graph.n_reads = static_cast<int64_t>(reads.size());
    graph.n_writes = static_cast<int64_t>(writes.size());
    graph.wanted = is_wanted.data();
    graph.scratch = scratch.data();
    dsc::check(dsc_compile_verify(&graph, &fault), op);
    return {dsc_compile_rule_name(fault.rule), fault.node, fault.unit_or_slot};
}

std::string compile_format(const Fault &fault)
{
    const auto &[name, node, unit_or_slot] = fault;
    struct dsc_compile_fault given = {0, node, unit_or_slot};
    char text[160];

    while (given.rule < DSC_COMPILE_N_RULES && name != dsc_compile_rule_name(given.rule))
        given.rule++;
    dsc::check(dsc_compile_format(&given, sizeof text, text), "compile_format");
    return text;
}

std::pair<int64_t, int64_t> compile_same_order(const Numbers &kinds_before, const Numbers &units_before,
                                               const Numbers &kinds_after, const Numbers &units_after)
{
    const char *const op = "compile_same_order";
    struct dsc_compile_graph before {};
    struct dsc_compile_graph after {};
    std::pair<int64_t, int64_t> nodes;

    check_length(op, "units_before", units_before.size(), kinds_before.size());
    check_length(op, "units_after", units_after.size(), kinds_after.size());
    before.n_nodes = static_cast<int64_t>(kinds_before.size());
    before.kinds = kinds_before.data();
    before.units = units_before.data();
    after.n_nodes = static_cast<int64_t>(kinds_after.size());
    after.kinds = kinds_after.data();
    after.units = units_after.data();
    dsc::check(dsc_compile_same_order(&before, &after, &nodes.first, &nodes.second), op);
    return nodes;
}

}  // namespace

void dsc::bind_compile(py::module_ &m)
{
#define DSC_COMPILE_ATTR(name) m.attr("COMPILE_" #name) = static_cast<int>(DSC_COMPILE_##name);
    DSC_COMPILE_KIND_MAP(DSC_COMPILE_ATTR)
#undef DSC_COMPILE_ATTR

    m.def(
        "compile_verify", &compile_verify, py::arg("kinds"), py::arg("units"), py::arg("slots"), py::arg("read_starts"),
        py::arg("reads"), py::arg("write_starts"), py::arg("writes"), py::arg("n_units"), py::arg("wanted"),
        "(rule, node, unit or slot) of a graph's first fault, (\"\", -1, -1) if it has none (dsc/compile.h). By node, in the order in which they "
        "run: kinds (COMPILE_PLAIN, ...), units (of GATHER, WAIT and RELEASE, else -1), slots (of REDUCE, else -1). Node i reads the weights of the "
        "units reads[read_starts[i]:read_starts[i + 1]], and writes to those of writes. wanted: by slot, whether the graph has to reduce it. "
        "Raises ValueError naming the bad entry.");
    m.def("compile_format", &compile_format, py::arg("fault"),
          "The sentence of a fault that compile_verify found, with its node and its unit or slot; \"\" for no fault.");
    m.def(
        "compile_same_order", &compile_same_order, py::arg("kinds_before"), py::arg("units_before"),
        py::arg("kinds_after"), py::arg("units_after"),
        "(-1, -1) if two graphs gather the same units in the same order. Otherwise the first two nodes that differ; the number of nodes for a "
        "graph that has no more gathers.");
}
