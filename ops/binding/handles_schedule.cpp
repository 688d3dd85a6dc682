/* The schedule of a server as a Python class: numbers in, plans out. */
#include "handles.h"

#include "dsc/schedule.h"
#include "status.h"

#include <cstdint>

namespace py = pybind11;

namespace {

using Row = std::tuple<int32_t, int64_t, int64_t>;

class Schedule {
  public:
    Schedule(int32_t n_blocks, int32_t most_rows)
    {
        dsc::check(dsc_schedule_open(n_blocks, most_rows, &schedule_), "Schedule");
    }
    ~Schedule() { dsc_schedule_close(schedule_); }
    Schedule(const Schedule &) = delete;
    Schedule &operator=(const Schedule &) = delete;

    struct dsc_schedule_counts counts() const
    {
        struct dsc_schedule_counts counts;

        dsc_schedule_count(schedule_, &counts);
        return counts;
    }

    int32_t add(int64_t n_tokens, int64_t most_tokens, int64_t n_found)
    {
        int32_t number = 0;

        dsc::check(dsc_schedule_add(schedule_, n_tokens, most_tokens, n_found, &number), "Schedule.add");
        return number;
    }

    void end(int32_t number) { dsc::check(dsc_schedule_end(schedule_, number), "Schedule.end"); }

    std::tuple<std::vector<Row>, std::vector<int32_t>> plan(int64_t budget)
    {
        struct dsc_schedule_step step;
        std::vector<Row> rows;

        dsc::check(dsc_schedule_plan(schedule_, budget, &step), "Schedule.plan");
        rows.reserve(static_cast<size_t>(step.n_rows));
        for (int32_t i = 0; i < step.n_rows; i++)
            rows.emplace_back(step.rows[i].number, step.rows[i].begin, step.rows[i].n_tokens);
        return {std::move(rows), std::vector<int32_t>(step.put_back, step.put_back + step.n_put_back)};
    }

    std::vector<int32_t> commit()
    {
        const int32_t *numbers = nullptr;
        int32_t n = 0;

        dsc::check(dsc_schedule_commit(schedule_, &n, &numbers), "Schedule.commit");
        return {numbers, numbers + n};
    }

    void abort() { dsc::check(dsc_schedule_abort(schedule_), "Schedule.abort"); }

  private:
    struct dsc_schedule *schedule_ = nullptr;
};

}  // namespace

void dsc::bind_schedule(py::module_ &m)
{
    py::class_<Schedule>(m, "Schedule", "Which requests of a server compute how many tokens next (dsc/schedule.h).")
        .def(py::init<int32_t, int32_t>(), py::arg("n_blocks"), py::arg("most_rows"))
        .def("add", &Schedule::add, py::arg("n_tokens"), py::arg("most_tokens"), py::arg("n_found") = 0,
             "The number of a new request of n_tokens known tokens, which may grow to most_tokens. MemoryError: it "
             "would not fit even alone.")
        .def("end", &Schedule::end, py::arg("number"),
             "Removes a request, running or waiting. RuntimeError between a plan with rows and its commit.")
        .def("plan", &Schedule::plan, py::arg("budget"),
             "([(number, begin, n_tokens)] of the next step, numbers that went back, whose blocks the caller frees "
             "before the step).")
        .def("commit", &Schedule::commit,
             "The step has run. Returns the numbers that get one more token, in the order of the plan.")
        .def("abort", &Schedule::abort, "The step has failed: nothing was computed.")
        .def_property_readonly("n_waiting", [](const Schedule &s) { return s.counts().n_waiting; })
        .def_property_readonly("n_running", [](const Schedule &s) { return s.counts().n_running; })
        .def_property_readonly("n_free_blocks", [](const Schedule &s) { return s.counts().n_free_blocks; })
        .def_property_readonly("n_put_back", [](const Schedule &s) { return s.counts().n_put_back; });
}
