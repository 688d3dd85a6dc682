/* The time of a step on many ranks as one Python function (dsc/plan.h): lists of numbers in, lists of numbers out. */
#include "handles.h"

#include "dsc/plan.h"
#include "status.h"

#include <cstddef>
#include <cstdint>

namespace py = pybind11;

namespace {

/* parent, bytes/s, latency, inner bytes/s, pull bytes/s, pull latency, read bytes/s, write bytes/s, file latency. */
using Node = std::tuple<int32_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t>;
/* node, program, slow_ppm, port bytes/s, port latency, copy bytes/s. */
using Rank = std::tuple<int32_t, int32_t, int64_t, int64_t, int64_t, int64_t>;
/* kind, amount. */
using Action = std::pair<int32_t, int64_t>;
/* op, axis, lane, flags, amount. */
using Transfer = std::tuple<int32_t, int32_t, int32_t, int32_t, int64_t>;
using Program = std::pair<std::vector<Action>, std::vector<Transfer>>;
using Span = std::pair<int64_t, int64_t>;
using Spans = std::vector<std::vector<Span>>;

/* A step and the memory that it points into. */
struct Step {
    std::vector<struct dsc_plan_node> nodes;
    std::vector<struct dsc_plan_rank> ranks;
    std::vector<struct dsc_plan_action> actions;
    std::vector<struct dsc_plan_transfer> transfers;
    std::vector<int64_t> action_begins = {0};
    std::vector<int64_t> transfer_begins = {0};
    std::vector<int32_t> members;
    std::vector<int64_t> member_begins = {0};
    std::vector<int32_t> group_of;
    std::vector<int32_t> shown;
    struct dsc_plan_step view = {};

    void add_places(const std::vector<Node> &given_nodes, const std::vector<Rank> &given_ranks)
    {
        for (const auto &[parent, rate, ns, inner, pull_rate, pull_ns, read, write, file_ns] : given_nodes)
            nodes.push_back({parent, rate, ns, inner, pull_rate, pull_ns, read, write, file_ns});
        for (const auto &[node, program, slow_ppm, port_rate, port_ns, copy_rate] : given_ranks)
            ranks.push_back({node, program, slow_ppm, port_rate, port_ns, copy_rate});
    }

    void add_programs(const std::vector<Program> &programs)
    {
        for (const auto &[program_actions, program_transfers] : programs) {
            for (const auto &[kind, amount] : program_actions)
                actions.push_back({kind, amount});
            for (const auto &[op, axis, lane, flags, amount] : program_transfers)
                transfers.push_back({op, axis, lane, flags, amount});
            action_begins.push_back(static_cast<int64_t>(actions.size()));
            transfer_begins.push_back(static_cast<int64_t>(transfers.size()));
        }
    }

    void add_groups(const std::vector<std::vector<int32_t>> &groups,
                    const std::vector<std::vector<int32_t>> &groups_of_ranks)
    {
        for (const std::vector<int32_t> &group : groups) {
            members.insert(members.end(), group.begin(), group.end());
            member_begins.push_back(static_cast<int64_t>(members.size()));
        }
        if (groups_of_ranks.size() != ranks.size())
            throw py::value_error("plan_simulate: group_of has " + std::to_string(groups_of_ranks.size()) +
                                  " entries for " + std::to_string(ranks.size()) + " ranks");
        for (const std::vector<int32_t> &row : groups_of_ranks) {
            if (row.size() != groups_of_ranks[0].size())
                throw py::value_error("plan_simulate: an entry of group_of has " + std::to_string(row.size()) +
                                      " axes, the first has " + std::to_string(groups_of_ranks[0].size()));
            group_of.insert(group_of.end(), row.begin(), row.end());
        }
        view.n_axes = groups_of_ranks.empty() ? 0 : static_cast<int32_t>(groups_of_ranks[0].size());
    }

