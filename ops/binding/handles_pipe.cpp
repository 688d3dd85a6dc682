/*
 * Pipeline schedules as one Python class (dsc/pipe.h). It takes and returns lists of actions, and computes times and
 * bytes on demand.
 */
#include "handles.h"

#include "dsc/pipe.h"
#include "status.h"

#include <cstddef>
#include <cstdint>

namespace py = pybind11;

namespace {

/* kind, stage, micro-batch or unit. */
using Action = std::tuple<int32_t, int32_t, int32_t>;
using Lists = std::vector<std::vector<Action>>;
/* forward, input and weight in ns; kept and weight bytes. */
using Cost = std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t>;
/* stage, elements, ns of a gather. */
using Unit = std::tuple<int32_t, int64_t, int64_t>;
/* schedule, ranks, stages a rank, micro-batches, costs by stage. */
using Candidate = std::tuple<std::string, int32_t, int32_t, int32_t, std::vector<Cost>>;

std::vector<struct dsc_pipe_cost> read_costs(const std::vector<Cost> &costs)
{
    std::vector<struct dsc_pipe_cost> list;

    for (const auto &[forward_ns, input_ns, weight_ns, kept_bytes, weight_bytes] : costs)
        list.push_back({forward_ns, input_ns, weight_ns, kept_bytes, weight_bytes});
    return list;
}

/* The lists of all ranks, and the memory that the C table points into. */
class PipeTable {
  public:
    PipeTable(const std::string &schedule, int32_t n_ranks, int32_t n_virtual, int32_t n_micro_batches)
    {
        const struct dsc_pipe_shape shape = {n_ranks, n_virtual, n_micro_batches};
        struct dsc_pipe_traits traits;
        std::vector<struct dsc_pipe_action> computed;
        std::vector<int64_t> begins = {0};

        dsc::check(dsc_pipe_traits_of(schedule.c_str(), &traits), "PipeTable");
        dsc::check(dsc_pipe_check(schedule.c_str(), &shape), "PipeTable");
        set_up(n_ranks, n_ranks * n_virtual, n_micro_batches, traits.has_backward);
        for (int32_t stage = 0; stage < table_.n_stages; stage++)
            dsc::check(dsc_pipe_rank_of(schedule.c_str(), &shape, stage, &rank_of_[static_cast<size_t>(stage)]),
                       "PipeTable");
        for (int32_t rank = 0; rank < n_ranks; rank++) {
            int64_t n = 0;

            dsc::check(dsc_pipe_build(schedule.c_str(), &shape, rank, 0, nullptr, &n), "PipeTable");
            computed.resize(static_cast<size_t>(begins.back() + n));
            dsc::check(dsc_pipe_build(schedule.c_str(), &shape, rank, n, computed.data() + begins.back(), &n),
                       "PipeTable");
            begins.push_back(begins.back() + n);
        }

        struct dsc_pipe_table bare = table_;

        bare.actions = computed.data();
        bare.begins = begins.data();
        dsc::check(dsc_pipe_add_comm(&bare, 0, nullptr, begins_.data()), "PipeTable");
        actions_.resize(static_cast<size_t>(begins_.back()));
        dsc::check(dsc_pipe_add_comm(&bare, begins_.back(), actions_.data(), begins_.data()), "PipeTable");
        point();
    }

    PipeTable(const Lists &lists, std::vector<int32_t> rank_of, int32_t n_micro_batches, bool has_backward,
              const std::vector<Unit> &units, int64_t limit_elements)
    {
        set_units(units, limit_elements);
        set_up(static_cast<int32_t>(lists.size()), static_cast<int32_t>(rank_of.size()), n_micro_batches, has_backward);
        rank_of_ = std::move(rank_of);
        for (size_t rank = 0; rank < lists.size(); rank++) {
            for (const auto &[kind, stage, micro_batch] : lists[rank])
                actions_.push_back({kind, stage, micro_batch});
            begins_[rank + 1] = static_cast<int64_t>(actions_.size());
        }
        point();
    }

