/* The activation budget as two Python functions. All arguments and results are numbers. */
#include "handles.h"

#include "dsc/recompute.h"
#include "status.h"

#include <cstddef>
#include <string>
#include <tuple>
#include <vector>

namespace py = pybind11;

namespace {

/* whole, groups. */
using Treated = std::tuple<int32_t, std::vector<int32_t>>;

/* Borrowed entries of a list or tuple. Nothing is copied, because a call reads tens of thousands of entries. */
class Entries {
    PyObject *items_;

  public:
    explicit Entries(PyObject *from, const char *what, Py_ssize_t n_wanted = -1) : items_(PySequence_Fast(from, what))
    {
        if (items_ == nullptr)
            throw py::error_already_set();
        if (n_wanted >= 0 && PySequence_Fast_GET_SIZE(items_) != n_wanted) {
            Py_DECREF(items_);
            throw py::type_error(what);
        }
    }
    ~Entries() { Py_DECREF(items_); }
    Entries(const Entries &) = delete;
    Entries &operator=(const Entries &) = delete;

    PyObject *const *begin() const { return PySequence_Fast_ITEMS(items_); }
    PyObject *const *end() const { return begin() + PySequence_Fast_GET_SIZE(items_); }
    PyObject *operator[](Py_ssize_t i) const { return begin()[i]; }
    int32_t size() const { return static_cast<int32_t>(PySequence_Fast_GET_SIZE(items_)); }
};

int64_t number(PyObject *from)
{
    const long long found = PyLong_AsLongLong(from);

    if (found == -1 && PyErr_Occurred() != nullptr)
        throw py::error_already_set();
    return found;
}

/* A problem and the memory that it points into. */
struct Problem {
    std::vector<struct dsc_recompute_layer> layers;
    std::vector<int32_t> group_sizes;
    std::vector<struct dsc_recompute_choice> choices;

    explicit Problem(const py::sequence &given)
    {
        for (PyObject *item : Entries(given.ptr(), "layers must be a list")) {
            const Entries layer(item, "a layer must be (work_bytes, whole, groups)", 3);
            const Entries whole(layer[1], "the choices of a layer must be a list");
            const Entries groups(layer[2], "the groups of a layer must be a list");

            layers.push_back({number(layer[0]), whole.size(), groups.size()});
            add(whole);
            for (PyObject *one : groups) {
                const Entries group(one, "a group must be a list of choices");

                group_sizes.push_back(group.size());
                add(group);
            }
        }
    }

    struct dsc_recompute_problem view() const
    {
        return {layers.data(),  static_cast<int32_t>(layers.size()),      group_sizes.data(),
                choices.data(), static_cast<int32_t>(group_sizes.size()), static_cast<int32_t>(choices.size())};
    }

    void add(const Entries &more)
    {
        for (PyObject *item : more) {
            const Entries choice(item, "a choice must be (kept_bytes, transient_bytes, added_ns)", 3);

            choices.push_back({number(choice[0]), number(choice[1]), number(choice[2])});
        }
    }
};

py::tuple recompute_plan(const py::sequence &layers, int64_t budget_bytes)
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

py::tuple recompute_peak(const py::sequence &layers, const std::vector<Treated> &treated)
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

int64_t recompute_smallest(const py::sequence &layers)
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
