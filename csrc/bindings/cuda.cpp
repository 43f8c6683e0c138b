// hybrid_ep._core.cuda: loads the CUDA library when asked, makes and maps registered device memory, copies out of it.
#include "bindings/cuda.h"

#include <pybind11/stl.h>
#include <pybind11/typing.h>

#include <new>

#include "runtime/arena_pool.h"
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
    info["rdma_order"] = d.rdma_order;
    devices.append(info);
  }
  py::dict said;
  said["devices"] = devices;
  said["why_none"] = why;
  return said;
}

using Unlocked = py::call_guard<py::gil_scoped_release>;
using Segments = std::vector<std::shared_ptr<Segment>>;
using Pieces = std::vector<std::tuple<size_t, size_t, size_t, size_t>>;

void require_device(const Segment& segment) {
  if (segment.is_host()) throw std::invalid_argument("the segment is memory of the host; give a device's");
}

void pull(cuda::CopyStream& stream, uint64_t to, size_t num_bytes, const Segments& sources, const Pieces& given) {
  std::vector<Segment::Piece> pieces;
  pieces.reserve(given.size());
  for (const auto& [source, from, at, bytes] : given) pieces.push_back({source, from, at, bytes});
  py::gil_scoped_release release;
  Segment::require_inside(sources, pieces, num_bytes);
  for (const auto& source : sources) require_device(*source);
  for (const Segment::Piece& p : pieces)
    stream.copy(reinterpret_cast<unsigned char*>(to) + p.to, sources[p.source]->data() + p.from, p.bytes);
}

std::optional<uint64_t> observe(cuda::CounterReader& reader, const Segment& segment, size_t offset, double patience_s) {
  require_device(segment);
  const unsigned char* counter = segment.counter(offset);
  py::gil_scoped_release release;
  return reader.read(counter, patience_s);
}

void publish(const Segment& segment, size_t offset, uint64_t value, uint64_t stream) {
  require_device(segment);
  loaded().write_counter(segment.counter(offset), value, reinterpret_cast<void*>(stream));
}

void bind_copies(py::module_& m) {
  constexpr py::release_gil_before_calling_cpp_dtor kUnlockedEnd;
  py::class_<cuda::CopyStream>(m, "CopyStream", "A stream of the current device on which nothing but copies run.",
                               kUnlockedEnd)
      .def(py::init([] { return loaded().make_copy_stream(); }))
      .def_property_readonly(
          "stream", [](const cuda::CopyStream& s) { return reinterpret_cast<uint64_t>(s.stream()); }, "For events.")
      .def("pull", &pull, py::arg("to"), py::arg("num_bytes"), py::arg("sources"), py::arg("pieces"),
           "Copy pieces (place in sources, from, to, bytes) of device memory into num_bytes at the address `to`, in "
           "their order and behind what the stream holds; waits for none.");
  py::class_<cuda::CounterReader>(m, "CounterReader", "Reads counters of device memory for the host; for any thread.",
                                  kUnlockedEnd)
      .def(py::init([] { return loaded().make_counter_reader(); }))
      .def("observe", &observe, py::arg("segment"), py::arg("offset"), py::arg("patience_s"),
           "The counter there; what came before it is seen, too. None: the copy engines had no turn by then.");
  m.def("publish", &publish, py::arg("segment"), py::arg("offset"), py::arg("value"), py::arg("stream"), Unlocked(),
        "Store a counter behind all that the stream holds.");
}

// Of the device that is current where it is asked for. No more than torch takes for its small tensors: what is larger
// would lie in the same lists as the arena, and be preferred to it where it fits better.
std::shared_ptr<unsigned char> small_memory(uint64_t bytes) {
  if (bytes > uint64_t{2} << 20) no_room();
  try {
    auto memory = loaded().create(cuda::Share::kNone, bytes);
    unsigned char* const at = memory->data();
    return {std::move(memory), at};
  } catch (const std::bad_alloc&) {  // of other errors torch's caller hears as they are
    return nullptr;
  }
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
  m.def(
      "offer_small_memory", [](bool offered) { offered ? offer(&small_memory) : withdraw(); }, py::arg("offered"),
      "To hep_pool_allocate in this thread, until False: memory of this process, 2 MiB at once at most; see "
      "runtime/arena_pool.h.");
  bind_copies(m);
}

}  // namespace hep
