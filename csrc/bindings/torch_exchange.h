// Tensors to and from torch through its table of C functions (torch 2.10 and later), in a tenth of the time that
// attributes and methods take. Where torch has no such table torch_exchange() is null, and callers ask for attributes.
// What the table says of a tensor that is out of the ordinary is not used either.
#pragma once
#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>
#include <optional>

#include "bindings/dlpack.h"
#include "common/element.h"

namespace hep {

// Null: torch has none, or a test has turned it off.
const dlpack::ExchangeApi* torch_exchange();

// What torch says of a plain tensor (torch.Tensor or Parameter, no other class) whose elements lie one behind the other
// in memory of their own, on a 'cpu' or 'cuda' device. shape: as long as the tensor. Nothing is said of its storage's
// end, nor of a sign that is still to be carried out.
struct PlainTensor {
  unsigned char* data;
  uint64_t bytes;
  dlpack::Device device;
  Element element;
  int32_t ndim;
  const int64_t* shape;
};
std::optional<PlainTensor> plain_tensor(const pybind11::handle& object);

// A new host tensor [rows, columns] ([rows] without columns) over memory that it keeps. Only where there is a table.
pybind11::object tensor_over(std::shared_ptr<void> memory, Element element, int64_t rows,
                             std::optional<int64_t> columns);

uint64_t element_bytes(Element e);  // not of kOther

// A key of the arguments of a call: calls with equal keys have tensors of the same shapes, types and devices in the
// same places, and the same flags and integers. None where an argument is anything else or out of the ordinary.
pybind11::object signature(const pybind11::args& arguments);

void bind_exchange(pybind11::module_& m);

}  // namespace hep
