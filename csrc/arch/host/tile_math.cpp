// The loops behind tile_math.h, compiled for any x86-64, for AVX2 and some for AVX-512, chosen when the library loads.
#include "arch/host/tile_math.h"

#include <bit>
#include <cstring>

// The choice is made by an ifunc, which runs before a sanitizer's runtime is up.
#if defined(__x86_64__) && defined(__gnu_linux__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define HEP_VECTOR_CLONES __attribute__((target_clones("arch=x86-64-v3", "default")))
#define HEP_CHOSEN 1
#else
#define HEP_VECTOR_CLONES
#define HEP_CHOSEN 0
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

// A whole sum of bf16 rows, in vectors of kBytes: one for the even elements of as many words, one for the odd ones.
template <size_t kBytes>
struct RowsSum {
  typedef uint32_t Words __attribute__((vector_size(kBytes)));
  typedef float Floats __attribute__((vector_size(kBytes)));

  struct Pair {
    Floats even, odd;

    HEP_INLINE void clear() { even = odd = -0.f - Floats{}; }  // -0 changes nothing that it is added to
    HEP_INLINE void add(const Pair& p) {
      even += p.even;
      odd += p.odd;
    }
    HEP_INLINE void set(const Words& w) {
      even = reinterpret_cast<Floats>(w << 16);
      odd = reinterpret_cast<Floats>(w & 0xffff0000u);
    }
    HEP_INLINE void round_into(Words& w) const {
      Words upper = reinterpret_cast<Words>(odd);
      w = reinterpret_cast<Words>(even);
      round_upper(w);
      round_upper(upper);
      w = (w >> 16) | (upper & 0xffff0000u);
    }
  };
  // from_float<Bf16> in place: the result in the upper half, anything in the lower.
  HEP_INLINE static void round_upper(Words& u) {
    const Words nan = reinterpret_cast<Words>((u & 0x7fffffffu) > 0x7f800000u);
    u = ((u + 0x7fffu + ((u >> 16) & 1u)) & ~nan) | (0x7fff0000u & nan);
  }

  template <bool kParts>
  HEP_INLINE static void add_block(const TileRows& rows, uint64_t at, unsigned char* out, uint32_t bytes) {
    Pair sum, part, row;
    sum.clear();
    part.clear();
    Words words{};
    for (uint32_t i = 0; i < rows.n; ++i) {
      std::memcpy(&words, rows.at[i] + at, bytes);
      row.set(words);
      if (!kParts || rows.place[i] == TileRows::kAlone) {
        sum.add(row);
        continue;
      }
      part.add(row);
      if (rows.place[i] == TileRows::kInPart) continue;
      part.round_into(words);
      row.set(words);
      sum.add(row);
      part.clear();
    }
    sum.round_into(words);
    std::memcpy(out, &words, bytes);
  }
  template <bool kParts>
  HEP_INLINE static void add(const TileRows& rows, uint64_t at, unsigned char* out, uint32_t bytes) {
    uint32_t i = 0;
    for (; i + kBytes <= bytes; i += kBytes) add_block<kParts>(rows, at + i, out + i, kBytes);
    if (i < bytes) add_block<kParts>(rows, at + i, out + i, bytes - i);
  }
  HEP_INLINE static void add(const TileRows& rows, uint32_t begin, uint32_t n, void* out) {
    bool parts = false;
    for (uint32_t i = 0; i < rows.n; ++i) parts |= rows.place[i] != TileRows::kAlone;
    auto* const to = static_cast<unsigned char*>(out);
    const uint64_t at = sizeof(Bf16) * uint64_t(begin);
    parts ? add<true>(rows, at, to, sizeof(Bf16) * n) : add<false>(rows, at, to, sizeof(Bf16) * n);
  }
};

// One of them, by the machine.
#if HEP_CHOSEN
__attribute__((target("arch=x86-64-v4"))) void add_rows_here(const TileRows& rows, uint32_t begin, uint32_t n,
                                                             void* out) {
  RowsSum<64>::add(rows, begin, n, out);
}
__attribute__((target("arch=x86-64-v3"))) void add_rows_here(const TileRows& rows, uint32_t begin, uint32_t n,
                                                             void* out) {
  RowsSum<32>::add(rows, begin, n, out);
}
__attribute__((target("default")))
#endif
void add_rows_here(const TileRows& rows, uint32_t begin, uint32_t n, void* out) {
  RowsSum<16>::add(rows, begin, n, out);
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

void add_rows(const TileRows& rows, uint32_t begin, uint32_t n, void* out) {
  add_rows_here(rows, begin, n, out);
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
