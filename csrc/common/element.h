// Types of a tensor's elements, as they cross from Python and stand in the headers of calls.
#pragma once
#include <cstdint>

namespace hep {

// Those that the core tells apart; anything else is payload.
enum class Element : uint8_t {
  kOther,
  kBool,
  kUint8,
  kInt8,
  kInt16,
  kInt32,
  kInt64,
  kFp16,
  kBf16,
  kFp32,
  kFp64,
  kE4m3,
  kE5m2,
  kE8m0,
  kCount
};

}  // namespace hep
