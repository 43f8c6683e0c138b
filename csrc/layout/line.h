// A line: 128 bytes of registered memory, fifteen words of payload and a flag, seen whole or not at all. Whoever reads
// the flag that he waits for has the payload that was stored with it, without a fence on either side: a row and the
// word that says that it is there travel in one store. 15/16 of the bytes are payload.
#pragma once
#include <cstdint>

#include "common/world.h"

namespace hep {

struct alignas(128) Line {
  static constexpr int kWords = 16, kFlag = 15;  // the flag is the last word; all before it are payload
  static constexpr uint32_t kPayloadBytes = 8 * kFlag;
  uint64_t words[kWords];

  // That so many bytes take.
  HEP_HOST_DEVICE static constexpr uint32_t lines_of(uint64_t bytes) { return uint32_t(div_up(bytes, kPayloadBytes)); }
};
static_assert(sizeof(Line) == 128);

// Lanes of a warp that share a line: a vector of 16 bytes each where there are eight.
HEP_HOST_DEVICE constexpr int line_lanes(int lanes) {
  return lanes < 8 ? lanes : 8;
}

}  // namespace hep
