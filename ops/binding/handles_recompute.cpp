/* The activation budget as two Python functions: numbers in, numbers out. */
#include "handles.h"

#include "dsc/recompute.h"
#include "status.h"

#include <cstddef>
#include <string>
#include <tuple>
#include <vector>

namespace py = pybind11;

namespace {

/* kept_bytes, transient_bytes, added_ns. */
using Choice = std::tuple<int64_t, int64_t, int64_t>;
/* work_bytes, choices of the layer as a whole, groups of choices. */
using Layer = std::tuple<int64_t, std::vector<Choice>, std::vector<std::vector<Choice>>>;
/* whole, groups. */
using Treated = std::tuple<int32_t, std::vector<int32_t>>;

/* A problem and the memory that it points into. */
struct Problem {
    std::vector<struct dsc_recompute_layer> layers;
    std::vector<int32_t> group_sizes;
    std::vector<struct dsc_recompute_choice> choices;

    explicit Problem(const std::vector<Layer> &given)
    {
        for (const auto &[work_bytes, whole, groups] : given) {
            layers.push_back({work_bytes, static_cast<int32_t>(whole.size()), static_cast<int32_t>(groups.size())});
            add(whole);
            for (const auto &group : groups) {
                group_sizes.push_back(static_cast<int32_t>(group.size()));
                add(group);
            }
        }
    }

    struct dsc_recompute_problem view() const
    {
        return {layers.data(),  static_cast<int32_t>(layers.size()),      group_sizes.data(),
                choices.data(), static_cast<int32_t>(group_sizes.size()), static_cast<int32_t>(choices.size())};
    }

    void add(const std::vector<Choice> &more)
    {
        for (const auto &[kept_bytes, transient_bytes, added_ns] : more)
            choices.push_back({kept_bytes, transient_bytes, added_ns});
    }
};

py::tuple recompute_plan(const std::vector<Layer> &layers, int64_t budget_bytes)
{
    const Problem given(layers);
    const struct dsc_recompute_problem problem = given.view();
    std::vector<int32_t> whole(given.layers.size() + 1);
    std::vector<int32_t> groups(given.group_sizes.size() + 1);
    struct dsc_recompute_plan plan = {};
    std::vector<Treated> treated;
    const int32_t *at = groups.data();
    dsc_status status;

    plan.whole = whole.data();
    plan.groups = groups.data();
    {
        py::gil_scoped_release release;

        status = dsc_recompute_solve(&problem, budget_bytes, &plan);
    }
    dsc::check(status, "recompute_plan");
    for (size_t i = 0; i < given.layers.size(); at += given.layers[i++].n_groups)
        treated.emplace_back(whole[i], std::vector<int32_t>(at, at + given.layers[i].n_groups));
    return py::make_tuple(treated, plan.peak_bytes, plan.added_ns, plan.bound_ns, plan.is_exact);
}

py::tuple recompute_peak(const std::vector<Layer> &layers, const std::vector<Treated> &treated)
{
    const Problem given(layers);
    const struct dsc_recompute_problem problem = given.view();
    std::vector<int32_t> whole(1);
    std::vector<int32_t> groups(1);
    struct dsc_recompute_plan plan = {};

    whole.clear();
    groups.clear();
    for (const auto &[layer_whole, layer_groups] : treated) {
        whole.push_back(layer_whole);
        groups.insert(groups.end(), layer_groups.begin(), layer_groups.end());
    }
    if (whole.size() != given.layers.size() || groups.size() != given.group_sizes.size())
        dsc::fail(DSC_EINVAL, "recompute_peak: " + std::to_string(whole.size()) + " layers and " +
                                  std::to_string(groups.size()) + " groups are treated, of " +
                                  std::to_string(given.layers.size()) + " and " +
                                  std::to_string(given.group_sizes.size()));
    plan.whole = whole.data();
    plan.groups = groups.data();
    dsc::check(dsc_recompute_peak(&problem, &plan), "recompute_peak");
    return py::make_tuple(plan.peak_bytes, plan.added_ns);
}

int64_t recompute_smallest(const std::vector<Layer> &layers)
{
    const Problem given(layers);
    const struct dsc_recompute_problem problem = given.view();
    int64_t n_bytes = 0;

    dsc::check(dsc_recompute_smallest(&problem, &n_bytes), "recompute_smallest");
    return n_bytes;
}

}  // namespace

void dsc::bind_recompute(py::module_ &m)
{
    m.def(
        "recompute_plan", &recompute_plan, py::arg("layers"), py::arg("budget_bytes"),
        "([(whole, groups) of each layer], peak_bytes, added_ns, bound_ns, is_exact): the plan that adds the least time within a budget. A "
        "layer is (work_bytes, whole, groups), a choice (kept_bytes, transient_bytes, added_ns), see dsc/recompute.h. Raises ValueError naming "
        "the bad entry, and MemoryError, which says how small a budget may be, when no plan fits.");
    m.def("recompute_peak", &recompute_peak, py::arg("layers"), py::arg("treated"),
          "(peak_bytes, added_ns) of layers that are treated so. Raises ValueError naming what is out of range.");
    m.def("recompute_smallest", &recompute_smallest, py::arg("layers"),
          "The smallest budget in bytes. Raises ValueError naming the bad entry.");
}
