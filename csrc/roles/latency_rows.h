// Rows of a latency combine where a machine offers arithmetic on whole tiles of plain memory (TileMath::kReadsRows): a
// row is summed in scratch memory, as a whole, and cut into lines there, or put together from them.
#pragma once
#include <cstring>

#include "roles/latency_params.h"

namespace hep {

// A partial row, its sums in FP32, and those of its weights.
template <Arch A>
struct LatencyRows {
  const LatencyCombineParams& p;
  unsigned char* const row;
  float *const sums, *const weights;

  static uint64_t bytes(const LatencyCombineParams& p) {
    return align_up(p.partial.row_bytes(), 64) + 4ull * p.hidden + align_up(p.partial.weight_bytes, 64);
  }
  LatencyRows(const LatencyCombineParams& params, std::byte* scratch)
      : p(params),
        row(reinterpret_cast<unsigned char*>(scratch)),
        sums(reinterpret_cast<float*>(scratch + align_up(params.partial.row_bytes(), 64))),
        weights(sums + params.hidden) {}

  // Of this rank's experts: `each` calls with every row of theirs and its scale.
  template <class F>
  void sum_experts(uint32_t num_rows, F&& each) {
    TileRow tile{nullptr, row, p.dtype, p.partial_dtype, p.hidden, true, num_rows <= 1, p.multiply, 1.f};
    if (num_rows == 0) return TileMath<A>::add_row(tile, sums);
    uint32_t i = 0;
    each([&](const unsigned char* x, float scale) {
      tile.row = x;
      tile.scale = scale;
      tile.first = i == 0;
      tile.last = ++i == num_rows;
      TileMath<A>::add_row(tile, sums);
    });
  }
  // The i-th of num_rows partial rows of a token, which lies in `row`; the last one's sum goes to the result. Of none:
  // i and num_rows are 0.
  void add_partial(uint32_t t, uint32_t i, uint32_t num_rows) {
    unsigned char* out = p.out_x + uint64_t(t) * p.hidden * dtype_bytes(p.dtype);
    TileMath<A>::add_row(
        {num_rows ? row : nullptr, out, p.partial_dtype, p.dtype, p.hidden, i == 0, i + 1 >= num_rows, false, 1.f},
        sums);
    const auto* with = reinterpret_cast<const float*>(row + p.partial.weights_at());
    for (uint32_t slot = 0; slot < p.partial.weight_bytes / 4; ++slot) {
      weights[slot] = !num_rows ? 0.f : i == 0 ? with[slot] : weights[slot] + with[slot];
      if (i + 1 >= num_rows)
        p.out_weights[uint64_t(t) * p.plan.weight_stride + slot] = from_float<float>(weights[slot]);
    }
  }
};

}  // namespace hep
