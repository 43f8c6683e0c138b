// Where the sums of one combine read what a rank's experts wrote. The rank says so beside its ready flag, before it
// raises that, as it says in a dispatch where rows are to land (layout/landing.h): nothing of it need be agreed, and it
// may differ in every operation and on every rank.
#pragma once
#include <cstddef>

#include "layout/landing.h"

namespace hep {

enum class SumFrom : uint32_t {
  kPartials,    // the partial row of each receive row
  kReceiveRow,  // the outputs, which are in receive order: there are no partials
  kSinglePair,  // of a token with one pair here that has a row, that pair's row; of others their partials
  kEveryPair,   // the rows of all of the token's pairs, added and rounded as its partial would be; of a token that has
                // none, its partial
};

struct alignas(16) Reading {
  uint64_t x = 0;  // of row 0 of the outputs, from the start of the receive region
  SumFrom from = SumFrom::kPartials;
  uint32_t rows = 0;  // of the outputs
  uint32_t row_bytes = 0, partial_bytes = 0;
  uint64_t unused = 0;
  uint64_t epoch = 0;  // of the operation, where a Landing has it
  uint32_t kind = kReading, unused2 = 0;

  static constexpr uint32_t kReading = ~0u;  // metadata_bytes of no Landing

  // Whether it is of this operation and of sums of such rows. Else partials are waited for, which a rank that does
  // something else does not form.
  HEP_HOST_DEVICE bool is_for(uint64_t operation, uint32_t row, uint32_t partial) const {
    return epoch >= operation && kind == kReading && row_bytes == row && partial_bytes == partial;
  }
};
static_assert(sizeof(Reading) == sizeof(Landing) && offsetof(Reading, epoch) == offsetof(Landing, epoch) &&
              offsetof(Reading, kind) == offsetof(Landing, metadata_bytes));

}  // namespace hep
