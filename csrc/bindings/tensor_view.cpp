#include "bindings/tensor_view.h"

#include <pybind11/gil_safe_call_once.h>
#include <pybind11/stl.h>

#include <map>
#include <stdexcept>
#include <vector>

#include "bindings/torch_exchange.h"

namespace py = pybind11;

namespace hep {
namespace {

// torch's names, in the order of Element.
constexpr const char* kNames[] = {"another type", "bool",          "uint8",       "int8",          "int16",
                                  "int32",        "int64",         "float16",     "bfloat16",      "float32",
                                  "float64",      "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"};
static_assert(std::size(kNames) == size_t(Element::kCount));

constexpr const char* kDevices[] = {"cpu", "cuda"};

[[noreturn]] void refuse(const char* name, const std::string& why) {
  throw std::invalid_argument(std::string(name) + ": " + why);
}

TensorView make(uint64_t address, uint64_t bytes, int element, const std::string& device, py::object tensor) {
  if (element < 0 || element >= int(Element::kCount))
    refuse("element", std::to_string(element) + " is none of TensorView.elements");
  if (device != kDevices[0] && device != kDevices[1])
    refuse("device", "memory of a '" + device + "' device; the core reads 'cpu' and 'cuda'");
  if (!address && bytes) refuse("address", "is null, with " + std::to_string(bytes) + " bytes behind it");
  return {address, bytes, Element(element), device == kDevices[0] ? Device::kCpu : Device::kCuda, std::move(tensor)};
}

// What is asked of a tensor: attributes and methods without arguments, by names that are made once.
class Attribute {
 public:
  explicit Attribute(const char* name) : name_(PyUnicode_InternFromString(name)) {}
  py::object read(const py::handle& of) const { return checked(PyObject_GetAttr(of.ptr(), name_)); }
  py::object call(const py::handle& of) const { return checked(PyObject_CallMethodNoArgs(of.ptr(), name_)); }
  bool is_true(const py::handle& of) const { return read(of).ptr() == Py_True; }
  uint64_t count(const py::handle& of) const { return as_count(read(of)); }
  uint64_t called_count(const py::handle& of) const { return as_count(call(of)); }

