// The planners of csrc/balance for Python, as functions of hybrid_ep._core.
#pragma once
#include <pybind11/pybind11.h>

namespace hep {

void bind_balance(pybind11::module_& m);

}  // namespace hep
