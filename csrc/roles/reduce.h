// Reduce: adds staged rows in FP32 in the order they come, rounds once, and stores the tile. Every warp of a group owns
// a slice of the tile. They meet only where a chunk for a rail peer, or a group of partial rows, is complete.
#pragma once
#include "roles/out_slices.h"
#include "roles/rail_tally.h"
#include "roles/slice_sum.h"
#include "roles/unpermute.h"
#include "roles/whole_tiles.h"

namespace hep {

// kWarps warps from `first_warp` on; `group` names their barrier and slices.
template <Arch A, Transport<A> Net, int kWarps>
struct ReduceRole {
  using Machine = A;
  using Sum = SliceSum<A, kWarps>;
  using Slice = typename Sum::Slice;
  static constexpr bool kWholeTiles = TileMath<A>::kOffered && kWarps * A::kLanes == 1;
  static_assert(kWholeTiles || !TileMath<A>::kReadsRows);  // stages without rows are for whole tiles

  A& a;
  Net& net;
  const CombineParams& p;
  WarpConsumer<A, SumHead> from;
  RailTally<A, Net> tally;
  std::byte* const smem;
  const int group;
  Sum sum;
  const bool leader;  // the elected lane of the first warp: speaks for the group
  OutSlices<A> slices;

  HEP_DEVICE ReduceRole(A& arch, Net& n, const CombineParams& params, const StageFifo<A, SumHead>& fifo,
                        std::byte* smem_, int group_, int first_warp)
      : a(arch),
        net(n),
        p(params),
        from(arch, fifo),
        tally{arch, n, params.rail, reinterpret_cast<Vec16*>(smem_ + params.rail_tally_at)},
        smem(smem_),
        group(group_),
        sum(arch.warp_idx() - first_warp, arch.lane()),
        leader(from.elected && sum.warp == 0),
        slices(arch, reinterpret_cast<unsigned char*>(smem_) + params.out_stage_at[group_],
               params.out_slice_bytes[group_], sum.warp, from.elected) {}

  // `parties`: reduce groups of the grid, before whose end the node is not told that its rows are done with; 0: none.
  HEP_DEVICE void run(const char* role, uint32_t parties) {
    a.set_role(role);
    for (;;) {
      SumHead head = from.wait(a);
      if (head.is(SumHead::kStop)) break;
      sum_tile(head);
      if (leader) tally.tell(head.is(SumHead::kSettle));
      if (head.is(SumHead::kChunkEnd | SumHead::kGroupEnd)) complete(head);
    }
    from.pass(a);
    if (!from.elected) return;
    if (!injected(Bug::kResultsBeforeStores)) a.template bulk_wait<0>();
    if (!parties) return;
    const uint64_t before = a.add_acq_rel_sys(p.exit_counter, 1);
    if (last_of(before, p.exit_counter, uint64_t(parties) * kWarps)) p.gate.announce_done(a);
  }

  HEP_DEVICE void store(const SumHead& head, const Slice& s) {
    const uint32_t size = dtype_bytes(head.out());
    slices.store(head.dst + uint64_t(s.begin) * size, s.elems * size);
  }
  HEP_DEVICE void taken(const SumHead& head) {
    if (leader && head.is(SumHead::kRing)) tally.count(head);
  }

 private:
  // `head`: of the tile's first stage, then of its last. What differs between tiles is decided before the loop over
  // rows, one by one: the load of a jump table would be waited for.
  HEP_DEVICE void sum_tile(SumHead& head) {
    if constexpr (kWholeTiles) return WholeTiles<ReduceRole>{*this}.sum(head);
    const Slice s = sum.slice_of(head.elems);
    sum.begin(head.is(SumHead::kEmpty));
    for (;;) {
      if (head.is(SumHead::kEmpty))
        from.pass(a);
      else if (s.is_whole())
        add_rows<true>(head, s);
      else
        add_rows<false>(head, s);
      taken(head);
      if (head.is(SumHead::kLast)) break;
      head = from.wait(a);
    }
    if (s.elems == 0) return;
    slices.await();
    if (head.out() == DType::kFp32)
      sum.template round_into<float>(a, slices.data(), s);
    else if (head.out() == DType::kBf16)
      sum.template round_into<Bf16>(a, slices.data(), s);
    else
      sum.template round_into<Fp16>(a, slices.data(), s);
    store(head, s);
  }
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
      sum.template load<T, kWhole>(a, row, from.data(), s);
      head = from.head(a);
      from.pass(a);
      const bool last = head.is(SumHead::kLast | SumHead::kRing), here = !last && from.is_here(a);
      sum.template add<T, kScaled>(row, head.scale);
      if (last) return;
      if (!here) from.await(a);
    }
  }
  // A slot of the rail or a group of partial rows: by the stores of all warps, before anybody reads it.
  HEP_DEVICE void complete(const SumHead& head) {
    const bool sends = head.is(SumHead::kChunkEnd);
    if (from.elected && !injected(sends ? Bug::kSumPutBeforeStored : Bug::kPartialsBeforeStores))
      a.template bulk_wait<0>();
    if (!injected(sends ? Bug::kSumPutBeforeAllWarps : Bug::kPartialsBeforeAllWarps)) a.group_sync(1 + group, kWarps);
    if (!leader) return;
    if (sends)
      send(head);
    else
      PartialGroups<A>(a, p, smem).tell(PartialFlags::kPayload, head.chunk, head.peer, p.gate.epoch());
  }
  HEP_DEVICE void send(const SumHead& head) {
    const uint64_t bytes = uint64_t(head.chunk_stages) * p.partial.row_bytes();
    RailSender::commit(a, net, p.rail.geometry, p.rail.peers[head.peer], head.chunk, bytes);
    a.count_rank(&p.traffic->rail_rows, head.chunk_stages);
    a.count_rank(&p.traffic->rail_bytes, bytes);
  }
};

}  // namespace hep
