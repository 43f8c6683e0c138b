// The driver's functions that the library looks up by name.
#pragma once

namespace hep::ptxr {

void* driver_function(const char* name);  // null: the stand-in has none of this name

}  // namespace hep::ptxr
