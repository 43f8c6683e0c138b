// Python's view of the CUDA library: loading it, and device memory that ranks share.
#pragma once
#include <pybind11/pybind11.h>

namespace hep {

void bind_cuda(pybind11::module_& m);  // adds the submodule `cuda`; loads nothing

}  // namespace hep
