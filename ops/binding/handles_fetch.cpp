/*
 * Gather plans and their runner (ZeRO stage 3) as Python objects: FetchPlan, Fetch, and two functions on traces. All
 * arguments and results are integers.
 */
#include "handles.h"

#include "dsc/fetch.h"
#include "status.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace py = pybind11;

namespace {

using Elems = std::vector<int64_t>;
using Units = std::vector<int32_t>;
using Flags = std::vector<bool>;

template <class Entries>
int64_t count_of(const Entries &entries)
{
    return static_cast<int64_t>(entries.size());
}

/* The cores count units in int32_t. */
int32_t n_units_of(size_t n, const char *op)
{
    if (n > static_cast<size_t>(INT32_MAX))
        dsc::fail(DSC_EOVERFLOW, std::string(op) + ": " + std::to_string(n) + " units do not fit int32_t");
    return static_cast<int32_t>(n);
}

std::vector<uint8_t> bytes_of(const Flags &flags)
{
    return {flags.begin(), flags.end()};
}

class FetchPlan {
  public:
    FetchPlan(Units steps, Elems unit_elems, int64_t max_live_elems, int64_t ahead_elems, int64_t max_reuse_elems)
        : steps(std::move(steps)), unit_elems(std::move(unit_elems)), until(this->steps.size()),
          next_(this->steps.size()), keep_(this->steps.size())
    {
        const int32_t n_units = n_units_of(this->unit_elems.size(), "FetchPlan");
        Elems scratch(4 * this->steps.size() + 2 * this->unit_elems.size());
        struct dsc_prefetch_limits limits = DSC_PREFETCH_LIMITS_INIT;

        limits.max_live_elems = max_live_elems;
        limits.ahead_elems = ahead_elems;
        limits.max_reuse_elems = max_reuse_elems;
        dsc::check(dsc_prefetch_plan(this->steps.data(), count_of(this->steps), this->unit_elems.data(), n_units,
                                     &limits, scratch.data(), until.data(), next_.data(), keep_.data(), &peak_elems),
                   "FetchPlan");
    }
    FetchPlan(const FetchPlan &) = delete;
    FetchPlan &operator=(const FetchPlan &) = delete;

    struct dsc_fetch_plan view() const
    {
        return {steps.data(), until.data(), next_.data(), keep_.data(), count_of(steps)};
    }

    Flags keep() const { return {keep_.begin(), keep_.end()}; }

    Units steps;
    Elems unit_elems;
    Elems until;
    int64_t peak_elems = 0;

  private:
    Elems next_;
    std::vector<uint8_t> keep_;
};

/* Owns the arrays that the core keeps pointers into, so it can be neither copied nor moved. */
class Fetch {
  public:
    explicit Fetch(Elems unit_elems) : unit_elems_(std::move(unit_elems)), units_(unit_elems_.size())
    {
        dsc::check(dsc_fetch_init(&fetch_, unit_elems_.data(), n_units_of(unit_elems_.size(), "Fetch"), units_.data()),
                   "Fetch");
        dsc::check(dsc_trace_init(&record_, nullptr, nullptr, 0), "Fetch");
    }
    Fetch(const Fetch &) = delete;
    Fetch &operator=(const Fetch &) = delete;

    void begin(std::shared_ptr<const FetchPlan> plan, const Units &live)
    {
        const struct dsc_fetch_plan view = plan->view();
        std::vector<uint8_t> is_live(unit_elems_.size());

        if (plan->unit_elems != unit_elems_)
            dsc::fail(DSC_EINVAL,
                      "Fetch.begin: the plan was made for other units: " + std::to_string(plan->unit_elems.size()) +
                          " here are " + std::to_string(unit_elems_.size()) + ", or sizes differ");
        for (const int32_t unit : live) {
            if (unit < 0 || unit >= fetch_.n_units)
                dsc::fail(DSC_EINVAL, "Fetch.begin: live unit " + std::to_string(unit) + " must be 0 to " +
                                          std::to_string(fetch_.n_units - 1));
            is_live[static_cast<size_t>(unit)] = 1;
        }
        actions_.resize(std::max(actions_.size(), 3 * plan->steps.size() + unit_elems_.size()));
        dsc::check(dsc_fetch_begin(&fetch_, &view, is_live.data(), &record_), "Fetch.begin");
        plan_ = std::move(plan);
    }

