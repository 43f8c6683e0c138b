#include "bindings/tensor_view.h"

#include <pybind11/stl.h>

#include <map>
#include <stdexcept>

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

alignas(128) unsigned char nothing[128];  // where tensors without bytes are said to be

}  // namespace

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
  py::class_<TensorView>(m, "TensorView", "A tensor on its way into the core; hybrid_ep/runtime/tensors.py makes them.")
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
