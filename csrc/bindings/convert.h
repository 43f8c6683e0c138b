// Between Python's numbers and the engine's: addresses, widths, names, and the one exception with attributes.
#pragma once
#include <pybind11/pybind11.h>

#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>

#include "common/numeric.h"
#include "common/obituary.h"

namespace hep {

template <class T>
T* pointer(uint64_t address) {
  return reinterpret_cast<T*>(address);
}

inline uint32_t narrow(const char* name, int64_t value) {
  if (value < 0 || value > int64_t(std::numeric_limits<uint32_t>::max()))
    throw std::invalid_argument(std::string(name) + ": " + std::to_string(value) + " is outside 0..2^32-1");
  return uint32_t(value);
}

inline DType parse_dtype(const std::string& name) {
  if (name == "bf16") return DType::kBf16;
  if (name == "fp16") return DType::kFp16;
  if (name == "fp32") return DType::kFp32;
  throw std::invalid_argument("dtype: '" + name + "' must be 'bf16', 'fp16' or 'fp32'");
}

// Sets hybrid_ep.errors.DeadlineError with the obituary as attributes.
inline void raise_deadline(const char* what, const Obituary& o) {
  namespace py = pybind11;
  const py::object type = py::module_::import("hybrid_ep.errors").attr("DeadlineError");
  const py::object error =
      type(what, py::arg("site") = site_name(o.site), py::arg("rank") = o.rank, py::arg("peer") = o.peer,
           py::arg("node") = o.node, py::arg("peer_node") = o.peer_node, py::arg("block") = o.block,
           py::arg("role") = o.role, py::arg("chunk") = o.chunk, py::arg("expected") = o.expected,
           py::arg("seen") = o.seen, py::arg("waited_s") = o.waited_s);
  PyErr_SetObject(type.ptr(), error.ptr());
}

}  // namespace hep
