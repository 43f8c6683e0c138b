// hybrid_ep._core.NvshmemWorld: NVSHMEM in this process. hybrid_ep/runtime/nvshmem.py decides when, and for how long.
#include "bindings/nvshmem.h"

#include <pybind11/stl.h>
#include <pybind11/typing.h>

#include <optional>

#include "runtime/nvshmem_world.h"

namespace py = pybind11;

namespace hep {
namespace {

py::typing::Tuple<int, int, int> numbers(const nvshmem::Version& v) {
  return py::make_tuple(v.major, v.minor, v.patch);
}

}  // namespace

void bind_nvshmem(py::module_& module) {
  using W = nvshmem::World;
  using Unlocked = py::call_guard<py::gil_scoped_release>;
  py::class_<W>(module, "NvshmemWorld", "NVSHMEM in this process; see runtime/nvshmem_world.h.")
      .def(py::init<const std::string&, const std::string&>(), py::arg("host_library"), py::arg("kernels"))
      .def_property_readonly("running", [](const W& w) { return numbers(w.running()); })
      .def_property_readonly("built_with", [](const W& w) { return numbers(w.built_with()); })
      .def_property_readonly("started", &W::started)
      .def("unique_id", [](const W& w) { return py::bytes(w.unique_id()); })
      .def(
          "start",
          [](W& w, const py::bytes& unique_id, int pe, int num_pes, int device) {
            const std::string id = unique_id;
            py::gil_scoped_release release;
            w.start(id, pe, num_pes, device);
          },
          py::arg("unique_id"), py::arg("pe"), py::arg("num_pes"), py::arg("device") = -1)
      .def("stop", &W::stop, Unlocked())
      .def("allocate", &W::allocate, py::arg("num_bytes"), Unlocked())
      .def("quiet", &W::quiet, Unlocked(), "Until all verbs of this PE's kernels so far are complete at their targets.")
      .def("free", &W::free, py::arg("address"), Unlocked())
      .def("own", &W::own, py::arg("address"), py::arg("num_bytes"))
      .def(
          "peer",
          [](W& w, uint64_t address, size_t num_bytes, int pe) -> std::optional<std::shared_ptr<Segment>> {
            if (auto segment = w.peer(address, num_bytes, pe)) return segment;
            return std::nullopt;
          },
          py::arg("address"), py::arg("num_bytes"), py::arg("pe"),
          "PE's twin as a Segment, None where only the NIC reaches it.");
}

}  // namespace hep