    void point(int32_t n_lanes)
    {
        view.nodes = nodes.data();
        view.ranks = ranks.data();
        view.actions = actions.data();
        view.action_begins = action_begins.data();
        view.transfers = transfers.data();
        view.transfer_begins = transfer_begins.data();
        view.members = members.data();
        view.member_begins = member_begins.data();
        view.group_of = group_of.data();
        view.shown = shown.data();
        view.n_nodes = static_cast<int32_t>(nodes.size());
        view.n_ranks = static_cast<int32_t>(ranks.size());
        view.n_programs = static_cast<int32_t>(action_begins.size() - 1);
        view.n_groups = static_cast<int32_t>(member_begins.size() - 1);
        view.n_lanes = n_lanes;
        view.n_shown = static_cast<int32_t>(shown.size());
    }

    /* The program of a rank, for the sizes of results; entries that are out of range have none. */
    static int64_t length(const std::vector<int64_t> &begins, int32_t program)
    {
        if (program < 0 || static_cast<size_t>(program) + 1 >= begins.size())
            return 0;
        return begins[static_cast<size_t>(program) + 1] - begins[static_cast<size_t>(program)];
    }

    int32_t program_of(int32_t rank) const
    {
        return rank < 0 || static_cast<size_t>(rank) >= ranks.size() ? -1 : ranks[static_cast<size_t>(rank)].program;
    }
};

/* The result of a simulation. */
struct Times {
    int64_t makespan_ns = 0;
    std::vector<struct dsc_plan_usage> ranks;
    std::vector<struct dsc_plan_traffic> nodes;
    std::vector<std::vector<int64_t>> exposed_ns;
    Spans actions;
    Spans transfers;
};

/* Takes the next n spans of a list, and moves *at behind them. */
std::vector<Span> take_spans(const struct dsc_plan_span **at, int64_t n)
{
    std::vector<Span> list;

    list.reserve(static_cast<size_t>(n));
    for (const struct dsc_plan_span *end = *at + n; *at < end; ++*at)
        list.emplace_back((*at)->begin_ns, (*at)->end_ns);
    return list;
}

std::unique_ptr<Times> run(const Step &step)
{
    std::unique_ptr<Times> found(new Times());
    int64_t n_transfers = 0;
    int64_t n_actions = 0;
    int64_t n_spans = 0;
    dsc_status status;

    for (const struct dsc_plan_rank &rank : step.ranks)
        n_transfers += Step::length(step.transfer_begins, rank.program);
    for (int32_t rank : step.shown) {
        n_actions += Step::length(step.action_begins, step.program_of(rank));
        n_spans += Step::length(step.transfer_begins, step.program_of(rank));
    }

    std::vector<int64_t> exposed_ns(static_cast<size_t>(n_transfers) + 1);
    std::vector<struct dsc_plan_span> actions(static_cast<size_t>(n_actions) + 1);
    std::vector<struct dsc_plan_span> transfers(static_cast<size_t>(n_spans) + 1);

    found->ranks.resize(step.ranks.size() + 1);
    found->nodes.resize(step.nodes.size() + 1);

    struct dsc_plan_times times = {
        0, found->ranks.data(), found->nodes.data(), exposed_ns.data(), actions.data(), transfers.data()};
    {
        py::gil_scoped_release release;

        status = dsc_plan_simulate(&step.view, &times);
    }
    dsc::check(status, "plan_simulate");

    const int64_t *exposed_at = exposed_ns.data();
    const struct dsc_plan_span *action_at = actions.data();
    const struct dsc_plan_span *transfer_at = transfers.data();

    found->makespan_ns = times.makespan_ns;
    found->ranks.resize(step.ranks.size());
    found->nodes.resize(step.nodes.size());
    for (const struct dsc_plan_rank &rank : step.ranks) {
        const int64_t n = Step::length(step.transfer_begins, rank.program);

        found->exposed_ns.emplace_back(exposed_at, exposed_at + n);
        exposed_at += n;
    }
    for (int32_t rank : step.shown) {
        const int32_t program = step.program_of(rank);

        found->actions.push_back(take_spans(&action_at, Step::length(step.action_begins, program)));
        found->transfers.push_back(take_spans(&transfer_at, Step::length(step.transfer_begins, program)));
    }
    return found;
}

std::unique_ptr<Times> plan_simulate(const std::vector<Node> &nodes, const std::vector<Rank> &ranks,
                                     const std::vector<Program> &programs,
                                     const std::vector<std::vector<int32_t>> &groups,
                                     const std::vector<std::vector<int32_t>> &group_of, int32_t n_lanes,
                                     std::vector<int32_t> shown)
{
    Step step;

    step.shown = std::move(shown);
    step.add_places(nodes, ranks);
    step.add_programs(programs);
    step.add_groups(groups, group_of);
    step.point(n_lanes);
    return run(step);
}

}  // namespace

