// Sums on a machine that adds whole tiles (TileMath): a lane has the tile, the loop over elements is the machine's.
#pragma once
#include "roles/sum_feed.h"

namespace hep {

// Of a ReduceRole, whose stages, sums and slices these are.
template <class Role>
struct WholeTiles {
  using A = typename Role::Machine;
  Role& r;

  // head: of the tile's first stage, then of its last.
  HEP_DEVICE void sum(SumHead& head) {
    if constexpr (TileMath<A>::kReadsRows) return sum_strips(head);
    for (;;) {
      if (head.is(SumHead::kLast)) r.slices.await();
      TileMath<A>::add_row(tile_row(head, r.from.data()), &r.sum.sums[0][0]);
      r.from.pass(r.a);
      r.taken(head);
      if (head.is(SumHead::kLast)) return r.store(head, {0, head.elems});
      head = r.from.wait(r.a);
    }
  }

 private:
  // Rows are read where they lie, strip by strip of the tile: sums stay in the nearest cache, where a row at a time
  // would move them through it, and loads of several rows are under way at once.
  HEP_DEVICE void sum_strips(SumHead& head) {
    constexpr uint32_t kMostRows = 16, kStrip = 512;
    TileRow rows[kMostRows];
    SumHead heads[kMostRows];
    for (;;) {
      uint32_t n = 0;
      for (;;) {
        const auto* at = reinterpret_cast<const uint64_t*>(r.from.data());
        const uint64_t row = head.is(SumHead::kEmpty) ? 0 : r.a.ld_shared(at);
        rows[n] = tile_row(head, reinterpret_cast<const unsigned char*>(row));
        heads[n] = head;
        r.from.pass(r.a);
        if (++n == kMostRows || head.is(SumHead::kLast)) break;
        head = r.from.wait(r.a);
      }
      if (head.is(SumHead::kLast)) r.slices.await();
      for (uint32_t begin = 0; begin < head.elems; begin += kStrip)
        for (uint32_t i = 0; i < n; ++i) TileMath<A>::add_row(rows[i].strip(begin, kStrip), &r.sum.sums[0][0] + begin);
      for (uint32_t i = 0; i < n; ++i) r.taken(heads[i]);
      if (head.is(SumHead::kLast)) return r.store(head, {0, head.elems});
      head = r.from.wait(r.a);
    }
  }
  HEP_DEVICE TileRow tile_row(const SumHead& head, const unsigned char* row) const {
    return {head.is(SumHead::kEmpty) ? nullptr : row,
            r.slices.data(),
            head.in(),
            head.out(),
            head.elems,
            head.is(SumHead::kFirst),
            head.is(SumHead::kLast),
            head.is(SumHead::kScaled),
            head.scale};
  }
};

}  // namespace hep
