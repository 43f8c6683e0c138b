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
  // Where a sum of partial rows goes: a row of the result, or a partial row again, and the weights that belong to it.
  struct Sum {
    unsigned char* out;
    DType dtype;
    float* out_weights;
  };
  Sum of_token(uint32_t t) const {
    return {p.out_x + uint64_t(t) * p.hidden * dtype_bytes(p.dtype), p.dtype,
            p.out_weights + uint64_t(t) * p.plan.weight_stride};
  }
  Sum of_node(unsigned char* at) const {
    return {at, p.partial_dtype, reinterpret_cast<float*>(at + p.partial.weights_at())};
  }
  // The i-th of num_rows partial rows of it; the last one completes it. Of none: i and num_rows are 0.
  void add_partial(const Sum& sum, const unsigned char* from, uint32_t i, uint32_t num_rows) {
    TileMath<A>::add_row({num_rows ? from : nullptr, sum.out, p.partial_dtype, sum.dtype, p.hidden, i == 0,
                          i + 1 >= num_rows, false, 1.f},
                         sums);
    const auto* with = reinterpret_cast<const float*>(from + p.partial.weights_at());
    for (uint32_t slot = 0; slot < p.partial.weight_bytes / 4; ++slot) {
      weights[slot] = !num_rows ? 0.f : i == 0 ? with[slot] : weights[slot] + with[slot];
      if (i + 1 >= num_rows) sum.out_weights[slot] = from_float<float>(weights[slot]);
    }
  }
  // Of local rank `local` of this node for a token of a rank of this rail on `node`, put together from its lines.
  HEP_DEVICE const unsigned char* assemble(A& a, const LinePart<A>& part, uint64_t flag, int node, int local,
                                           uint32_t token) {
    const uint32_t n = p.lines(), all = p.partial.row_bytes() / 8;
    const Line* lines = p.link.slot(flag, p.world.local_rank(), p.link.named(node, local), token);
    const int rank = p.world.rank_of(p.world.node(), local);
    for (uint32_t line = part.group; line - part.group < n; line += part.kAtOnce) {
      uint64_t words[A::kLineWords];
      p.link.wait(a, line < n ? lines + line : nullptr, flag, words, {Site::kLatencyRow, rank, int64_t(token)});
      std::memcpy(row + 8 * part.word(line), words, 8 * part.count(line, all));
    }
    return row;
  }
};

}  // namespace hep
