/* Which instruction sets this build has tables for, and which one runs. */
#include "handles.h"

#include "dsc/kernels.h"
#include "status.h"

#include <pybind11/stl.h>

#include <optional>
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

}  // namespace

void dsc::bind_cpu(py::module_ &m)
{
    m.def("cpu_isa", &isa_name, "The instruction set whose loops run, by name.");
    m.def("cpu_isas", &isas, "[(name, whether this processor runs it)] of the instruction sets that this build has.");
    m.def("cpu_isa_force", &force_isa, py::arg("name"),
          "Forces an instruction set by name for the whole process (tests and benchmarks); None goes back to the automatic choice.");
}
