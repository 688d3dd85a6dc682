/* The tier planner as two Python functions. All arguments and results are numbers. */
#include "handles.h"

#include "dsc/tier.h"
#include "status.h"

#include <pybind11/stl.h>

#include <array>
#include <cstddef>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace py = pybind11;

namespace {

using Bytes = std::array<int64_t, DSC_N_TIERS>;
/* held_bytes, link_bytes, disk_bytes, lowest, follows: a struct dsc_tier_kind. */
using Kind = std::tuple<std::array<Bytes, DSC_N_TIERS>, int64_t, int64_t, int32_t, int32_t>;

std::tuple<std::vector<int32_t>, Bytes> tier_plan(const std::vector<Kind> &kinds, const Bytes &budget_bytes)
{
    std::vector<struct dsc_tier_kind> given(kinds.size());
    struct dsc_tier_plan plan;
    Bytes held;

    if (kinds.size() > DSC_TIER_MAX_KINDS)
        dsc::fail(DSC_EINVAL, "tier_plan: " + std::to_string(kinds.size()) + " kinds, at most " +
                                  std::to_string(DSC_TIER_MAX_KINDS) + " can be planned");
    for (size_t i = 0; i < kinds.size(); i++) {
        const auto &[held_bytes, link_bytes, disk_bytes, lowest, follows] = kinds[i];

        for (size_t t = 0; t < DSC_N_TIERS; t++)
            for (size_t m = 0; m < DSC_N_TIERS; m++)
                given[i].held_bytes[t][m] = held_bytes[t][m];
        given[i].link_bytes = link_bytes;
        given[i].disk_bytes = disk_bytes;
        given[i].lowest = lowest;
        given[i].follows = follows;
    }
    dsc::check(dsc_tier_plan(given.data(), static_cast<int32_t>(given.size()), budget_bytes.data(), &plan),
               "tier_plan");
    for (size_t m = 0; m < DSC_N_TIERS; m++)
        held[m] = plan.held_bytes[m];
    return {std::vector<int32_t>(plan.tiers, plan.tiers + kinds.size()), held};
}

std::tuple<double, double> twin_flow_ratio(int64_t n_elems, double device_elems_per_s, double host_elems_per_s,
                                           double link_bytes_per_s, double link_bytes_per_elem,
                                           int64_t state_bytes_per_elem, int64_t device_bytes)
{
    const struct dsc_twin_flow flow = {n_elems,          device_elems_per_s,  host_elems_per_s,
                                       link_bytes_per_s, link_bytes_per_elem, state_bytes_per_elem,
                                       device_bytes};
    double ratio = 0;
    double step_s = 0;

    dsc::check(dsc_twin_flow_ratio(&flow, &ratio, &step_s), "twin_flow_ratio");
    return {ratio, step_s};
}

}  // namespace

void dsc::bind_tier(py::module_ &m)
{
    m.attr("TIER_DEVICE") = DSC_TIER_DEVICE;
    m.attr("TIER_HOST") = DSC_TIER_HOST;
    m.attr("TIER_NVME") = DSC_TIER_NVME;
    m.def(
        "tier_plan", &tier_plan, py::arg("kinds"), py::arg("budget_bytes"),
        "(tier of each kind, bytes held in each memory). A kind is (held_bytes[3][3], link_bytes, disk_bytes, lowest, follows), see "
        "dsc/tier.h; budgets are of the device, the host and NVMe. Raises ValueError naming the bad entry, and MemoryError, which says what is "
        "missing where, when no placement fits.");
    m.def(
        "twin_flow_ratio", &twin_flow_ratio, py::kw_only(), py::arg("n_elems"), py::arg("device_elems_per_s"),
        py::arg("host_elems_per_s"), py::arg("link_bytes_per_s"), py::arg("link_bytes_per_elem"),
        py::arg("state_bytes_per_elem"), py::arg("device_bytes"),
        "(part of the states that the host should update, 0..1; seconds that the step then takes): both sides done at the same time, or the "
        "least part with which the rest fits device_bytes. Raises ValueError naming the argument that is out of range.");
}
