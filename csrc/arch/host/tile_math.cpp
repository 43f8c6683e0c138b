// The loops behind tile_math.h, compiled once for any x86-64 and once for AVX2, chosen when the library loads.
#include "arch/host/tile_math.h"

#include <bit>
#include <cstring>

// The choice is made by an ifunc, which runs before a sanitizer's runtime is up.
#if defined(__x86_64__) && defined(__gnu_linux__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define HEP_VECTOR_CLONES __attribute__((target_clones("arch=x86-64-v3", "default")))
#else
#define HEP_VECTOR_CLONES
#endif
#define HEP_INLINE inline __attribute__((always_inline))  // into the clones, to be compiled as they are

namespace hep::host {
namespace {

template <bool kFirst, bool kScaled>
HEP_INLINE float add(float acc, float x, float scale) {
  if constexpr (kScaled) x *= scale;
  return kFirst ? x : acc + x;
}

template <bool kFirst, bool kLast, bool kScaled, class In, class Out>
HEP_INLINE void add_elements(const In* HEP_RESTRICT row, Out* HEP_RESTRICT out, float* HEP_RESTRICT acc, size_t n,
                             float scale) {
  for (size_t i = 0; i < n; ++i) {
    const float sum = add<kFirst, kScaled>(kFirst ? 0.f : acc[i], to_float(row[i]), scale);
    if constexpr (kLast)
      out[i] = from_float<Out>(sum);
    else
      acc[i] = sum;
  }
}

// from_float<Bf16> in place: the result in the upper half, anything in the lower.
HEP_INLINE uint32_t round_upper(float x) {
  const uint32_t u = std::bit_cast<uint32_t>(x);
  const uint32_t nan = -uint32_t(int32_t(u & 0x7fffffffu) > 0x7f800000);
  return ((u + 0x7fffu + ((u >> 16) & 1u)) & ~nan) | (0x7fff0000u & nan);
}

// bf16 to bf16, the common case: two elements are one 32-bit word, so nothing crosses vector lanes. The even elements'
// sums lie in the first half of acc, the odd ones' in the second.
template <bool kFirst, bool kLast, bool kScaled>
HEP_INLINE void add_elements(const Bf16* row, Bf16* out, float* HEP_RESTRICT acc, size_t n, float scale) {
  using Pair = uint32_t __attribute__((may_alias));
  const auto* HEP_RESTRICT in = reinterpret_cast<const Pair*>(row);
  auto* HEP_RESTRICT to = reinterpret_cast<Pair*>(out);
  float* HEP_RESTRICT odd_acc = acc + n / 2;
  for (size_t i = 0; i < n / 2; ++i) {
    const float even = add<kFirst, kScaled>(kFirst ? 0.f : acc[i], std::bit_cast<float>(in[i] << 16), scale);
    const float odd = add<kFirst, kScaled>(kFirst ? 0.f : odd_acc[i], std::bit_cast<float>(in[i] & 0xffff0000u), scale);
    if constexpr (kLast)
      to[i] = (round_upper(even) >> 16) | (round_upper(odd) & 0xffff0000u);
    else {
      acc[i] = even;
      odd_acc[i] = odd;
    }
  }
}

// Two such rows, whose sum is rounded to bf16 before it is added.
template <bool kFirst, bool kLast>
HEP_INLINE void add_elements_of_two(const Bf16* row, const Bf16* other, Bf16* out, float* HEP_RESTRICT acc, size_t n) {
  using Pair = uint32_t __attribute__((may_alias));
  const auto* HEP_RESTRICT in = reinterpret_cast<const Pair*>(row);
  const auto* HEP_RESTRICT in2 = reinterpret_cast<const Pair*>(other);
  auto* HEP_RESTRICT to = reinterpret_cast<Pair*>(out);
  float* HEP_RESTRICT odd_acc = acc + n / 2;
  const auto rounded = [](float sum) { return std::bit_cast<float>(round_upper(sum) & 0xffff0000u); };
  for (size_t i = 0; i < n / 2; ++i) {
    const float even = rounded(std::bit_cast<float>(in[i] << 16) + std::bit_cast<float>(in2[i] << 16));
    const float odd = rounded(std::bit_cast<float>(in[i] & 0xffff0000u) + std::bit_cast<float>(in2[i] & 0xffff0000u));
    const float even_sum = kFirst ? even : acc[i] + even, odd_sum = kFirst ? odd : odd_acc[i] + odd;
    if constexpr (kLast)
      to[i] = (round_upper(even_sum) >> 16) | (round_upper(odd_sum) & 0xffff0000u);
    else {
      acc[i] = even_sum;
      odd_acc[i] = odd_sum;
    }
  }
}

template <class In, class Out>
HEP_INLINE void add_as(const TileRow& r, float* acc) {
  const auto* row = static_cast<const In*>(r.row);
  auto* out = static_cast<Out*>(r.out);
  switch ((r.first ? 1 : 0) | (r.last ? 2 : 0) | (r.scaled ? 4 : 0)) {
    case 0: return add_elements<false, false, false>(row, out, acc, r.n, r.scale);
    case 1: return add_elements<true, false, false>(row, out, acc, r.n, r.scale);
    case 2: return add_elements<false, true, false>(row, out, acc, r.n, r.scale);
    case 3: return add_elements<true, true, false>(row, out, acc, r.n, r.scale);
    case 4: return add_elements<false, false, true>(row, out, acc, r.n, r.scale);
    case 5: return add_elements<true, false, true>(row, out, acc, r.n, r.scale);
    case 6: return add_elements<false, true, true>(row, out, acc, r.n, r.scale);
    case 7: return add_elements<true, true, true>(row, out, acc, r.n, r.scale);
  }
}

template <class In>
HEP_INLINE void add_from(const TileRow& r, float* acc) {
  switch (r.out_type) {
    case DType::kBf16: return add_as<In, Bf16>(r, acc);
    case DType::kFp16: return add_as<In, Fp16>(r, acc);
    case DType::kFp32: return add_as<In, float>(r, acc);
  }
}

}  // namespace

HEP_VECTOR_CLONES bool add_two(const TileRow& r, const void* other, float* acc) {
  if (r.in != DType::kBf16 || r.out_type != DType::kBf16 || r.scaled) return false;
  const auto *row = static_cast<const Bf16*>(r.row), *row2 = static_cast<const Bf16*>(other);
  auto* out = static_cast<Bf16*>(r.out);
  switch ((r.first ? 1 : 0) | (r.last ? 2 : 0)) {
    case 0: add_elements_of_two<false, false>(row, row2, out, acc, r.n); break;
    case 1: add_elements_of_two<true, false>(row, row2, out, acc, r.n); break;
    case 2: add_elements_of_two<false, true>(row, row2, out, acc, r.n); break;
    case 3: add_elements_of_two<true, true>(row, row2, out, acc, r.n); break;
  }
  return true;
}

HEP_VECTOR_CLONES void add_row(const TileRow& r, float* acc) {
  if (!r.row) {
    std::memset(r.out, 0, r.n * dtype_bytes(r.out_type));
    return;
  }
  switch (r.in) {
    case DType::kBf16: return add_from<Bf16>(r, acc);
    case DType::kFp16: return add_from<Fp16>(r, acc);
    case DType::kFp32: return add_from<float>(r, acc);
  }
}

}  // namespace hep::host
