/* The build's properties, the instruction set that runs here, and the number of threads. */
#include "handles.h"

#include "dsc/dsc.h"
#include "status.h"

#include <pybind11/stl.h>

#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace py = pybind11;

namespace {

std::string isa_name()
{
    return dsc_cpu_isa_name();
}

std::vector<std::pair<std::string, bool>> isas()
{
    std::vector<std::pair<std::string, bool>> found;
    bool is_runnable = false;

    for (int32_t i = 0;; i++) {
        const char *name = dsc_cpu_isa_at(i, &is_runnable);

        if (name == nullptr)
            return found;
        found.emplace_back(name, is_runnable);
    }
}

void force_isa(const std::optional<std::string> &name)
{
    dsc::check(dsc_cpu_isa_force(name.has_value() ? name->c_str() : nullptr), "cpu_isa_force");
}

/*
 * The function of deepspeed_c that decides the number of threads. Never freed, because operators may run until the
 * process ends.
 */
py::object *decide = nullptr;

/*
 * Needs the GIL. An exception of decide is converted to an exception class that both torch's pybind11 and this module's
 * pybind11 know.
 */
int32_t ask_for_size()
{
    if (decide == nullptr)
        dsc::fail(DSC_ESTATE, "nobody has said how many threads a pass over host memory has: pool_decided_by");
    try {
        return (*decide)().cast<int32_t>();
    } catch (py::error_already_set &error) {
        if (error.matches(PyExc_ValueError))
            throw std::invalid_argument(py::str(error.value()).cast<std::string>());
        throw std::runtime_error(error.what());
    }
}

/* Called by operators, which run without the GIL. Another thread may have set the size already. */
void size_pool()
{
    const py::gil_scoped_acquire gil;

    if (dsc_pool_n_threads() == 0)
        dsc::check(dsc_pool_resize(ask_for_size()), "the thread pool");
}

void pool_decided_by(const py::object &function)
{
    decide = new py::object(function);
    dsc::on_unsized_pool(&size_pool);
}

int32_t pool_n_threads()
{
    const int32_t n_threads = dsc_pool_n_threads();

    return n_threads != 0 ? n_threads : ask_for_size();
}

void pool_resize(int32_t n_threads)
{
    dsc::check(dsc_pool_resize(n_threads), "pool_resize");
}

py::dict build_info()
{
    py::dict info;

    info["version"] = std::to_string(DSC_VERSION_MAJOR) + "." + std::to_string(DSC_VERSION_MINOR) + "." +
                      std::to_string(DSC_VERSION_PATCH);
    info["compiler"] = std::string(DSC_BUILD_COMPILER) + " " + __VERSION__;
    info["torch_target_version"] = DSC_BUILD_TORCH_TARGET;
    info["torch_built_with"] = DSC_BUILD_TORCH;
    info["pybind11"] = std::to_string(PYBIND11_VERSION_MAJOR) + "." + std::to_string(PYBIND11_VERSION_MINOR) + "." +
                       std::to_string(PYBIND11_VERSION_PATCH);
    py::list names;
    for (const auto &isa : isas())
        names.append(isa.first);
    info["isas"] = names;
    info["cuda"] = static_cast<bool>(DSC_BUILD_CUDA);
    return info;
}

}  // namespace

void dsc::bind_build(py::module_ &m)
{
    m.def("cpu_isa", &isa_name, "The instruction set whose loops run, by name.");
    m.def("cpu_isas", &isas, "[(name, whether this processor runs it)] of the instruction sets that this build has.");
    m.def(
        "cpu_isa_force", &force_isa, py::arg("name"),
        "Forces an instruction set by name for the whole process; None goes back to the automatic choice. NotImplementedError for one that cannot run here.");
    m.def(
        "pool_n_threads", &pool_n_threads,
        "Threads that share a pass over host memory: of the pool in use, or of the one that would be started now. Raises what pool_decided_by's function does.");
    m.def(
        "pool_decided_by", &pool_decided_by, py::arg("function"),
        "Has this function say how many threads the pool gets, at the first operator on host tensors and whenever the size is 0. A ValueError of it is one of "
        "the operator.");
    m.def("pool_n_workers", &dsc_pool_n_workers,
          "Threads that the pool has started: 0 before the first work that is worth sharing.");
    m.def(
        "pool_resize", &pool_resize, py::arg("n_threads"), py::call_guard<py::gil_scoped_release>(),
        "Sets the pool's size for the whole process; 0 has pool_decided_by's function asked again. Waits for work in progress.");
    m.attr("POOL_MAX_THREADS") = DSC_POOL_MAX_THREADS;
    m.def("build_info", &build_info,
          "How this module was built: version, compiler, torch, whether the CUDA library was made.");
}