    PipeTable(const PipeTable &) = delete;
    PipeTable &operator=(const PipeTable &) = delete;

    /* The same table with gathers and releases of units. */
    std::unique_ptr<PipeTable> with_gathers(const std::vector<Unit> &units, int64_t limit_elements, int32_t ahead) const
    {
        std::unique_ptr<PipeTable> made(new PipeTable());
        struct dsc_pipe_table bare = table_;
        dsc_status status;

        made->set_up(table_.n_ranks, table_.n_stages, table_.n_micro_batches, table_.has_backward);
        made->rank_of_ = rank_of_;
        made->set_units(units, limit_elements);
        made->point();
        bare.units = made->table_.units;
        bare.n_units = made->table_.n_units;
        bare.limit_elements = made->table_.limit_elements;
        {
            py::gil_scoped_release release;

            status = dsc_pipe_add_gathers(&bare, ahead, 0, nullptr, made->begins_.data());
        }
        dsc::check(status, "PipeTable.with_gathers");
        made->actions_.resize(static_cast<size_t>(made->begins_.back()));
        {
            py::gil_scoped_release release;

            status =
                dsc_pipe_add_gathers(&bare, ahead, made->begins_.back(), made->actions_.data(), made->begins_.data());
        }
        dsc::check(status, "PipeTable.with_gathers");
        made->point();
        return made;
    }

    void verify() const
    {
        dsc_status status;
        {
            py::gil_scoped_release release;

            status = dsc_pipe_verify(&table_);
        }
        dsc::check(status, "PipeTable.verify");
    }

    std::vector<Action> actions(int32_t rank) const
    {
        std::vector<Action> list;

        if (rank < 0 || rank >= table_.n_ranks)
            throw py::index_error("no such rank");
        for (int64_t i = begins_[static_cast<size_t>(rank)]; i < begins_[static_cast<size_t>(rank) + 1]; i++) {
            const struct dsc_pipe_action &action = actions_[static_cast<size_t>(i)];

            list.emplace_back(action.kind, action.stage, action.micro_batch);
        }
        return list;
    }

    py::tuple simulate(const std::vector<Cost> &costs, int64_t transfer_ns) const
    {
        const std::vector<struct dsc_pipe_cost> list = read_costs(costs);
        std::vector<struct dsc_pipe_span> spans(actions_.size() + 1);
        std::vector<struct dsc_pipe_usage> usage(static_cast<size_t>(table_.n_ranks));
        std::vector<std::vector<std::pair<int64_t, int64_t>>> by_rank;
        std::vector<std::tuple<int64_t, int64_t, int32_t, int64_t, int64_t, int64_t, int64_t>> used;
        int64_t makespan_ns = 0;

        if (list.size() != static_cast<size_t>(table_.n_stages))
            throw py::value_error(std::to_string(list.size()) + " costs for " + std::to_string(table_.n_stages) +
                                  " stages");
        dsc::check(dsc_pipe_simulate(&table_, list.data(), transfer_ns, spans.data(), usage.data(), &makespan_ns),
                   "PipeTable.simulate");
        for (size_t rank = 0; rank < usage.size(); rank++) {
            std::vector<std::pair<int64_t, int64_t>> times;

            for (int64_t i = begins_[rank]; i < begins_[rank + 1]; i++)
                times.emplace_back(spans[static_cast<size_t>(i)].begin_ns, spans[static_cast<size_t>(i)].end_ns);
            by_rank.push_back(std::move(times));
            used.emplace_back(usage[rank].busy_ns, usage[rank].peak_bytes, usage[rank].peak_live,
                              usage[rank].peak_live_elements, usage[rank].n_gathers, usage[rank].gathered_elements,
                              usage[rank].link_ns);
        }
        return py::make_tuple(makespan_ns, by_rank, used);
    }

    std::vector<Unit> units() const
    {
        std::vector<Unit> list;

        for (const struct dsc_pipe_unit &unit : units_)
            list.emplace_back(unit.stage, unit.numel, unit.gather_ns);
        return list;
    }

    int64_t limit_elements() const { return table_.limit_elements; }

