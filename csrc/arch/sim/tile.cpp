// Arithmetic of the reduce roles on the simulated machine; a timed one only charges for it.
#include "arch/sim/sim_arch.h"

namespace hep::sim {
namespace {

template <class T>
void add_as(float* acc, const void* row, uint32_t n, bool first, bool scaled, float scale) {
  const T* x = static_cast<const T*>(row);
  for (uint32_t i = 0; i < n; ++i) {
    float v = to_float(x[i]);
    if (scaled) v *= scale;
    acc[i] = first ? v : acc[i] + v;
  }
}

template <class T>
void round_as(void* out, const float* acc, uint32_t n) {
  for (uint32_t i = 0; i < n; ++i) static_cast<T*>(out)[i] = from_float<T>(acc[i]);
}

}  // namespace

void SimTile::add(float* acc, const void* row, DType type, uint32_t n, bool first, bool scaled, float scale) {
  Lane& me = *Machine::running();
  Machine& m = *me.machine;
  const uint64_t bytes = uint64_t(n) * dtype_bytes(type);
  if (m.timed()) return m.spend(me, duration(bytes, m.config().costs.reduce_mbps));
  m.read_shared(me, row, bytes, 16);
  switch (type) {
    case DType::kBf16: return add_as<Bf16>(acc, row, n, first, scaled, scale);
    case DType::kFp16: return add_as<Fp16>(acc, row, n, first, scaled, scale);
    case DType::kFp32: return add_as<float>(acc, row, n, first, scaled, scale);
  }
}

void SimTile::round(void* out, const float* acc, DType type, uint32_t n) {
  Lane& me = *Machine::running();
  Machine& m = *me.machine;
  const uint64_t bytes = uint64_t(n) * dtype_bytes(type);
  if (m.timed()) return m.spend(me, duration(4ull * n, m.config().costs.round_mbps));
  m.write_shared(me, out, bytes, 16);
  switch (type) {
    case DType::kBf16: return round_as<Bf16>(out, acc, n);
    case DType::kFp16: return round_as<Fp16>(out, acc, n);
    case DType::kFp32: return round_as<float>(out, acc, n);
  }
}

}  // namespace hep::sim
