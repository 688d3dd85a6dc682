/* What was built, by what, which optimizers it has, which instruction set runs here, and on how many threads. */
#include "handles.h"

#include "dsc/dsc.h"
#include "status.h"

#include <pybind11/stl.h>

#include <optional>
#include <string>
#include <tuple>
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

std::vector<std::tuple<std::string, int32_t, bool>> optim_kinds()
{
    std::vector<std::tuple<std::string, int32_t, bool>> kinds;

    for (int32_t i = 0;; i++) {
        const struct dsc_optim_kind *kind = dsc_optim_at(i);

        if (kind == nullptr)
            return kinds;
        kinds.emplace_back(dsc_optim_name(kind), dsc_optim_n_states(kind), dsc_optim_needs_norms(kind));
    }
}

int32_t pool_n_threads()
{
    int32_t n_threads = 0;

    dsc::check(dsc_pool_n_threads(&n_threads), "pool_n_threads");
    return n_threads;
}

void pool_resize(int32_t n_threads)
{
    dsc::check(dsc_pool_resize(n_threads), "pool_resize");
}

py::dict build_info()
{
    py::dict info;

    info["version"] = std::to_string(DSC_VERSION_MAJOR) + "." + std::to_string(DSC_VERSION_MINOR) + "." + std::to_string(DSC_VERSION_PATCH);
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
    m.def("cpu_isa_force", &force_isa, py::arg("name"),
          "Forces an instruction set by name for the whole process (tests and benchmarks); None goes back to the automatic choice.");
    m.def("pool_n_threads", &pool_n_threads,
          "Threads that share a pass over host memory: of the pool in use, or of the one that would be started now (dsc/pool.h). ValueError for a bad "
          "DSC_NUM_THREADS or LOCAL_WORLD_SIZE.");
    m.def("pool_n_workers", &dsc_pool_n_workers, "Threads that the pool has started: 0 before the first work that is worth sharing.");
    m.def("pool_resize", &pool_resize, py::arg("n_threads"), py::call_guard<py::gil_scoped_release>(),
          "Sets the pool's size for the whole process (tests and benchmarks); 0 goes back to the automatic one. Waits for work in progress.");
    m.def("optim_kinds", &optim_kinds, "[(name, state slots, whether it needs norms)] of the optimizers that this build has.");
    m.def("build_info", &build_info, "How this module was built: version, compiler, torch, whether the CUDA library was made.");
}
