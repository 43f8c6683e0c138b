// Headers of calls for Python.
#pragma once
#include <pybind11/pybind11.h>

namespace hep {

void bind_header(pybind11::module_& m);

}  // namespace hep
