// hybrid_ep._core.cuda: loads the CUDA library when asked, and makes and maps registered device memory.
#include "bindings/cuda.h"

#include <pybind11/stl.h>
#include <pybind11/typing.h>

#include "runtime/cuda_entry.h"
#include "runtime/segment.h"

namespace py = pybind11;

namespace hep {
namespace {

const cuda::Entry* entry = nullptr;

const cuda::Entry& loaded() {
  if (!entry) throw std::runtime_error("the CUDA library is not loaded; call load(path) first");
  return *entry;
}

cuda::Share parse_kind(const std::string& kind) {
  if (kind == "none") return cuda::Share::kNone;
  if (kind == "fabric") return cuda::Share::kFabric;
  if (kind == "file") return cuda::Share::kFile;
  if (kind == "ipc") return cuda::Share::kIpc;
  throw std::invalid_argument("kind: '" + kind + "' must be 'none', 'fabric', 'file' or 'ipc'");
}

py::typing::Dict<py::str, py::object> load(const std::string& path) {
  entry = &cuda::load(path);
  std::string why;
  py::list devices;
  for (const cuda::DeviceInfo& d : entry->devices(why)) {
    py::dict info;
    info["name"] = d.name;
    info["capability"] = py::make_tuple(d.major, d.minor);
    info["num_sms"] = d.num_sms;
    info["supported"] = d.supported;
    devices.append(info);
  }
  py::dict said;
  said["devices"] = devices;
  said["why_none"] = why;
  return said;
}

std::shared_ptr<Segment> segment_of(const std::shared_ptr<cuda::DeviceMemory>& memory) {
  return Segment::adopt(memory->data(), memory->bytes(), memory);
}

}  // namespace

void bind_cuda(py::module_& module) {
  py::module_ m = module.def_submodule("cuda", "The CUDA library, loaded at run time.");
  m.def("load", &load, py::arg("path"),
        "Loads the library and adds its executors; {'devices': [...], 'why_none': str}. RuntimeError when it is not "
        "this build's.");
  m.def("set_device", [](int ordinal) { loaded().set_device(ordinal); }, py::arg("ordinal"));
  m.def(
      "run_at_once",
      [](const std::vector<uint64_t>& streams, double patience_s) {
        std::vector<void*> pointers;
        for (const uint64_t s : streams) pointers.push_back(reinterpret_cast<void*>(s));
        py::gil_scoped_release release;
        return loaded().run_at_once(pointers, patience_s);
      },
      py::arg("streams"), py::arg("patience_s"),
      "Whether kernels on these streams of the current device run at once: they wait for one another, for so long.");
  py::class_<cuda::DeviceMemory, std::shared_ptr<cuda::DeviceMemory>>(
      m, "DeviceMemory", "Device memory that peers can map.", py::release_gil_before_calling_cpp_dtor())
      .def_static(
          "create",
          [](const std::string& kind, size_t n) {
            const cuda::Share share = parse_kind(kind);
            py::gil_scoped_release release;
            return loaded().create(share, n);
          },
          py::arg("kind"), py::arg("num_bytes"),
          "Zeroed memory of the current device. kind: 'none' (this process), 'fabric', 'file' or 'ipc'.")
      .def_static(
          "attach",
          [](const std::string& kind, size_t n, const py::bytes& handle, int fd) {
            const cuda::Share share = parse_kind(kind);
            const cuda::ShareHandle from{std::string(handle), fd};
            py::gil_scoped_release release;
            return loaded().attach(share, n, from);
          },
          py::arg("kind"), py::arg("num_bytes"), py::arg("handle") = py::bytes(), py::arg("fd") = -1)
      .def(
          "share",
          [](const cuda::DeviceMemory& memory) {
            const cuda::ShareHandle h = memory.share();
            return py::typing::Tuple<py::bytes, int>(py::make_tuple(py::bytes(h.bytes), h.fd));
          },
          "(handle bytes, file descriptor or -1) by which a peer attaches.")
      .def("segment", &segment_of, "The same memory as a Segment of an Engine.");
}

}  // namespace hep
