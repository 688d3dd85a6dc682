/* Converts a path from Python to the form of system calls. */
#ifndef DSC_PATH_H
#define DSC_PATH_H

#include <pybind11/pybind11.h>

#include <string>
#include <utility>

namespace dsc {

/*
 * The path of a str, bytes or path object, in the file system's encoding. Throws TypeError for other types, and
 * ValueError for a NUL byte, at which system calls would end the path.
 */
class Path {
  public:
    explicit Path(pybind11::object given) : given(std::move(given))
    {
        PyObject *encoded = nullptr;

        if (PyUnicode_FSConverter(this->given.ptr(), &encoded) == 0)
            throw pybind11::error_already_set();
        bytes = pybind11::reinterpret_steal<pybind11::bytes>(encoded);
    }
    const char *c_str() const { return bytes.c_str(); }

    pybind11::object given;
    std::string bytes;
};

}  // namespace dsc

#endif
