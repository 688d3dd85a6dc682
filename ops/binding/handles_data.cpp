/* The samples of a training step, and the difficulty of a step, as Python objects (dsc/data.h). */
#include "handles.h"

#include "dsc/data.h"
#include "status.h"

namespace py = pybind11;

namespace {

class SampleOrder {
  public:
    SampleOrder(int64_t n_samples, int64_t n_ranks, int64_t rank, int64_t batch, int64_t run, bool drop_last,
                std::optional<uint64_t> seed)
        : shares_{n_samples, n_ranks, batch, run, drop_last}, rank_(rank), seed_(seed)
    {
        int64_t n_rounds = 0;

        dsc::check(dsc_shares_rounds(&shares_, 0, &n_rounds), "SampleOrder");
        if (rank < 0 || rank >= n_ranks)
            throw py::value_error("SampleOrder: rank is " + std::to_string(rank) + " of " + std::to_string(n_ranks));
    }

    int64_t rounds(int64_t position) const
    {
        int64_t n_rounds = 0;

        dsc::check(dsc_shares_rounds(&shares_, position, &n_rounds), "SampleOrder.rounds");
        return n_rounds;
    }

    py::tuple round(uint64_t epoch, int64_t position)
    {
        int64_t n = 0;
        int64_t next = 0;

        samples_.resize(static_cast<size_t>(shares_.batch));
        dsc::check(dsc_shares_round(&shares_, position, rank_, samples_.data(), &n, &next), "SampleOrder.round");
        samples_.resize(static_cast<size_t>(n));
        if (seed_) {
            struct dsc_order order;

            dsc::check(dsc_order_init(&order, shares_.n_samples, *seed_, epoch), "SampleOrder.round");
            dsc::check(dsc_order_at(&order, n, samples_.data(), samples_.data()), "SampleOrder.round");
        }
        return py::make_tuple(samples_, next);
    }

  private:
    struct dsc_shares shares_;
    int64_t rank_;
    std::optional<uint64_t> seed_;
    std::vector<int64_t> samples_;
};

py::tuple draw(const std::vector<int64_t> &sizes, std::vector<int64_t> cursors, uint64_t seed, uint64_t step, int64_t n)
{
    if (sizes.size() != cursors.size())
        throw py::value_error("draw_samples: " + std::to_string(sizes.size()) + " sizes and " +
                              std::to_string(cursors.size()) + " cursors");
    if (n < 0)
        throw py::value_error("draw_samples: n is " + std::to_string(n) + ", must not be negative");
    std::vector<int64_t> pools(static_cast<size_t>(n));
    std::vector<int64_t> indices(static_cast<size_t>(n));

    dsc::check(dsc_draw(static_cast<int64_t>(sizes.size()), sizes.data(), cursors.data(), seed, step, n, pools.data(),
                        indices.data()),
               "draw_samples");
    return py::make_tuple(pools, indices, cursors);
}

class Curriculum {
  public:
    Curriculum(int64_t min, int64_t max, int64_t n_steps, int64_t multiple, double degree)
        : curriculum_{DSC_CURRICULUM_ROOT, min, max, n_steps, multiple, degree, nullptr, nullptr}
    {
        dsc::check(dsc_curriculum_check(&curriculum_), "Curriculum");
    }

    Curriculum(std::vector<int64_t> difficulties, std::vector<int64_t> last_steps)
        : difficulties_(std::move(difficulties)), last_steps_(std::move(last_steps))
    {
        if (difficulties_.size() != last_steps_.size() + 1)
            throw py::value_error("Curriculum: " + std::to_string(difficulties_.size()) + " of difficulty and " +
                                  std::to_string(last_steps_.size()) + " of max_step, which must be one less");
        curriculum_.kind = DSC_CURRICULUM_DISCRETE;
        curriculum_.n_steps = static_cast<int64_t>(last_steps_.size());
        curriculum_.difficulties = difficulties_.data();
        curriculum_.last_steps = last_steps_.data();
        dsc::check(dsc_curriculum_check(&curriculum_), "Curriculum");
    }

    /* The core's struct points into the vectors. */
    Curriculum(const Curriculum &) = delete;
    Curriculum &operator=(const Curriculum &) = delete;

    int64_t at(int64_t step) const
    {
        if (step < 0)
            throw py::value_error("Curriculum.at: step is " + std::to_string(step) + ", must not be negative");
        return dsc_curriculum_at(&curriculum_, step);
    }

  private:
    std::vector<int64_t> difficulties_;
    std::vector<int64_t> last_steps_;
    struct dsc_curriculum curriculum_ {};
};

}  // namespace

void dsc::bind_data(py::module_ &m)
{
    py::class_<SampleOrder>(
        m, "SampleOrder",
        "The samples of each round of an epoch (dsc/data.h): a round is what all ranks read at once, n_ranks * batch "
        "samples. run: neighbouring positions that a rank gets at a time, a divisor of batch. seed: None leaves samples "
        "in the order of the data set. Raises ValueError for a number out of range.")
        .def(py::init<int64_t, int64_t, int64_t, int64_t, int64_t, bool, std::optional<uint64_t>>(),
             py::arg("n_samples"), py::kw_only(), py::arg("n_ranks") = 1, py::arg("rank") = 0, py::arg("batch") = 1,
             py::arg("run") = 1, py::arg("drop_last") = false, py::arg("seed") = py::none())
        .def("rounds", &SampleOrder::rounds, py::arg("position") = 0, "Rounds from a position to the end of the epoch.")
        .def("round", &SampleOrder::round, py::arg("epoch"), py::arg("position"),
             "(samples of this rank in the round that begins at the position, position of the next round); no samples "
             "at the end of the epoch.");
    m.def("draw_samples", &draw, py::arg("sizes"), py::arg("cursors"), py::kw_only(), py::arg("seed"), py::arg("step"),
          py::arg("n"),
          "The n samples of a step from pools of samples (dsc/data.h): (pools, indices in them, cursors afterwards). "
          "Raises ValueError for an empty pool.");
    py::class_<Curriculum>(
        m, "Curriculum",
        "The difficulty of a step (dsc/data.h): with a minimum and a maximum fixed_root, of degree 1 "
        "fixed_linear; with two lists fixed_discrete. Raises ValueError for a schedule that goes "
        "down or a number out of range.")
        .def(py::init<int64_t, int64_t, int64_t, int64_t, double>(), py::arg("min"), py::arg("max"), py::arg("n_steps"),
             py::arg("multiple") = 1, py::arg("degree") = 1.0)
        .def(py::init<std::vector<int64_t>, std::vector<int64_t>>(), py::arg("difficulties"), py::arg("last_steps"))
        .def("at", &Curriculum::at, py::arg("step"));
}