    const std::vector<int32_t> &rank_of() const { return rank_of_; }

    int32_t n_ranks() const { return table_.n_ranks; }

    int32_t n_micro_batches() const { return table_.n_micro_batches; }

    bool has_backward() const { return table_.has_backward; }

  private:
    PipeTable() = default;

    void set_units(const std::vector<Unit> &units, int64_t limit_elements)
    {
        for (const auto &[stage, numel, gather_ns] : units)
            units_.push_back({stage, numel, gather_ns});
        table_.limit_elements = limit_elements;
    }

    void set_up(int32_t n_ranks, int32_t n_stages, int32_t n_micro_batches, bool has_backward)
    {
        begins_.assign(static_cast<size_t>(n_ranks) + 1, 0);
        rank_of_.assign(static_cast<size_t>(n_stages), 0);
        table_.n_ranks = n_ranks;
        table_.n_stages = n_stages;
        table_.n_micro_batches = n_micro_batches;
        table_.has_backward = has_backward;
        point();
    }

    void point()
    {
        table_.actions = actions_.data();
        table_.begins = begins_.data();
        table_.rank_of = rank_of_.data();
        table_.units = units_.data();
        table_.n_units = static_cast<int32_t>(units_.size());
    }

    std::vector<struct dsc_pipe_action> actions_;
    std::vector<int64_t> begins_;
    std::vector<int32_t> rank_of_;
    std::vector<struct dsc_pipe_unit> units_;
    struct dsc_pipe_table table_ = {nullptr, nullptr, nullptr, 0, 0, 0, false, nullptr, 0, -1};
};

py::tuple pipe_choose(const std::vector<Candidate> &candidates, int64_t transfer_ns, int64_t limit_bytes)
{
    std::vector<std::vector<struct dsc_pipe_cost>> costs;
    std::vector<struct dsc_pipe_candidate> list;
    std::vector<struct dsc_pipe_outcome> outcomes(candidates.size() + 1);
    std::vector<std::pair<int64_t, int64_t>> result;
    int32_t index = -1;

    for (const Candidate &candidate : candidates) {
        const auto &[schedule, n_ranks, n_virtual, n_micro_batches, of_stages] = candidate;

        if (static_cast<int64_t>(of_stages.size()) != static_cast<int64_t>(n_ranks) * n_virtual)
            throw py::value_error(schedule + ": " + std::to_string(of_stages.size()) + " costs for " +
                                  std::to_string(n_ranks) + " x " + std::to_string(n_virtual) + " stages");
        costs.push_back(read_costs(of_stages));
    }
    for (size_t i = 0; i < candidates.size(); i++) {
        const auto &[schedule, n_ranks, n_virtual, n_micro_batches, of_stages] = candidates[i];

        list.push_back({schedule.c_str(), {n_ranks, n_virtual, n_micro_batches}, costs[i].data()});
    }
    dsc::check(dsc_pipe_choose(list.data(), static_cast<int32_t>(list.size()), transfer_ns, limit_bytes,
                               outcomes.data(), &index),
               "pipe_choose");
    for (size_t i = 0; i < candidates.size(); i++)
        result.emplace_back(outcomes[i].makespan_ns, outcomes[i].peak_bytes);
    return py::make_tuple(index, result);
}

std::string pipe_format(const Action &action)
{
    const struct dsc_pipe_action given = {std::get<0>(action), std::get<1>(action), std::get<2>(action)};
    char text[40];

    dsc::check(dsc_pipe_format(&given, sizeof text, text), "pipe_format");
    return text;
}

py::dict pipe_schedules()
{
    py::dict all;

    for (int32_t i = 0; dsc_pipe_schedule_name(i) != nullptr; i++) {
        struct dsc_pipe_traits traits;

        dsc::check(dsc_pipe_traits_of(dsc_pipe_schedule_name(i), &traits), "pipe_schedules");
        all[dsc_pipe_schedule_name(i)] =
            py::make_tuple(traits.min_virtual, traits.max_virtual, traits.min_micro_batches_per_rank, traits.is_v,
                           traits.splits_backward, traits.has_backward);
    }
    return all;
}

}  // namespace

