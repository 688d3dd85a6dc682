/* What module.cpp calls: one function a handles_*.cpp file, each adding its classes and functions to the module. */
#ifndef DSC_HANDLES_H
#define DSC_HANDLES_H

#include <pybind11/pybind11.h>

namespace dsc {

void bind_zero(pybind11::module_ &m);
void bind_tier(pybind11::module_ &m);
void bind_fetch(pybind11::module_ &m);
void bind_scaler(pybind11::module_ &m);
void bind_ckpt(pybind11::module_ &m);
void bind_aio(pybind11::module_ &m);
void bind_build(pybind11::module_ &m);

}  // namespace dsc

#endif