void dsc::bind_plan(py::module_ &m)
{
    m.attr("PLAN_RUN") = static_cast<int>(DSC_PLAN_RUN);
    m.attr("PLAN_START") = static_cast<int>(DSC_PLAN_START);
    m.attr("PLAN_WAIT") = static_cast<int>(DSC_PLAN_WAIT);
    py::dict ops;
#define DSC_PLAN_ITEM(name, text, has_group) ops[text] = static_cast<int>(DSC_PLAN_##name);
    DSC_PLAN_OP_MAP(DSC_PLAN_ITEM)
#undef DSC_PLAN_ITEM
    m.attr("PLAN_OPS") = ops;
    m.attr("PLAN_PULL") = static_cast<int>(DSC_PLAN_PULL);
    m.attr("PLAN_TWO_LEVELS") = static_cast<int>(DSC_PLAN_TWO_LEVELS);
    py::class_<struct dsc_plan_usage>(m, "PlanUsage", "What a rank does in a step: ns, and bytes through its port.")
        .def_readonly("end_ns", &dsc_plan_usage::end_ns, "The end of its program.")
        .def_readonly("busy_ns", &dsc_plan_usage::busy_ns, "It computes.")
        .def_readonly("waited_ns", &dsc_plan_usage::waited_ns, "It waits for transfers, or pulls.")
        .def_readonly("up_bytes", &dsc_plan_usage::up_bytes);
    py::class_<struct dsc_plan_traffic>(m, "PlanTraffic", "Bytes over the link of a node, inside it, and of its file.")
        .def_readonly("up_bytes", &dsc_plan_traffic::up_bytes)
        .def_readonly("inner_bytes", &dsc_plan_traffic::inner_bytes, "Pulls included.")
        .def_readonly("read_bytes", &dsc_plan_traffic::read_bytes)
        .def_readonly("written_bytes", &dsc_plan_traffic::written_bytes);
    py::class_<Times>(m, "PlanTimes", "The times of a step. Each access of a list copies it.")
        .def_readonly("makespan_ns", &Times::makespan_ns, "The end of the last program and the last transfer.")
        .def_readonly("ranks", &Times::ranks, "PlanUsage of each rank.")
        .def_readonly("nodes", &Times::nodes, "PlanTraffic of each node.")
        .def_readonly("exposed_ns", &Times::exposed_ns, "What the waits for each transfer took, of each rank.")
        .def_readonly("actions", &Times::actions, "[(begin ns, end ns)] of the actions of each shown rank.")
        .def_readonly("transfers", &Times::transfers,
                      "[(begin ns, end ns)] of the transfers of each shown rank; (-1, -1): it never ran.");
    m.def(
        "plan_simulate", &plan_simulate, py::arg("nodes"), py::arg("ranks"), py::arg("programs"), py::arg("groups"),
        py::arg("group_of"), py::arg("n_lanes"), py::arg("shown") = std::vector<int32_t>(),
        "The times of a step, see dsc/plan.h. Latencies in ns, rates in bytes/s, 0 where there is no limit. nodes:\n"
        "(parent, rate, latency, inner rate, pull rate, pull latency, read rate, write rate, file latency) of each,\n"
        "parents first, -1 for the root's. ranks: (node, program, slow_ppm, port rate, port latency, copy rate).\n"
        "programs: ([(kind, amount)] of actions, [(op, axis, lane, flags, amount)] of transfers). groups: ranks in the\n"
        "order of their ring. group_of: each rank's group on each axis, or -1. shown: ranks whose spans are wanted.\n"
        "Raises ValueError naming what is out of range, transfers that do not match, or a rank that waits for ever.");
}
