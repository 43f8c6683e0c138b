#include "bindings/torch_exchange.h"

#include <pybind11/gil_safe_call_once.h>
#include <pybind11/typing.h>

#include <array>
#include <cstdlib>
#include <cstring>
#include <new>
#include <stdexcept>

#include "bindings/tensor_view.h"

namespace py = pybind11;

namespace hep {
namespace {

using dlpack::DataType;

// DLPack's type codes and widths, in the order of Element.
constexpr DataType kTypes[] = {{0xFF, 0, 0}, {6, 8, 1},  {1, 8, 1},  {0, 8, 1},  {0, 16, 1}, {0, 32, 1}, {0, 64, 1},
                               {2, 16, 1},   {4, 16, 1}, {2, 32, 1}, {2, 64, 1}, {10, 8, 1}, {12, 8, 1}, {14, 8, 1}};
static_assert(std::size(kTypes) == size_t(Element::kCount));

Element element_of(const DataType& type) {
  for (size_t e = 1; e < std::size(kTypes); ++e)
    if (kTypes[e].code == type.code && kTypes[e].bits == type.bits && kTypes[e].lanes == type.lanes) return Element(e);
  return Element::kOther;
}

struct Torch {
  const dlpack::ExchangeApi* api = nullptr;
  py::object tensor, parameter;  // the classes
};

const Torch& torch() {
  PYBIND11_CONSTINIT static py::gil_safe_call_once_and_store<Torch> known;
  return known
      .call_once_and_store_result([] {
        const py::module_ module = py::module_::import("torch");
        Torch t{nullptr, module.attr("Tensor"), module.attr("nn").attr("Parameter")};
        const py::object capsule = py::getattr(t.tensor, "__dlpack_c_exchange_api__", py::none());
        if (!PyCapsule_IsValid(capsule.ptr(), "dlpack_exchange_api")) return t;
        auto* api = static_cast<dlpack::ExchangeApi*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
        while (api && api->version.major > dlpack::kMajor) api = api->previous;
        if (api && api->version.major == dlpack::kMajor && api->tensor_of && api->object_of) t.api = api;
        return t;
      })
      .get_stored();
}

bool turned_off = false;  // under the GIL

// The last of the checks that only a method answers: whether a sign is still to be carried out, and whether a storage
// that somebody made smaller still holds the elements.
bool as_it_looks(const py::handle& x, const PlainTensor& t) {
  static PyObject* const is_neg = PyUnicode_InternFromString("is_neg");
  const auto neg = py::reinterpret_steal<py::object>(PyObject_CallMethodNoArgs(x.ptr(), is_neg));
  if (!neg) throw py::error_already_set();
  return neg.ptr() == Py_False && storage_holds(x, uint64_t(reinterpret_cast<uintptr_t>(t.data)) + t.bytes);
}

class Key {
 public:
  bool add(const py::handle& x) {
    if (x.is_none()) return put('n');
    if (x.ptr() == Py_True) return put('t');
    if (x.ptr() == Py_False) return put('f');
    if (PyLong_CheckExact(x.ptr())) {
      int overflow = 0;
      const int64_t value = PyLong_AsLongLongAndOverflow(x.ptr(), &overflow);
      return !overflow && put('i') && put(value);
    }
    const auto t = plain_tensor(x);
    if (!t || t->element == Element::kOther || reinterpret_cast<uintptr_t>(t->data) % 16 || !as_it_looks(x, *t))
      return false;
    if (!put('x') || !put(t->element) || !put(t->device) || !put(t->ndim)) return false;
    for (int32_t d = 0; d < t->ndim; ++d)
      if (!put(t->shape[d])) return false;
    return true;
  }
  py::object bytes() const { return py::bytes(reinterpret_cast<const char*>(key_.data()), size_); }

