#include "runtime/headers.h"

#include <algorithm>

namespace hep {
namespace {

using Headers = std::span<const CallHeader>;

template <auto... kFields>
bool alike(Headers headers) {
  const CallHeader& first = headers.front();
  return std::ranges::all_of(headers, [&](const CallHeader& h) { return ((h.*kFields == first.*kFields) && ...); });
}

struct HeaderField {
  const char* name;
  bool (*alike)(Headers);
};
constexpr HeaderField kFields[] = {{"hidden", alike<&CallHeader::hidden>},
                                   {"dtype", alike<&CallHeader::dtype>},
                                   {"scale_width", alike<&CallHeader::scale_width>},
                                   {"scale_dtype", alike<&CallHeader::scale_dtype>},
                                   {"num_experts", alike<&CallHeader::num_experts>},
                                   {"routing", alike<&CallHeader::routing_map>},
                                   {"pad_multiple", alike<&CallHeader::pad_multiple>},
                                   {"pad_empty_experts", alike<&CallHeader::pad_empty_experts>},
                                   {"weights", alike<&CallHeader::weights>},
                                   {"verb", alike<&CallHeader::permute, &CallHeader::non_blocking>},
                                   {"chunk_dispatch", alike<&CallHeader::chunk_dispatch>},
                                   {"chunk_combine", alike<&CallHeader::chunk_combine>}};

}  // namespace

std::vector<std::string> differing_fields(Headers headers) {
  std::vector<std::string> names;
  for (const HeaderField& field : kFields)
    if (!field.alike(headers)) names.emplace_back(field.name);
  return names;
}

HeaderRanges ranges_of(Headers headers) {
  HeaderRanges r{kMostTopk, 0, 0, 0, 0, false};
  for (const CallHeader& h : headers) {
    r.least_topk = std::min<uint32_t>(r.least_topk, h.topk);
    r.most_topk = std::max<uint32_t>(r.most_topk, h.topk);
    r.most_tokens = std::max(r.most_tokens, h.num_tokens);
    r.most_want_tokens = std::max(r.most_want_tokens, h.want_tokens);
    r.most_want_hidden = std::max(r.most_want_hidden, h.want_hidden);
    r.excess |= h.excess > 0;
  }
  return r;
}

}  // namespace hep