    /* If there is nothing to do, nothing is allocated: the empty tuple is a single shared object. */
    py::object use(int32_t unit)
    {
        int64_t n = 0;

        if (record_.capacity - record_.n_steps < fetch_.plan.n_steps - fetch_.cursor + 1)
            grow_record();
        dsc::check(dsc_fetch_use(&fetch_, unit, count_of(actions_), actions_.data(), &n), "Fetch.use");
        return to_python(n);
    }

    py::object end(int32_t keep_unit)
    {
        int64_t n = 0;

        if (record_.capacity - record_.n_steps < fetch_.plan.n_steps - fetch_.cursor + 1)
            grow_record();
        dsc::check(dsc_fetch_end(&fetch_, keep_unit, count_of(actions_), actions_.data(), &n), "Fetch.end");
        plan_.reset();
        return to_python(n);
    }

    py::object abort()
    {
        int64_t n = 0;

        dsc::check(dsc_fetch_abort(&fetch_, count_of(actions_), actions_.data(), &n), "Fetch.abort");
        plan_.reset();
        return to_python(n);
    }

    bool is_active() const { return fetch_.is_active; }
    int64_t n_unexpected() const { return fetch_.n_unexpected; }
    int64_t live_elems() const { return fetch_.live_elems; }
    int64_t peak_elems() const { return fetch_.peak_elems; }

    Units live() const
    {
        Units live;

        for (int32_t u = 0; u < fetch_.n_units; u++)
            if (units_[static_cast<size_t>(u)].is_live)
                live.push_back(u);
        return live;
    }

    std::pair<Units, Flags> record() const
    {
        return {Units(record_.units, record_.units + record_.n_steps),
                Flags(record_.is_used, record_.is_used + record_.n_steps)};
    }

  private:
    /* Unexpected steps have no bound, so the storage doubles. */
    void grow_record()
    {
        const int64_t n_needed = record_.n_steps + fetch_.plan.n_steps - fetch_.cursor + 1;
        const size_t capacity = static_cast<size_t>(std::max({n_needed, 2 * record_.capacity, INT64_C(64)}));

        record_units_.resize(capacity);
        record_is_used_.resize(capacity);
        record_.units = record_units_.data();
        record_.is_used = record_is_used_.data();
        record_.capacity = static_cast<int64_t>(capacity);
    }

    py::object to_python(int64_t n) const
    {
        if (n == 0)
            return py::tuple();
        py::list list(static_cast<size_t>(n));

        for (size_t i = 0; i < static_cast<size_t>(n); i++)
            list[i] = py::make_tuple(actions_[i].kind, actions_[i].unit);
        return std::move(list);
    }

    Elems unit_elems_;
    std::vector<struct dsc_fetch_unit> units_;
    std::vector<struct dsc_fetch_action> actions_;
    Units record_units_;
    std::vector<uint8_t> record_is_used_;
    std::shared_ptr<const FetchPlan> plan_;
    struct dsc_fetch fetch_ {};
    struct dsc_trace record_ {};
};

Units trace_prune(Units units, const Flags &used, const Flags &may_drop)
{
    std::vector<uint8_t> is_used = bytes_of(used);
    const std::vector<uint8_t> is_droppable = bytes_of(may_drop);
    std::vector<uint8_t> scratch(may_drop.size());
    struct dsc_trace trace {};

    if (units.size() != used.size())
        dsc::fail(DSC_EINVAL, "trace_prune: " + std::to_string(units.size()) + " units and " +
                                  std::to_string(used.size()) + " used flags");
    dsc::check(dsc_trace_init(&trace, units.data(), is_used.data(), count_of(units)), "trace_prune");
    trace.n_steps = count_of(units);
    dsc::check(dsc_trace_prune(&trace, is_droppable.data(), n_units_of(may_drop.size(), "trace_prune"), scratch.data()),
               "trace_prune");
    units.resize(static_cast<size_t>(trace.n_steps));
    return units;
}

}  // namespace

