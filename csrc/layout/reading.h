// Where the sums of one combine read what a rank's experts wrote. The rank says so beside its ready flag, before it
// raises that, as it says in a dispatch where rows are to land (layout/landing.h): it may differ in every operation and
// on every rank. But for what rows are, which all ranks must mean alike: others would add fp32 as bf16.
#pragma once
#include <cstddef>

#include "common/numeric.h"
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
  uint64_t x = 0;  // of row 0 of the outputs, from the start of the receive region, as in a Landing
  SumFrom from = SumFrom::kPartials;
  uint32_t rows = 0;  // of the outputs
  uint32_t row_bytes = 0, partial_bytes = 0;
  uint64_t unused = 0;
  uint64_t epoch = 0;  // of the operation, where a Landing has it
  uint32_t kind = kReading;
  uint32_t types = 0;  // of the rows and of partials

  static constexpr uint32_t kReading = ~0u;  // metadata_bytes of no Landing

  HEP_HOST_DEVICE static uint32_t types_of(DType rows, DType partials) {
    return uint32_t(rows) | uint32_t(partials) << 4;
  }
  // Whether it is of this operation. Else partials are waited for, which a rank that does something else does not form.
  HEP_HOST_DEVICE bool is_of(uint64_t operation) const { return epoch >= operation && kind == kReading; }
  HEP_HOST_DEVICE bool means_rows_of(const Reading& mine) const {
    return row_bytes == mine.row_bytes && partial_bytes == mine.partial_bytes && types == mine.types;
  }
};
static_assert(sizeof(Reading) == sizeof(Landing) && offsetof(Reading, epoch) == offsetof(Landing, epoch) &&
              offsetof(Reading, kind) == offsetof(Landing, metadata_bytes));

}  // namespace hep
