// Division by a number that a launch fixes, as a multiplication and a shift: a GPU has no instruction to divide.
#pragma once
#include <bit>
#include <cstdint>

#include "common/macros.h"

namespace hep {

struct Reciprocal {
  uint32_t factor = 1u << 31, shift = 31;  // of 1

  // divisor: at least 1, at most 2^31. factor = ceil(2^shift / divisor) has 32 bits, and is too large by less than
  // divisor / 2^(shift - 31) <= 1 part in 2^31, which no quotient below 2^31 shows.
  static Reciprocal of(uint32_t divisor) {
    const uint32_t shift = 31 + uint32_t(std::bit_width(divisor - 1));
    return {uint32_t(((uint64_t(1) << shift) + divisor - 1) / divisor), shift};
  }
  // n / divisor, of n < 2^31.
  HEP_HOST_DEVICE uint32_t quotient(uint32_t n) const { return uint32_t(uint64_t(n) * factor >> shift); }
};

}  // namespace hep
