/*
 * The functions that module.cpp calls: one for each handles_*.cpp file. Each adds its classes and functions to the
 * module. The build parses this file once for all of them.
 */
#ifndef DSC_HANDLES_H
#define DSC_HANDLES_H

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace dsc {

void bind_zero(pybind11::module_ &m);
void bind_gradients(pybind11::module_ &m);
void bind_tp(pybind11::module_ &m);
void bind_seq(pybind11::module_ &m);
void bind_tier(pybind11::module_ &m);
void bind_pipe(pybind11::module_ &m);
void bind_plan(pybind11::module_ &m);
void bind_recompute(pybind11::module_ &m);
void bind_compile(pybind11::module_ &m);
void bind_fetch(pybind11::module_ &m);
void bind_scaler(pybind11::module_ &m);
void bind_data(pybind11::module_ &m);
void bind_infer(pybind11::module_ &m);
void bind_batch(pybind11::module_ &m);
void bind_schedule(pybind11::module_ &m);
void bind_ckpt(pybind11::module_ &m);
void bind_aio(pybind11::module_ &m);
void bind_comm(pybind11::module_ &m);
void bind_build(pybind11::module_ &m);

/* Sets the function that check.cpp calls, without the GIL, when an operator finds that the pool has no size yet. */
void on_unsized_pool(void (*size)());

}  // namespace dsc

#endif
