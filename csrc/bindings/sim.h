// Simulated worlds for Python.
#pragma once
#include <pybind11/pybind11.h>

namespace hep {

void bind_sim(pybind11::module_& m);

}  // namespace hep
