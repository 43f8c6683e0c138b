// Element types of the payload that combine can add, and their one rounding: to nearest, ties to even. A NaN
// becomes the one that NVIDIA's instructions give, positive and with all bits of the mantissa, on every machine: which
// NaN a sum of several is differs between processors.
#pragma once
#include <bit>
#include <cstdint>

#include "common/macros.h"

namespace hep {

enum class DType : uint32_t { kBf16 = 0, kFp16 = 1, kFp32 = 2 };

HEP_HOST_DEVICE constexpr uint32_t dtype_bytes(DType t) {
  return t == DType::kFp32 ? 4 : 2;
}

struct Bf16 {
  uint16_t bits;
};
struct Fp16 {
  uint16_t bits;
};

HEP_HOST_DEVICE float to_float(float x) {
  return x;
}
HEP_HOST_DEVICE float to_float(Bf16 x) {
  return std::bit_cast<float>(uint32_t(x.bits) << 16);
}
HEP_HOST_DEVICE float to_float(Fp16 x) {
  // Shift the half's exponent and mantissa into a float's places, then rescale by 2^112: subnormals come
  // out right because the multiplication normalises them. Inf and NaN keep their exponent by the OR.
  uint32_t sign = uint32_t(x.bits & 0x8000u) << 16, mag = uint32_t(x.bits & 0x7fffu) << 13;
  float value = std::bit_cast<float>(mag) * std::bit_cast<float>(0x77800000u);
  uint32_t special = (x.bits & 0x7c00u) == 0x7c00u ? 0x7f800000u : 0u;
  return std::bit_cast<float>(std::bit_cast<uint32_t>(value) | special | sign);
}

template <class T>
HEP_HOST_DEVICE T from_float(float x);
template <>
HEP_HOST_DEVICE float from_float<float>(float x) {
  return x == x ? x : std::bit_cast<float>(0x7fffffffu);
}
template <>
HEP_HOST_DEVICE Bf16 from_float<Bf16>(float x) {
  uint32_t u = std::bit_cast<uint32_t>(x);
  uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  return Bf16{uint16_t((u & 0x7fffffffu) > 0x7f800000u ? 0x7fffu : rounded)};
}
template <>
HEP_HOST_DEVICE Fp16 from_float<Fp16>(float x) {
  uint32_t u = std::bit_cast<uint32_t>(x), sign = (u >> 16) & 0x8000u, mag = u & 0x7fffffffu;
  if (mag >= 0x47800000u)  // 65536 and above, Inf, NaN
    return Fp16{uint16_t(mag > 0x7f800000u ? 0x7fffu : sign | 0x7c00u)};
  if (mag < 0x38800000u) {  // below 2^-14: adding 0.5 lets the FPU round to the subnormal grid
    float shifted = std::bit_cast<float>(mag) + 0.5f;
    return Fp16{uint16_t(sign | (std::bit_cast<uint32_t>(shifted) - 0x3f000000u))};
  }
  uint32_t rounded = (mag + 0xfffu + ((mag >> 13) & 1u) - 0x38000000u) >> 13;
  return Fp16{uint16_t(sign | rounded)};
}

}  // namespace hep
