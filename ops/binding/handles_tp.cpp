/*
 * A tensor-parallel rank's part of a parameter, as plain functions (dsc/tp.h). All arguments and results are integers.
 */
#include "handles.h"

#include "dsc/tp.h"
#include "status.h"

#include <pybind11/stl.h>

#include <tuple>
#include <vector>

namespace py = pybind11;

namespace {

using Part = std::tuple<int32_t, int64_t, int64_t>;
using Run = std::tuple<int64_t, int64_t, int64_t>;

std::tuple<std::vector<Run>, int32_t, int32_t> tp_runs(const std::vector<Part> &parts, int64_t n_blocks,
                                                       int64_t n_heads, int64_t n_key_heads, int32_t n_ranks,
                                                       int32_t rank)
{
    std::vector<struct dsc_tp_part> list;
    std::vector<Run> result;
    int64_t n = 0;
    int32_t first_copy = 0;
    int32_t n_copies = 0;

    for (const Part &part : parts)
        list.push_back({std::get<0>(part), std::get<1>(part), std::get<2>(part)});

    const struct dsc_tp_dim dim = {list.data(), static_cast<int64_t>(list.size()), n_blocks, n_heads, n_key_heads};

    dsc::check(dsc_tp_runs_of(&dim, n_ranks, rank, 0, nullptr, &n, &first_copy, &n_copies), "tp_runs");

    /* A NULL array asks for the count only, so an empty array must not be NULL. */
    std::vector<struct dsc_tp_run> runs(static_cast<size_t>(n) + 1);

    dsc::check(dsc_tp_runs_of(&dim, n_ranks, rank, n + 1, runs.data(), &n, &first_copy, &n_copies), "tp_runs");
    for (int64_t i = 0; i < n; i++) {
        const struct dsc_tp_run &run = runs[static_cast<size_t>(i)];

        result.emplace_back(run.local_begin_elems, run.logical_begin_elems, run.n_elems);
    }
    return {result, first_copy, n_copies};
}

std::tuple<int64_t, int64_t, int64_t, int64_t> tp_heads(int64_t n_heads, int64_t n_key_heads, int32_t n_ranks,
                                                        int32_t rank)
{
    struct dsc_tp_heads heads;

    dsc::check(dsc_tp_heads_of(n_heads, n_key_heads, n_ranks, rank, &heads), "tp_heads");
    return {heads.query_begin, heads.query_end, heads.key_begin, heads.key_end};
}

}  // namespace

void dsc::bind_tp(py::module_ &m)
{
    m.attr("TP_COLUMNS") = static_cast<int>(DSC_TP_COLUMNS);
    m.attr("TP_QUERIES") = static_cast<int>(DSC_TP_QUERIES);
    m.attr("TP_KEYS") = static_cast<int>(DSC_TP_KEYS);
    m.def(
        "tp_runs", &tp_runs, py::arg("parts"), py::arg("n_blocks"), py::arg("n_heads"), py::arg("n_key_heads"),
        py::arg("n_ranks"), py::arg("rank"),
        "([(local begin, logical begin, elements)], first copy, copies) of a rank along a dimension whose blocks are\n"
        "these parts: (kind, elements, grain). Copies is 0 where they differ. Raises ValueError with both numbers.");
    m.def("tp_heads", &tp_heads, py::arg("n_heads"), py::arg("n_key_heads"), py::arg("n_ranks"), py::arg("rank"),
          "(query begin, query end, key begin, key end): the heads of a rank. Raises ValueError with both numbers.");
}
