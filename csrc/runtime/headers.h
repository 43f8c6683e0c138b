// What the headers of all ranks say together.
#pragma once
#include <span>
#include <string>
#include <vector>

#include "layout/headers.h"

namespace hep {

// Names of the fields that ranks must give alike and did not, in the order in which to say so. Not topk: ranks whose
// tokens have fewer pairs take rows as wide as the others'.
std::vector<std::string> differing_fields(std::span<const CallHeader> headers);

struct HeaderRanges {
  uint32_t least_topk, most_topk;
  uint32_t most_tokens;
  uint32_t most_want_tokens, most_want_hidden;
  bool excess;  // some rank's
};
HeaderRanges ranges_of(std::span<const CallHeader> headers);  // at least one

}  // namespace hep
