// What Python asks of the kernel that plans clones, and of those that fill spare slots and bring gradients home.
#pragma once
#include <pybind11/pybind11.h>

#include "runtime/engine.h"

namespace hep {

void bind_spare_shape(pybind11::module_& m);
void bind_clones(pybind11::class_<Engine>& engine);

}  // namespace hep
