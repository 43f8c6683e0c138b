// Between Python's numbers and the engine's: widths, and the one exception with attributes.
#pragma once
#include <pybind11/pybind11.h>

#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>

#include "common/timeout_report.h"

namespace hep {

inline uint32_t narrow(const char* name, int64_t value) {
  if (value < 0 || value > int64_t(std::numeric_limits<uint32_t>::max()))
    throw std::invalid_argument(std::string(name) + ": " + std::to_string(value) + " is outside 0..2^32-1");
  return uint32_t(value);
}

// Sets hybrid_ep.errors.DeadlineError with the timeout report as attributes.
inline void raise_deadline(const char* what, const TimeoutReport& o) {
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