 private:
  template <class T>
  bool put(const T& value) {
    if (size_ + sizeof value > key_.size()) return false;
    std::memcpy(key_.data() + size_, &value, sizeof value);
    size_ += sizeof value;
    return true;
  }
  std::array<unsigned char, 1024> key_;
  size_t size_ = 0;
};

Tensor host_words(int64_t num_words) {
  constexpr size_t kAlignment = 128;  // by hand: aligned allocation takes malloc several times as long
  if (num_words < 0) throw std::invalid_argument("num_words: is negative");
  const std::shared_ptr<void> whole(std::malloc(size_t(num_words) * sizeof(int64_t) + kAlignment), &std::free);
  if (!whole) throw std::bad_alloc();
  auto* const at = static_cast<unsigned char*>(whole.get());
  std::shared_ptr<void> memory(whole, at + (kAlignment - reinterpret_cast<uintptr_t>(at) % kAlignment));
  return Tensor(tensor_over(std::move(memory), Element::kInt64, num_words, std::nullopt));
}

struct Kept {
  dlpack::Managed managed;
  std::shared_ptr<void> memory;
  int64_t shape[2], strides[2];
};

}  // namespace

const dlpack::ExchangeApi* torch_exchange() {
  return turned_off ? nullptr : torch().api;
}

std::optional<PlainTensor> plain_tensor(const py::handle& object) {
  const dlpack::ExchangeApi* const api = torch_exchange();
  if (!api) return std::nullopt;
  const auto type = reinterpret_cast<PyObject*>(Py_TYPE(object.ptr()));
  if (type != torch().tensor.ptr() && type != torch().parameter.ptr()) return std::nullopt;
  dlpack::DLTensor t{};
  if (api->tensor_of(object.ptr(), &t)) {  // traced, batched and freed tensors, types that DLPack does not have
    PyErr_Clear();
    return std::nullopt;
  }
  if (t.device.type != dlpack::kCpu && t.device.type != dlpack::kCuda) return std::nullopt;
  int64_t elements = 1;
  for (int32_t d = t.ndim - 1; d >= 0; --d) {
    if (t.shape[d] != 1 && t.strides[d] != elements) {
      bool none = false;
      for (int32_t i = 0; i < t.ndim; ++i) none |= t.shape[i] == 0;
      if (!none) return std::nullopt;  // a tensor without elements is contiguous, whatever its strides
    }
    elements *= t.shape[d];
  }
  auto* data = static_cast<unsigned char*>(t.data) + t.byte_offset;
  const uint64_t bytes = uint64_t(elements) * t.dtype.bits * t.dtype.lanes / 8;
  if (bytes && !t.data) return std::nullopt;
  return PlainTensor{data, bytes, t.device, element_of(t.dtype), t.ndim, t.shape};
}

py::object tensor_over(std::shared_ptr<void> memory, Element element, int64_t rows, std::optional<int64_t> columns) {
  const dlpack::ExchangeApi* const api = torch_exchange();
  if (!api) throw std::logic_error("torch offers no exchange of tensors; see exchanges_tensors()");
  if (element <= Element::kOther || element >= Element::kCount)
    throw std::invalid_argument("element: is none of TensorView.elements");
  auto kept = std::make_unique<Kept>();
  void* const data = memory.get();
  kept->memory = std::move(memory);
  kept->shape[0] = rows, kept->shape[1] = columns.value_or(1);
  kept->strides[0] = columns.value_or(1), kept->strides[1] = 1;
  kept->managed = {{dlpack::kMajor, dlpack::kMinor},
                   kept.get(),
                   [](dlpack::Managed* m) { delete static_cast<Kept*>(m->context); },
                   0,
                   {data, {dlpack::kCpu, 0}, columns ? 2 : 1, kTypes[size_t(element)], kept->shape, kept->strides, 0}};
  void* made = nullptr;
  if (api->object_of(&kept.release()->managed, &made)) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(static_cast<PyObject*>(made));
}

uint64_t element_bytes(Element e) {
  return kTypes[size_t(e)].bits / 8;
}

py::object signature(const py::args& arguments) {
  if (!torch_exchange()) return py::none();
  Key key;
  for (const py::handle x : arguments)
    if (!key.add(x)) return py::none();
  return key.bytes();
}

void bind_exchange(py::module_& m) {
  m.def(
      "signature", &signature,
      "A key, bytes, that calls with arguments alike have in common: tensors, integers, flags and None. None where an "
      "argument is something else, or a tensor out of the ordinary; and where tensors are not exchanged.");
  m.def(
      "exchanges_tensors", [] { return torch_exchange() != nullptr; },
      "Whether tensors are read and made through torch's table of C functions, which torch 2.10 and later have.");
  m.def("host_words", &host_words, py::arg("num_words"),
        "An int64 tensor of the host, uninitialised, whose address is a multiple of 128. Where exchanges_tensors().");
  m.def(
      "exchange_tensors", [](bool exchange) { turned_off = !exchange; }, py::arg("exchange"),
      "For tests: False does as with a torch that has no such table.");
}

}  // namespace hep
