// What Python asks of the kernel that plans clones: the routing, and the tensors of what comes of it.
#pragma once
#include <pybind11/pybind11.h>

#include "runtime/engine.h"

namespace hep {

void bind_clones(pybind11::class_<Engine>& engine);

}  // namespace hep
