/* The proof of rewritten graphs as Python functions. All arguments are lists of numbers, and nothing keeps them. */
#include "handles.h"

#include "dsc/compile.h"
#include "status.h"

#include <cstdint>
#include <limits>
#include <string>
#include <tuple>
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
}
