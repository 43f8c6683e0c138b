// Sums on a machine that adds whole tiles (TileMath): a lane has the tile, the loop over elements is the machine's.
#pragma once
#include "roles/sum_feed.h"

namespace hep {

// Of a ReduceRole, whose stages, sums and slices these are.
template <class Role>
struct WholeTiles {
  using A = typename Role::Machine;
  Role& r;

  // Where rows are read where they lie, their stages go back at once: rows of a sum, or some of one that has many.
  struct Rows : TileRows {
    SumHead heads[kMost];

    HEP_DEVICE bool is_complete() const { return n == kMost || (n && heads[n - 1].is(SumHead::kLast)); }
    // That the machine forms in one go.
    HEP_DEVICE bool is_sum_at_once() const {
      const SumHead& head = heads[n - 1];
      if (!heads[0].is(SumHead::kFirst) || !head.is(SumHead::kLast) || head.is(SumHead::kEmpty)) return false;
      if (!TileMath<A>::adds_rows(head.in(), head.out()) || injected(Bug::kPartUnrounded)) return false;
      for (uint32_t i = 0; i < n; ++i)
        if (heads[i].is(SumHead::kScaled)) return false;
      return true;
    }
  };
  Rows rows[2] = {};
  uint32_t current = 0;

  // The next tile's first head.
  HEP_DEVICE SumHead wait() {
    if (rows[current].n) return rows[current].heads[0];
    return r.from.wait(r.a);
  }
  // head: of the tile's first stage, then of its last.
  HEP_DEVICE void sum(SumHead& head) {
    if constexpr (TileMath<A>::kReadsRows) return sum_strips(head);
    for (;;) {
      if (head.is(SumHead::kLast)) r.slices.await();
      TileMath<A>::add_row(tile_row(head, r.from.data()), &r.sum.sums[0][0]);
      r.from.pass(r.a);
      r.taken(head);
      if (head.is(SumHead::kLast)) return store(head);
      head = r.from.wait(r.a);
    }
  }

 private:
  static constexpr uint32_t kStrip = 512;

  // Strip by strip of the tile: sums stay in the nearest cache, where a row at a time would move them through it. The
  // next rows are fetched meanwhile, as far as the feed has come: they may lie anywhere, and nobody would guess where.
  HEP_DEVICE void sum_strips(SumHead& head) {
    float part[kSumTileElems];
    for (;;) {
      Rows &now = rows[current], &next = rows[current ^ 1];
      while (!now.is_complete()) take(now, r.from.wait(r.a));
      while (!next.is_complete() && r.from.is_here(r.a)) {
        const SumHead ahead = r.from.wait(r.a);
        if (ahead.is(SumHead::kStop)) break;
        take(next, ahead);
      }
      head = now.heads[now.n - 1];
      if (head.is(SumHead::kLast)) r.slices.await();
      const bool at_once = now.is_sum_at_once();
      for (uint32_t begin = 0; begin < head.elems; begin += kStrip) {
        for (uint32_t i = 0; i < next.n; ++i) fetch(next, i, begin);
        if (at_once) {
          TileMath<A>::add_rows(now, begin, tile_row(head, nullptr).strip(begin, kStrip));
          continue;
        }
        float* const sum = &r.sum.sums[0][0] + begin;
        for (uint32_t i = 0; i < now.n; ++i)
          add(now.heads[i], tile_row(now.heads[i], now.at[i]).strip(begin, kStrip), sum, part + begin);
      }
      for (uint32_t i = 0; i < now.n; ++i) r.taken(now.heads[i]);
      now.n = 0;
      current ^= 1;
      if (head.is(SumHead::kLast)) return store(head);
    }
  }
  HEP_DEVICE void take(Rows& to, const SumHead& head) {
    to.heads[to.n] = head;
    to.place[to.n] = !head.is(SumHead::kPart)      ? TileRows::kAlone
                     : head.is(SumHead::kPartLast) ? TileRows::kEndsPart
                                                   : TileRows::kInPart;
    const auto* at = reinterpret_cast<const uint64_t*>(r.from.data());
    to.at[to.n++] = head.is(SumHead::kEmpty) ? nullptr : reinterpret_cast<const unsigned char*>(r.a.ld_shared(at));
    r.from.pass(r.a);
  }
  HEP_DEVICE static void fetch(const Rows& rows, uint32_t i, uint32_t begin) {
    const SumHead& head = rows.heads[i];
    if (begin >= head.elems || !rows.at[i]) return;
    const uint32_t size = dtype_bytes(head.in()), most = head.elems - begin;
    TileMath<A>::fetch(rows.at[i] + uint64_t(begin) * size, (most < kStrip ? most : kStrip) * size);
  }
  // A row of a part goes into the part's sum; with its last row that is rounded as a partial is, and goes into `sum`.
  HEP_DEVICE static void add(const SumHead& head, TileRow row, float* sum, float* part) {
    if (!head.is(SumHead::kPart)) return TileMath<A>::add_row(row, sum);
    alignas(16) unsigned char rounded[4 * kStrip];
    TileRow whole = row;
    row.first = head.is(SumHead::kPartFirst);
    row.last = head.is(SumHead::kPartLast);
    row.out = rounded;
    row.out_type = whole.in = injected(Bug::kPartUnrounded) ? DType::kFp32 : row.in;
    TileMath<A>::add_row(row, part);
    if (!row.last) return;
    whole.row = rounded;
    TileMath<A>::add_row(whole, sum);
  }
  HEP_DEVICE void store(const SumHead& head) {
    if (head.elems) r.store(head, {0, head.elems});
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
