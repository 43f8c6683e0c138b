// A tensor on its way into the core: where its bytes lie, how many there are, what they hold and on which kind of
// device. Nothing else crosses the boundary as memory. The core states for every argument what it needs, and a view
// that has less is a ValueError that names the argument.
#pragma once
#include <pybind11/pybind11.h>

#include <cstdint>
#include <optional>
#include <string>

#include "common/element.h"
#include "common/numeric.h"

namespace hep {

const char* element_name(Element e);

enum class Device : uint8_t { kCpu, kCuda };

template <class T>
inline constexpr Element kElementOf = Element::kUint8;
template <>
inline constexpr Element kElementOf<bool> = Element::kBool;
template <>
inline constexpr Element kElementOf<int32_t> = Element::kInt32;
template <>
inline constexpr Element kElementOf<int64_t> = Element::kInt64;
template <>
inline constexpr Element kElementOf<float> = Element::kFp32;

// A torch.Tensor, of which this module knows attributes and no header.
class Tensor : public pybind11::object {
  static bool check_(PyObject*) { return true; }
  PYBIND11_OBJECT_DEFAULT(Tensor, object, check_)
};

struct TensorView {
  // ValueError, naming it, for a tensor whose bytes are not all in one piece of memory that the core can read.
  // sure_of_storage: nobody can have made its storage smaller, for this call has made the tensor, or looked already.
  static TensorView of(const char* name, const Tensor& tensor, bool sure_of_storage = false);

  uint64_t address = 0, bytes = 0;
  Element element = Element::kOther;
  Device device = Device::kCpu;
  pybind11::object keep_alive;  // the tensor; lives and dies under the GIL
};

// The same of a tensor that may be left out.
inline std::optional<TensorView> view_of(const char* name, const std::optional<Tensor>& tensor, bool sure = false) {
  return tensor ? std::optional(TensorView::of(name, *tensor, sure)) : std::nullopt;
}

// What a call needs of one argument.
struct Need {
  const char* name;
  uint64_t bytes;
  Device device = Device::kCpu;
  uint64_t alignment = 1;
};

// The view's address after it met the need; ValueError otherwise, and for no view. A view of no bytes has an address
// too, of memory that nobody may touch, since kernels take null for "not given".
unsigned char* require(const TensorView* view, const Need& need);
// The same, of this element type.
unsigned char* require(const TensorView* view, const Need& need, Element element);

template <class T>
T* require_array(const TensorView* view, const Need& need) {
  return reinterpret_cast<T*>(require(view, need, kElementOf<std::remove_const_t<T>>));
}
// The same, null for no view.
template <class T>
T* optional_array(const TensorView* view, const Need& need) {
  return view ? require_array<T>(view, need) : nullptr;
}

DType summable(const char* name, const TensorView* view);  // what combine adds; ValueError for anything else

// Whether the storage of a tensor reaches to this address.
bool storage_holds(const pybind11::handle& tensor, uint64_t end);

void bind_tensor_view(pybind11::module_& m);

}  // namespace hep

template <>
struct pybind11::detail::handle_type_name<hep::Tensor> {
  static constexpr auto name = const_name("torch.Tensor");
};
