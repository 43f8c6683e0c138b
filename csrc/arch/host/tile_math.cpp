// The loops behind tile_math.h, compiled once for any x86-64 and once for AVX2, chosen when the library loads.
#include "arch/host/tile_math.h"

// The choice is made by an ifunc, which runs before a sanitizer's runtime is up.
#if defined(__x86_64__) && defined(__gnu_linux__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define HEP_VECTOR_CLONES __attribute__((target_clones("arch=x86-64-v3", "default")))
#else
#define HEP_VECTOR_CLONES
#endif

namespace hep::host {
namespace {

template <class T>
inline __attribute__((always_inline)) void add(float* HEP_RESTRICT acc, const T* HEP_RESTRICT row, size_t n, bool first,
                                               bool scaled, float scale) {
  if (scaled) {
    if (first)
      for (size_t i = 0; i < n; ++i) acc[i] = to_float(row[i]) * scale;
    else
      for (size_t i = 0; i < n; ++i) acc[i] += to_float(row[i]) * scale;
  } else {
    if (first)
      for (size_t i = 0; i < n; ++i) acc[i] = to_float(row[i]);
    else
      for (size_t i = 0; i < n; ++i) acc[i] += to_float(row[i]);
  }
}

template <class T>
inline __attribute__((always_inline)) void round(T* HEP_RESTRICT out, const float* HEP_RESTRICT acc, size_t n) {
  for (size_t i = 0; i < n; ++i) out[i] = from_float<T>(acc[i]);
}

}  // namespace

HEP_VECTOR_CLONES void add_tile(float* acc, const void* row, DType type, size_t n, bool first, bool scaled,
                                float scale) {
  switch (type) {
    case DType::kBf16: return add(acc, static_cast<const Bf16*>(row), n, first, scaled, scale);
    case DType::kFp16: return add(acc, static_cast<const Fp16*>(row), n, first, scaled, scale);
    case DType::kFp32: return add(acc, static_cast<const float*>(row), n, first, scaled, scale);
  }
}

HEP_VECTOR_CLONES void round_tile(void* out, const float* acc, DType type, size_t n) {
  switch (type) {
    case DType::kBf16: return round(static_cast<Bf16*>(out), acc, n);
    case DType::kFp16: return round(static_cast<Fp16*>(out), acc, n);
    case DType::kFp32: return round(static_cast<float*>(out), acc, n);
  }
}

}  // namespace hep::host
