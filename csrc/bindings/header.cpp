#include "bindings/header.h"

#include <pybind11/stl.h>

#include "bindings/convert.h"
#include "runtime/headers.h"

namespace py = pybind11;

namespace hep {
namespace {

Element element_of(const char* name, int code) {
  if (code < 0 || code >= int(Element::kCount))
    throw std::invalid_argument(std::string(name) + ": " + std::to_string(code) + " is none of TensorView.elements");
  return Element(code);
}

CallHeader make(int64_t num_tokens, int64_t topk, std::optional<int64_t> budget, int64_t want_tokens,
                int64_t want_hidden, int64_t num_experts, int64_t hidden, int64_t scale_width, int64_t pad_multiple,
                int64_t chunk_dispatch, int64_t chunk_combine, int dtype, int scale_dtype, bool permute,
                bool non_blocking, bool routing_map, bool weights, bool pad_empty_experts) {
  if (topk < 1 || topk > int64_t(kMostTopk))
    throw std::invalid_argument("topk: " + std::to_string(topk) + " is outside 1.." + std::to_string(kMostTopk));
  CallHeader h;
  h.num_tokens = narrow("num_tokens", num_tokens);
  h.topk = uint16_t(topk);
  if (budget && *budget > std::numeric_limits<int32_t>::max())  // a row is an int32
    throw std::invalid_argument("budget: " + std::to_string(*budget) +
                                " permuted rows (num_permuted_tokens) are more than 2^31-1; give None for no limit");
  if (budget) h.set_budget(narrow("budget", *budget));
  h.want_tokens = narrow("want_tokens", want_tokens);
  h.want_hidden = narrow("want_hidden", want_hidden);
  h.num_experts = narrow("num_experts", num_experts);
  h.hidden = narrow("hidden", hidden);
  h.scale_width = narrow("scale_width", scale_width);
  h.pad_multiple = narrow("pad_multiple", pad_multiple);
  h.chunk_dispatch = narrow("chunk_dispatch", chunk_dispatch);
  h.chunk_combine = narrow("chunk_combine", chunk_combine);
  h.dtype = element_of("dtype", dtype);
  h.scale_dtype = element_of("scale_dtype", scale_dtype);
  h.permute = permute;
  h.non_blocking = non_blocking;
  h.routing_map = routing_map;
  h.weights = weights;
  h.pad_empty_experts = pad_empty_experts;
  return h;
}

}  // namespace

void bind_header(py::module_& m) {
  using H = CallHeader;
  using Ranges = HeaderRanges;
  py::class_<Ranges>(m, "HeaderRanges", "The headers of all ranks together.")
      .def_readonly("least_topk", &Ranges::least_topk)
      .def_readonly("most_topk", &Ranges::most_topk)
      .def_readonly("most_tokens", &Ranges::most_tokens)
      .def_readonly("most_want_tokens", &Ranges::most_want_tokens)
      .def_readonly("most_want_hidden", &Ranges::most_want_hidden)
      .def_readonly("excess", &Ranges::excess);
  py::class_<H>(m, "CallHeader", "What a rank says of its call to all others; see layout/headers.h.")
      .def(py::init(&make), py::kw_only(), py::arg("num_tokens"), py::arg("topk"), py::arg("budget") = py::none(),
           py::arg("want_tokens") = 0, py::arg("want_hidden") = 0, py::arg("num_experts"), py::arg("hidden") = 0,
           py::arg("scale_width") = 0, py::arg("pad_multiple") = 1, py::arg("chunk_dispatch") = 0,
           py::arg("chunk_combine") = 0, py::arg("dtype") = 0, py::arg("scale_dtype") = 0, py::arg("permute") = false,
           py::arg("non_blocking") = false, py::arg("routing_map") = false, py::arg("weights") = false,
           py::arg("pad_empty_experts") = false,
           "dtype, scale_dtype: codes of TensorView.elements. ValueError for a number that its word cannot hold.")
      .def_readonly("num_tokens", &H::num_tokens)
      .def_readonly("topk", &H::topk)
      .def_readonly("excess", &H::excess)
      .def_property_readonly("budget", &H::budget)
      .def_readonly("num_experts", &H::num_experts)
      .def_readonly("hidden", &H::hidden)
      .def_readonly("scale_width", &H::scale_width)
      .def_readonly("pad_multiple", &H::pad_multiple)
      .def_readonly("chunk_dispatch", &H::chunk_dispatch)
      .def_readonly("chunk_combine", &H::chunk_combine)
      .def_property_readonly("dtype", [](const H& h) { return int(h.dtype); })
      .def_property_readonly("scale_dtype", [](const H& h) { return int(h.scale_dtype); })
      .def_readonly("permute", &H::permute)
      .def_readonly("non_blocking", &H::non_blocking)
      .def_readonly("routing_map", &H::routing_map)
      .def_readonly("weights", &H::weights)
      .def_readonly("pad_empty_experts", &H::pad_empty_experts);
}

}  // namespace hep
