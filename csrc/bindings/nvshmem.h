// hybrid_ep._core.NvshmemWorld.
#pragma once
#include <pybind11/pybind11.h>

namespace hep {

void bind_nvshmem(pybind11::module_& module);

}  // namespace hep
