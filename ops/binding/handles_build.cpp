/* What was built, by what, and what the build found. */
#include "handles.h"

#include "dsc/dsc.h"

#include <string>

#if defined(__has_include)
#if __has_include(<libaio.h>)
#define DSC_FOUND_LIBAIO true
#endif
#if __has_include(<liburing.h>)
#define DSC_FOUND_LIBURING true
#endif
#endif
#ifndef DSC_FOUND_LIBAIO
#define DSC_FOUND_LIBAIO false
#endif
#ifndef DSC_FOUND_LIBURING
#define DSC_FOUND_LIBURING false
#endif

namespace py = pybind11;

namespace {

py::dict build_info()
{
    py::dict info;

    info["version"] = std::to_string(DSC_VERSION_MAJOR) + "." + std::to_string(DSC_VERSION_MINOR) + "." + std::to_string(DSC_VERSION_PATCH);
    info["compiler"] = std::string(DSC_BUILD_COMPILER) + " " + __VERSION__;
    info["torch_target_version"] = DSC_BUILD_TORCH_TARGET;
    info["torch_built_with"] = DSC_BUILD_TORCH;
    info["pybind11"] = std::to_string(PYBIND11_VERSION_MAJOR) + "." + std::to_string(PYBIND11_VERSION_MINOR) + "." +
                       std::to_string(PYBIND11_VERSION_PATCH);
    info["isas"] = py::list();
    for (int32_t i = 0;; i++) {
        bool is_runnable = false;
        const char *name = dsc_cpu_isa_at(i, &is_runnable);

        if (name == nullptr)
            break;
        info["isas"].attr("append")(name);
    }
    info["cuda"] = static_cast<bool>(DSC_BUILD_CUDA);
    info["libaio"] = DSC_FOUND_LIBAIO;
    info["liburing"] = DSC_FOUND_LIBURING;
    return info;
}

}  // namespace

void dsc::bind_build_info(py::module_ &m)
{
    m.def("build_info", &build_info, "How this module was built: version, compiler, torch, whether the CUDA library was made, headers found.");
}