void dsc::bind_pipe(py::module_ &m)
{
#define DSC_PIPE_ATTR(name, letters) m.attr("PIPE_" #name) = static_cast<int>(DSC_PIPE_##name);
    DSC_PIPE_KIND_MAP(DSC_PIPE_ATTR)
#undef DSC_PIPE_ATTR
    py::class_<PipeTable>(m, "PipeTable", "The actions of all ranks of a pipeline, with sends and receives.")
        .def(py::init<const std::string &, int32_t, int32_t, int32_t>(), py::arg("schedule"), py::arg("n_ranks"),
             py::arg("n_virtual"), py::arg("n_micro_batches"),
             "The table of a schedule. Raises ValueError for a name that is none, or with the nearest shape that it\n"
             "can have.")
        .def(
            py::init<const Lists &, std::vector<int32_t>, int32_t, bool, const std::vector<Unit> &, int64_t>(),
            py::arg("lists"), py::arg("rank_of"), py::arg("n_micro_batches"), py::arg("has_backward"),
            py::arg("units") = std::vector<Unit>(), py::arg("limit_elements") = -1,
            "A table from lists of (kind, stage, micro-batch), one a rank; verify() tells whether it is one. units and\n"
            "limit_elements: as in with_gathers.")
        .def(
            "with_gathers", &PipeTable::with_gathers, py::arg("units"), py::arg("limit_elements") = -1,
            py::arg("ahead") = 1,
            "The same table with gathers and releases: (PIPE_GATHER or PIPE_RELEASE, stage, unit of the stage). units:\n"
            "(stage, elements, ns of a gather), by stage and in the order of its forward. limit_elements: the most\n"
            "elements of live units on a rank; -1: no limit. ahead: the most computations that a gather precedes its use\n"
            "by. Raises ValueError, with the stage and both numbers, if a computation needs more than the limit.")
        .def("verify", &PipeTable::verify,
             "Raises ValueError where the table is not complete, ordered and free of deadlock.")
        .def("actions", &PipeTable::actions, py::arg("rank"), "[(kind, stage, micro-batch)] of a rank.")
        .def(
            "simulate", &PipeTable::simulate, py::arg("costs"), py::arg("transfer_ns") = 0,
            "costs: (forward ns, input ns, weight ns, kept bytes, weight bytes) of each stage. Returns (makespan in ns,\n"
            "[(begin ns, end ns)] of each rank's actions, (busy ns, peak bytes, peak live forwards, peak live\n"
            "elements, gathers, gathered elements, ns of gathers) of each rank).")
        .def_property_readonly("rank_of", &PipeTable::rank_of, "The rank of each stage.")
        .def_property_readonly("units", &PipeTable::units, "(stage, elements, ns of a gather) of each unit.")
        .def_property_readonly("limit_elements", &PipeTable::limit_elements,
                               "The most elements of live units on a rank; -1: no limit.")
        .def_property_readonly("n_ranks", &PipeTable::n_ranks)
        .def_property_readonly("n_micro_batches", &PipeTable::n_micro_batches)
        .def_property_readonly("has_backward", &PipeTable::has_backward);
    m.def(
        "pipe_choose", &pipe_choose, py::arg("candidates"), py::arg("transfer_ns"), py::arg("limit_bytes"),
        "candidates: (schedule, ranks, stages a rank, micro-batches, costs). Returns (index of the fastest that holds at\n"
        "most limit_bytes on each rank, [(makespan in ns, or -1 where the schedule refuses its shape; peak bytes)]).\n"
        "Raises MemoryError where none does, with the least that one of them holds.");
    m.def("pipe_format", &pipe_format, py::arg("action"), "The text of (kind, stage, micro-batch): 2F0, 0SEND_F5.");
    m.def(
        "pipe_schedules", &pipe_schedules,
        "{name: (min stages a rank, max stages a rank, min micro-batches a rank, is a V, splits backward, has backward)}");
}