void dsc::bind_fetch(py::module_ &m)
{
    py::class_<FetchPlan, std::shared_ptr<FetchPlan>>(
        m, "FetchPlan",
        "When each step's gather unit is gathered, and whether it stays live until its next use (dsc/fetch.h). steps: unit of each use in "
        "order; unit_elems: elements of each unit; the limits are elements as well. ValueError names the bad entry.")
        .def(py::init<Units, Elems, int64_t, int64_t, int64_t>(), py::arg("steps"), py::arg("unit_elems"),
             py::arg("max_live_elems"), py::arg("ahead_elems"), py::arg("max_reuse_elems"))
        .def_readonly("steps", &FetchPlan::steps)
        .def_property_readonly("n_steps", [](const FetchPlan &self) { return self.steps.size(); })
        .def_readonly("until", &FetchPlan::until,
                      "Before step i runs, the gathers of the steps below until[i] have been issued.")
        .def_property_readonly("keep", &FetchPlan::keep, "Whether the unit of step i stays live until its next step.")
        .def_readonly("peak_elems", &FetchPlan::peak_elems, "The largest number of live elements at any step.");

    py::class_<Fetch> fetch(
        m, "Fetch",
        "Follows a FetchPlan through a pass: each use of a unit becomes the actions that are due, [(kind, unit), ...] with kind GATHER, "
        "RELEASE or STEP (a step has been passed), to be done in that order (dsc/fetch.h); an empty tuple when there are none. For one plan the "
        "sequence of GATHER and STEP is the same on all ranks, whatever subsequence of it each of them uses. ValueError for bad arguments, RuntimeError outside a pass.");
    fetch.def(py::init<Elems>(), py::arg("unit_elems"))
        .def("begin", &Fetch::begin, py::arg("plan").none(false), py::arg("live") = Units(),
             "Begins a pass. live: units that are live already; the same on all ranks.")
        .def("use", &Fetch::use, py::arg("unit"), "The unit is going to be used now: what to do first.")
        .def(
            "end", &Fetch::end, py::arg("keep_unit") = -1,
            "Ends the pass: the gathers of the steps that are left, then all releases, except that of keep_unit (the same on all ranks).")
        .def("abort", &Fetch::abort,
             "Gives the pass up: all releases, no gather, an empty record. Nothing outside a pass.")
        .def_property_readonly("is_active", &Fetch::is_active, "Between begin and end.")
        .def_property_readonly("n_unexpected", &Fetch::n_unexpected, "Uses of this pass that the plan did not have.")
        .def_property_readonly("live", &Fetch::live, "The live units, ascending; after end the one that was kept.")
        .def_property_readonly("live_elems", &Fetch::live_elems, "Their elements.")
        .def_property_readonly("peak_elems", &Fetch::peak_elems, "The largest live_elems of this pass.")
        .def_property_readonly(
            "record", &Fetch::record,
            "(units, used) of this pass, or of the last one: the steps passed in order, unexpected ones where they came.");
    fetch.attr("GATHER") = static_cast<int>(DSC_FETCH_GATHER);
    fetch.attr("RELEASE") = static_cast<int>(DSC_FETCH_RELEASE);
    fetch.attr("STEP") = static_cast<int>(DSC_FETCH_STEP);

    m.def(
        "trace_prune", &trace_prune, py::arg("units"), py::arg("used"), py::arg("may_drop"),
        "The steps that the next plan should have: without those that were not used and whose unit may be dropped (may_drop, one flag a unit) or "
        "is used by another step, and without repetitions side by side. used has to be the same on all ranks: combine it with OR first.");
}
