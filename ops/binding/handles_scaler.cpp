/* The loss scaler as a Python object. Its state is plain numbers, so it can be saved, copied and compared. */
#include "handles.h"

#include "dsc/scaler.h"
#include "status.h"

namespace py = pybind11;

namespace {

class LossScaler {
  public:
    explicit LossScaler(const struct dsc_scaler_config &config)
    {
        dsc::check(dsc_scaler_init(&scaler, &config), "LossScaler");
    }

    bool update(bool has_overflow)
    {
        bool is_at_floor = false;

        dsc::check(dsc_scaler_update(&scaler, has_overflow, &is_at_floor), "LossScaler.update");
        return is_at_floor;
    }

    py::dict state() const
    {
        py::dict state;

        state["scale"] = scaler.scale;
        state["step"] = scaler.step;
        state["last_overflow_step"] = scaler.last_overflow_step;
        state["hysteresis_left"] = scaler.hysteresis_left;
        return state;
    }

    void restore(const py::dict &state)
    {
        for (const char *key : {"scale", "step", "last_overflow_step", "hysteresis_left"})
            if (!state.contains(key))
                throw py::key_error(std::string("LossScaler.load_state_dict: no \"") + key + "\" in the state");
        dsc::check(dsc_scaler_restore(&scaler, state["scale"].cast<double>(), state["step"].cast<int64_t>(),
                                      state["last_overflow_step"].cast<int64_t>(),
                                      state["hysteresis_left"].cast<int32_t>()),
                   "LossScaler.load_state_dict");
    }

    py::tuple config() const
    {
        const struct dsc_scaler_config &c = scaler.config;

        return py::make_tuple(c.is_dynamic, c.initial_scale, c.factor, c.min_scale, c.window_steps, c.hysteresis,
                              c.consecutive_hysteresis);
    }

    struct dsc_scaler scaler {};
};

LossScaler make_scaler(bool is_dynamic, double initial_scale, double factor, double min_scale, int64_t window_steps,
                       int32_t hysteresis, bool consecutive_hysteresis)
{
    struct dsc_scaler_config config = DSC_SCALER_CONFIG_INIT;

    config.is_dynamic = is_dynamic;
    config.consecutive_hysteresis = consecutive_hysteresis;
    config.initial_scale = initial_scale;
    config.factor = factor;
    config.min_scale = min_scale;
    config.window_steps = window_steps;
    config.hysteresis = hysteresis;
    return LossScaler(config);
}

LossScaler unpickle(const py::tuple &pickled)
{
    if (pickled.size() != 8)
        throw py::value_error("LossScaler: a pickled state of " + std::to_string(pickled.size()) +
                              " fields, expected 8");
    LossScaler scaler = make_scaler(pickled[0].cast<bool>(), pickled[1].cast<double>(), pickled[2].cast<double>(),
                                    pickled[3].cast<double>(), pickled[4].cast<int64_t>(), pickled[5].cast<int32_t>(),
                                    pickled[6].cast<bool>());
    scaler.restore(pickled[7].cast<py::dict>());
    return scaler;
}

}  // namespace

void dsc::bind_scaler(py::module_ &m)
{
    const struct dsc_scaler_config init = DSC_SCALER_CONFIG_INIT;

    py::class_<LossScaler>(
        m, "LossScaler",
        "The loss scale of fp16 training (dsc/scaler.h): cut by factor once hysteresis overflows are used up, grown by "
        "factor after window_steps good steps, never below min_scale. Raises ValueError for a field out of range.")
        .def(py::init(&make_scaler), py::kw_only(), py::arg("is_dynamic") = init.is_dynamic,
             py::arg("initial_scale") = init.initial_scale, py::arg("factor") = init.factor,
             py::arg("min_scale") = init.min_scale, py::arg("window_steps") = init.window_steps,
             py::arg("hysteresis") = init.hysteresis, py::arg("consecutive_hysteresis") = init.consecutive_hysteresis)
        .def_property_readonly("scale", [](const LossScaler &self) { return self.scaler.scale; })
        .def_property_readonly(
            "step", [](const LossScaler &self) { return self.scaler.step; }, "Attempted steps so far.")
        .def_property_readonly("is_dynamic", [](const LossScaler &self) { return self.scaler.config.is_dynamic; })
        .def("update", &LossScaler::update, py::arg("has_overflow"),
             "Counts one attempted step. True when it overflowed and the scale cannot be cut any further.")
        .def("state_dict", &LossScaler::state)
        .def("load_state_dict", &LossScaler::restore, py::arg("state"))
        .def(py::pickle(
            [](const LossScaler &self) {
                const py::tuple c = self.config();

                return py::make_tuple(c[0], c[1], c[2], c[3], c[4], c[5], c[6], self.state());
            },
            &unpickle));
}
