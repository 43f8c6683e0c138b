// What moves in test worlds, a function of seeds: rows, experts' outputs, weights that come back.
#pragma once
#include <cstring>

#include "common/numeric.h"
#include "world_case.h"

namespace hep::test {

inline uint64_t hash(std::initializer_list<uint64_t> words) {
  uint64_t h = 1;
  for (const uint64_t word : words) h = Random(h * 31 + word).next();
  return h;
}

inline void fill_row(Reference::Token t, uint64_t salt, unsigned char* row, size_t bytes) {
  Random r(hash({uint64_t(t.rank), t.index, salt}));
  for (size_t i = 0; i < bytes; i += 8) {
    const uint64_t word = r.next();
    std::memcpy(row + i, &word, 8);
  }
}
// An element of an expert's (or a rank's) output, zeros of both signs among them, and the weight that comes back.
inline float output(Reference::Token t, int from, uint32_t column, uint64_t salt) {
  const int n = int((hash({uint64_t(t.rank), t.index, uint64_t(from), salt}) + column * 3) % 6) - 3;
  return n == -3 ? -0.f : float(n);
}
inline float returned_weight(Reference::Token t, int expert, int from, uint64_t salt) {
  return float(hash({uint64_t(t.rank), t.index, uint64_t(expert), uint64_t(from), salt}) % 7);
}
inline void put(unsigned char* row, uint32_t column, float value, DType dtype) {
  switch (dtype) {
    case DType::kBf16: reinterpret_cast<Bf16*>(row)[column] = from_float<Bf16>(value); break;
    case DType::kFp16: reinterpret_cast<Fp16*>(row)[column] = from_float<Fp16>(value); break;
    case DType::kFp32: reinterpret_cast<float*>(row)[column] = value; break;
  }
}

}  // namespace hep::test
