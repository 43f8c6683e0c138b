// Reduce: adds staged rows in FP32 in the order they come, rounds once, and stores the tile. A group of warps;
// every lane owns fixed octets of the tile, so a sum never crosses lanes and its order is the feed's order.
#pragma once
#include "common/bugs.h"
#include "roles/octet.h"
#include "roles/rail_tally.h"

namespace hep {

inline constexpr uint32_t kSumTileElems = 2048;

// kWarps warps of the block, the first of them `first_warp`; `group` names their barrier. kRailRows: rings give rows.
template <Arch A, Transport<A> Net, int kWarps, bool kRailRows = false>
struct ReduceRole {
  A& a;
  Net& net;
  const CombineParams& p;
  StageConsumer<A, SumHead> from;
  RailTally<A, Net> tally;
  unsigned char* out_tiles;  // shared memory, two tiles of out_tile_bytes
  const int group, me;
  const DType in, out;
  const bool leader;  // commits the bulk stores, hence waits for them

  static constexpr int kWidth = kWarps * A::kLanes;
  static constexpr bool kWholeTiles = TileMath<A>::kOffered && kWidth == 1;
  static constexpr uint32_t kOutTileBytes = kSumTileElems * 4;
  static constexpr int kMaxOctets = kSumTileElems / kOctet / kWidth;
  float acc[kMaxOctets][kOctet];

  HEP_DEVICE ReduceRole(A& arch, Net& n, const CombineParams& params, const StageFifo<A, SumHead>& fifo,
                        std::byte* smem, uint64_t out_at, int group_, int first_warp, DType in_, DType out_)
      : a(arch),
        net(n),
        p(params),
        from(fifo, 0, 1),
        tally{arch, n, params.rail, reinterpret_cast<Vec16*>(smem + params.rail_tally_at)},
        out_tiles(reinterpret_cast<unsigned char*>(smem) + out_at),
        group(group_),
        me((arch.warp_idx() - first_warp) * A::kLanes + arch.lane()),
        in(in_),
        out(out_),
        leader(arch.elect_one() && arch.warp_idx() == first_warp) {}

  // `parties`: reduce groups of the whole grid that must end before the node is told that we are done with its
  // rows; 0 = the kernel reads only this rank's memory.
  HEP_DEVICE void run(const char* role, int parties) {
    a.set_role(role);
    uint32_t parity = 0;
    for (;;) {
      const SumHead head = from.wait(a);
      if (head.is(SumHead::kStop)) break;
      unsigned char* tile = out_tiles + parity * kOutTileBytes;
      if constexpr (kWholeTiles) {
        if (head.is(SumHead::kLast)) await_tile();
        add_row(head, tile);
      } else {
        add(head);
      }
      from.advance();
      from.release_warp(a);
      if (head.is(SumHead::kLast)) {
        store(head, tile);
        parity ^= 1;
        if (leader && head.is(SumHead::kChunkEnd)) send(head);
      }
      if (kRailRows && leader) tally.take(head);
    }
    from.release_warp(a);
    if (!leader) return;
    if (!injected(Bug::kResultsBeforeStores)) a.template bulk_wait<0>();
    if (parties && last_of(a, p.exit_counter, uint64_t(parties))) p.gate.announce_done(a);
  }

 private:
  HEP_DEVICE void add_row(const SumHead& h, unsigned char* tile) {
    const void* row = h.is(SumHead::kEmpty) ? nullptr : from.data();
    TileMath<A>::add_row(TileRow{row, tile, h.type(in), h.type(out), h.elems, h.is(SumHead::kFirst),
                                 h.is(SumHead::kLast), h.is(SumHead::kScaled), h.scale},
                         &acc[0][0]);
  }
  HEP_DEVICE void add(const SumHead& head) {
    switch (head.type(in)) {
      case DType::kBf16: return add_as<Bf16>(head);
      case DType::kFp16: return add_as<Fp16>(head);
      case DType::kFp32: return add_as<float>(head);
    }
  }
  template <class T>
  HEP_DEVICE void add_as(const SumHead& head) {
    const auto* tile = reinterpret_cast<const T*>(from.data());
    const uint32_t octets = uint32_t(div_up(head.elems, kOctet));
    HEP_UNROLL  // on a GPU acc lives in registers, which have no index
    for (int i = 0; i < kMaxOctets; ++i) {
      const uint32_t o = me + i * kWidth;
      if (o >= octets) break;
      float v[kOctet];
      if (head.is(SumHead::kEmpty))
        for (float& x : v) x = 0.f;
      else
        load_octet(a, tile + o * kOctet, head.elems - o * kOctet, v);
      if (head.is(SumHead::kScaled))
        for (float& x : v) x *= head.scale;
      for (int e = 0; e < kOctet; ++e) acc[i][e] = head.is(SumHead::kFirst) ? v[e] : acc[i][e] + v[e];
    }
  }

  // The tile's previous store has been read out: only its leader can know.
  HEP_DEVICE void await_tile() {
    if (leader && !injected(Bug::kTileOverwrittenWhileStoring)) a.template bulk_wait_read<1>();
    a.group_sync(group, kWarps);
  }
  HEP_DEVICE void store(const SumHead& head, unsigned char* tile) {
    if constexpr (!kWholeTiles) {
      await_tile();
      write(head, tile);
    }
    if (!injected(Bug::kTileUnpublished)) a.publish_shared();
    if (!injected(Bug::kTileBeforeAllWarps)) a.group_sync(group, kWarps);
    if (leader) {
      a.bulk_s2g(reinterpret_cast<unsigned char*>(head.dst), tile, head.elems * dtype_bytes(head.type(out)));
      a.bulk_commit();
    }
  }
  HEP_DEVICE void write(const SumHead& head, unsigned char* tile) {
    switch (head.type(out)) {
      case DType::kBf16: write_as<Bf16>(head, tile); break;
      case DType::kFp16: write_as<Fp16>(head, tile); break;
      case DType::kFp32: write_as<float>(head, tile); break;
    }
  }
  template <class T>
  HEP_DEVICE void write_as(const SumHead& head, unsigned char* tile) {
    const uint32_t octets = uint32_t(div_up(head.elems, kOctet));
    HEP_UNROLL  // on a GPU acc lives in registers, which have no index
    for (int i = 0; i < kMaxOctets; ++i) {
      const uint32_t o = me + i * kWidth;
      if (o >= octets) break;
      store_octet(a, reinterpret_cast<T*>(tile) + o * kOctet, head.elems - o * kOctet, acc[i]);
    }
  }
  HEP_DEVICE void send(const SumHead& head) {
    if (!injected(Bug::kSumPutBeforeStored)) a.template bulk_wait<0>();  // the slot is complete before the NIC reads it
    const uint64_t bytes = uint64_t(head.chunk_stages) * p.partial.row_bytes();
    RailSender::commit(a, net, p.rail.geometry, p.rail.peers[head.peer - 1], head.chunk, bytes);
    a.count_rank(&p.traffic->rail_rows, head.chunk_stages);
    a.count_rank(&p.traffic->rail_bytes, bytes);
  }
};

}  // namespace hep