 private:
  static py::object checked(PyObject* made) {
    if (!made) throw py::error_already_set();
    return py::reinterpret_steal<py::object>(made);
  }
  static uint64_t as_count(const py::object& number) {
    const uint64_t value = PyLong_AsUnsignedLongLong(number.ptr());
    if (PyErr_Occurred()) throw py::error_already_set();
    return value;
  }
  PyObject* name_;  // of the interpreter, as long as it lives
};

// torch's dtypes by code, of which a torch may lack some.
Element element_of(const py::handle& dtype) {
  PYBIND11_CONSTINIT static py::gil_safe_call_once_and_store<std::vector<py::object>> types;
  const std::vector<py::object>& known = types
                                             .call_once_and_store_result([] {
                                               const py::module_ torch = py::module_::import("torch");
                                               std::vector<py::object> found;
                                               for (const char* name : kNames)
                                                 found.push_back(py::getattr(torch, name, py::none()));
                                               return found;
                                             })
                                             .get_stored();
  for (int e = 1; e < int(Element::kCount); ++e)
    if (known[size_t(e)].is(dtype)) return Element(e);
  return Element::kOther;
}

// None: it does not fill one piece of memory that the core can read. A tensor that computes nothing answers each of
// these in some 50 ns; asking Python for a device costs more than all of them.
std::optional<TensorView> filled(const Tensor& x) {
  static const Attribute data_ptr("data_ptr"), nbytes("nbytes"), dtype("dtype"), is_cpu("is_cpu"), is_cuda("is_cuda"),
      is_contiguous("is_contiguous");
  try {
    const uint64_t address = data_ptr.called_count(x), bytes = nbytes.count(x);
    const bool on_cpu = is_cpu.is_true(x);
    if (!on_cpu && !is_cuda.is_true(x)) return std::nullopt;
    if (is_contiguous.call(x).ptr() != Py_True) return std::nullopt;
    if (bytes && (!address || !storage_holds(x, address + bytes))) return std::nullopt;
    return TensorView{address, bytes, element_of(dtype.read(x)), on_cpu ? Device::kCpu : Device::kCuda, x};
  } catch (const py::error_already_set& error) {
    if (error.matches(PyExc_RuntimeError)) return std::nullopt;  // traced, batched and fake tensors have no address
    throw;
  }
}

// The same by way of torch's table; None also where that says nothing.
std::optional<TensorView> exchanged(const Tensor& x, bool sure_of_storage) {
  const auto t = plain_tensor(x);
  const auto address = t ? uint64_t(reinterpret_cast<uintptr_t>(t->data)) : 0;
  if (!t || (t->bytes && !sure_of_storage && !storage_holds(x, address + t->bytes))) return std::nullopt;
  return TensorView{address, t->bytes, t->element, t->device.type == dlpack::kCpu ? Device::kCpu : Device::kCuda, x};
}

alignas(128) unsigned char nothing[128];  // where tensors without bytes are said to be

}  // namespace

bool storage_holds(const py::handle& tensor, uint64_t end) {
  static const Attribute untyped_storage("untyped_storage"), data_ptr("data_ptr"), nbytes("nbytes");
  const py::object storage = untyped_storage.call(tensor);
  return data_ptr.called_count(storage) + nbytes.called_count(storage) >= end;
}

TensorView TensorView::of(const char* name, const Tensor& tensor, bool sure_of_storage) {
  if (auto view = exchanged(tensor, sure_of_storage)) return *std::move(view);
  if (auto view = filled(tensor)) return *std::move(view);
  py::module_::import("hybrid_ep.runtime.tensors").attr("refuse")(name, tensor);  // raises, with the remedy
  throw std::logic_error(std::string(name) + ": a tensor that is neither usable nor refused");
}

const char* element_name(Element e) {
  return kNames[size_t(e)];
}

unsigned char* require(const TensorView* view, const Need& need) {
  if (!view) refuse(need.name, "is None; this call needs a tensor of " + std::to_string(need.bytes) + " bytes");
  if (view->device != need.device)
    refuse(need.name, std::string("lies on '") + kDevices[size_t(view->device)] + "', but this call runs on '" +
                          kDevices[size_t(need.device)] + "'; give a tensor of that device");
  if (view->bytes < need.bytes)
    refuse(need.name, "has " + std::to_string(view->bytes) + " bytes; this call needs " + std::to_string(need.bytes));
  if (!view->bytes) return nothing;
  if (view->address % need.alignment)
    refuse(need.name, "does not begin at a multiple of " + std::to_string(need.alignment) + " bytes");
  return reinterpret_cast<unsigned char*>(view->address);
}

unsigned char* require(const TensorView* view, const Need& need, Element element) {
  if (view && view->element != element)
    refuse(need.name, std::string("holds ") + element_name(view->element) + "; give " + element_name(element));
  return require(view, need);
}

DType summable(const char* name, const TensorView* view) {
  if (!view) refuse(name, "is None; give a tensor");
  switch (view->element) {
    case Element::kBf16: return DType::kBf16;
    case Element::kFp16: return DType::kFp16;
    case Element::kFp32: return DType::kFp32;
    default: refuse(name, std::string("holds ") + element_name(view->element) + "; give bfloat16, float16 or float32");
  }
}

void bind_tensor_view(py::module_& m) {
  py::class_<TensorView>(m, "TensorView", "A tensor on its way into the core.")
      .def_static(
          "of", [](const char* name, const Tensor& tensor) { return TensorView::of(name, tensor); }, py::arg("name"),
          py::arg("tensor"),
          "All bytes of a tensor. ValueError, naming it, when they are not in one piece of memory of its own.")
      .def(py::init(&make), py::arg("address"), py::arg("num_bytes"), py::arg("element"), py::arg("device"),
           py::arg("tensor") = py::none(),
           "num_bytes of memory at `address` on a 'cpu' or 'cuda' device; element: a code of `elements`; tensor: what "
           "must live as long as the view. ValueError for a null address with bytes.")
      .def_readonly("address", &TensorView::address)
      .def_readonly("num_bytes", &TensorView::bytes)
      .def_property_readonly("element", [](const TensorView& v) { return int(v.element); })
      .def_property_readonly("device", [](const TensorView& v) { return kDevices[size_t(v.device)]; })
      .def_readonly("tensor", &TensorView::keep_alive)
      .def_property_readonly_static(
          "elements",
          [](const py::object&) {
            std::map<std::string, int> codes;
            for (int e = 1; e < int(Element::kCount); ++e) codes[kNames[e]] = e;
            return codes;
          },
          "Codes of element types by torch's name; 0 is any other.");
}

}  // namespace hep
