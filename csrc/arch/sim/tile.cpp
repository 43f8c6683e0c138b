// Arithmetic of the reduce roles on the simulated machine; a timed one only charges for it.
#include <algorithm>

#include "arch/sim/sim_arch.h"

namespace hep::sim {
namespace {

template <class T>
void add_as(const TileRow& r, float* acc) {
  const T* x = static_cast<const T*>(r.row);
  for (uint32_t i = 0; i < r.n; ++i) {
    float v = to_float(x[i]);
    if (r.scaled) v *= r.scale;
    acc[i] = r.first ? v : acc[i] + v;
  }
}

template <class T>
void round_as(const TileRow& r, const float* acc) {
  for (uint32_t i = 0; i < r.n; ++i) static_cast<T*>(r.out)[i] = from_float<T>(acc[i]);
}

}  // namespace

void SimTile::add_row(const TileRow& r, float* acc) {
  Lane& me = *Machine::running();
  Machine& m = *me.machine;
  const CostModel& costs = m.config().costs;
  const uint64_t in_bytes = uint64_t(r.n) * dtype_bytes(r.in), out_bytes = uint64_t(r.n) * dtype_bytes(r.out_type);
  if (m.timed()) {
    if (r.row) m.spend(me, duration(in_bytes, costs.reduce_mbps));
    if (r.last) m.spend(me, duration(4ull * r.n, costs.round_mbps));
    return;
  }
  if (r.row) {
    m.read_shared(me, r.row, in_bytes, 16);
    switch (r.in) {
      case DType::kBf16: add_as<Bf16>(r, acc); break;
      case DType::kFp16: add_as<Fp16>(r, acc); break;
      case DType::kFp32: add_as<float>(r, acc); break;
    }
  } else {
    std::fill_n(acc, r.n, 0.f);
  }
  if (!r.last) return;
  m.write_shared(me, r.out, out_bytes, 16);
  switch (r.out_type) {
    case DType::kBf16: return round_as<Bf16>(r, acc);
    case DType::kFp16: return round_as<Fp16>(r, acc);
    case DType::kFp32: return round_as<float>(r, acc);
  }
}

}  // namespace hep::sim
