// Sums of which every warp of a group has a slice of each tile, out of the stages' rows.
#pragma once
#include "roles/slice_sum.h"
#include "roles/sum_head.h"

namespace hep {

// Of a ReduceRole, whose stages, sums and slices these are.
template <class Role>
struct SliceTiles {
  using Sum = typename Role::Sum;
  using Slice = typename Role::Slice;
  Role& r;

  // The next tile's first head.
  HEP_DEVICE SumHead wait() { return r.from.wait(r.a); }
  // `head`: of the tile's first stage, then of its last. What differs between tiles is decided before the loop over
  // rows, one by one: the load of a jump table would be waited for.
  HEP_DEVICE void sum(SumHead& head) {
    const Slice s = r.sum.slice_of(head.elems);
    r.sum.begin(head.is(SumHead::kEmpty));
    for (;;) {
      if (head.is(SumHead::kEmpty))
        r.from.pass(r.a);
      else if (s.is_whole())
        add_rows<true>(head, s);
      else
        add_rows<false>(head, s);
      r.taken(head);
      if (head.is(SumHead::kLast)) break;
      head = r.from.wait(r.a);
    }
    if (s.elems == 0) return;
    r.slices.await();
    if (head.out() == DType::kFp32)
      r.sum.template round_into<float>(r.a, r.slices.data(), s);
    else if (head.out() == DType::kBf16)
      r.sum.template round_into<Bf16>(r.a, r.slices.data(), s);
    else
      r.sum.template round_into<Fp16>(r.a, r.slices.data(), s);
    r.store(head, s);
  }

 private:
  template <bool kWhole>
  HEP_DEVICE void add_rows(SumHead& head, const Slice& s) {
    if (head.in() == DType::kFp32)
      add_rows_of<float, kWhole>(head, s);
    else if (head.in() == DType::kBf16)
      add_rows_of<Bf16, kWhole>(head, s);
    else
      add_rows_of<Fp16, kWhole>(head, s);
  }
  template <class T, bool kWhole>
  HEP_DEVICE void add_rows_of(SumHead& head, const Slice& s) {
    if (head.is(SumHead::kScaled)) return add_rows_as<T, kWhole, true>(head, s);
    add_rows_as<T, kWhole, false>(head, s);
  }
  // Until the last row, or one of a ring, which is counted. A stage goes back as soon as its row and head are in
  // registers, and the next is looked at before the row is added: a warp is alone on its scheduler, and what it waits
  // for can hide behind nothing but its own sums. docs/cuda.md counts instructions and clocks.
  template <class T, bool kWhole, bool kScaled>
  HEP_DEVICE void add_rows_as(SumHead& head, const Slice& s) {
    for (;;) {
      Vec8<T> row[Sum::kMaxVec8s];
      r.sum.template load<T, kWhole>(r.a, row, r.from.data(), s);
      head = r.from.head(r.a);
      r.from.pass(r.a);
      const bool last = head.is(SumHead::kLast | SumHead::kRing), here = !last && r.from.is_here(r.a);
      r.sum.template add<T, kScaled>(row, head.scale);
      if (last) return;
      if (!here) r.from.await(r.a);
    }
  }
};

}  // namespace hep
