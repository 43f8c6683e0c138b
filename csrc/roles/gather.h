// Gather: the loading half of a gather-sum. For every output row it walks the rows to be added in their fixed
// order, tile by tile, into stages; the reduce role adds what comes. Three programs share it: unpermute (a
// rank's experts), node sum (ranks of this node, for a rail peer), final sum (own node's ranks, then nodes).
#pragma once
#include <bit>

#include "kernels/params.h"
#include "pipeline/chunk_sweep.h"
#include "pipeline/stage_fifo.h"

namespace hep {

struct alignas(16) SumHead {
  enum : uint32_t { kStop = 1, kFirst = 2, kLast = 4, kEmpty = 8, kScaled = 16, kChunkEnd = 32, kWeights = 64 };
  uint64_t dst;           // address of the output tile
  uint32_t elems, flags;
  float scale;
  uint32_t peer;          // i + 1: the row lies in a ring slot of rail peer i
  uint32_t chunk;         // of that peer; at kChunkEnd: the chunk to send
  uint32_t chunk_stages;
};

HEP_DEVICE const PairEntry* pairs_of(const CombineParams& p, const RecordHeader* rec) {
  return reinterpret_cast<const PairEntry*>(reinterpret_cast<const unsigned char*>(rec) + p.pairs_at);
}

struct SumRow {
  const unsigned char* row;
  float scale = 1.f;
  uint32_t peer = 0, chunk = 0, chunk_stages = 0;
};

template <Arch A, Transport<A> Net>
struct GatherRole {
  A& a;
  Net& net;
  const CombineParams& p;
  StageProducer<A, SumHead> to;
  uint64_t node_rows = 0, self_rows = 0;  // partials pulled from other ranks of the node, from this one

  HEP_DEVICE GatherRole(A& arch, Net& n, const CombineParams& params, const StageFifo<A, SumHead>& fifo)
      : a(arch), net(n), p(params), to(fifo) {}

  // Experts' outputs of this rank -> one partial per receive row.
  HEP_DEVICE void unpermute() {
    a.set_role("unpermute_g2s");
    for (uint32_t i = a.block_idx(); i < p.plan.recv_rows; i += a.num_blocks()) {
      unsigned char* dst = p.recv + uint64_t(i) * p.partial.row_bytes();
      auto rows = [&](auto&& add) {
        if (!p.permuted) return add(SumRow{p.x + uint64_t(i) * in_row_bytes()});
        const auto* rec = reinterpret_cast<const RecordHeader*>(p.plan.row_records + uint64_t(i) * p.record_bytes);
        const PairEntry* pairs = pairs_of(p, rec);
        for (uint32_t k = 0; k < rec->num_pairs; ++k) {
          if (uint32_t(pairs[k].expert) - p.plan.first_expert >= p.plan.num_local_experts || pairs[k].row < 0) continue;
          const float w = p.multiply ? p.plan.row_weights[uint64_t(i) * p.plan.weight_stride + rec->first_pair + k] : 1.f;
          add(SumRow{p.x + uint64_t(pairs[k].row) * in_row_bytes(), w});
        }
      };
      emit(rows, dst, 0, p.hidden, p.dtype, p.partial_dtype, p.multiply ? uint32_t(SumHead::kScaled) : 0u, nullptr);
    }
    stop();
  }

  // Partials of this node's ranks -> one row per token of a rail peer, in slots of the send ring.
  HEP_DEVICE void node_sum(std::byte* smem) {
    a.set_role("node_sum_g2s");
    p.gate.wait_all_ready(a);
    auto peer = [&](uint32_t s) -> const RailPeer& { return p.rail.peer_behind(p.world.node(), s); };
    ChunkSweep<A>{a, reinterpret_cast<uint32_t*>(smem + p.credit_cursors_at), p.rail.num_peers}.run(
        Site::kRailSlotFree, p.rail.geometry.chunk_tokens, [&](uint32_t s) { return p.plan.rail_count[peer(s).node]; },
        [&](uint32_t s, uint32_t chunk) { return RailSender::test(a, net, p.rail.geometry, peer(s), chunk); },
        [&](uint32_t s, uint32_t chunk) { sum_chunk(peer(s), chunk); }, [&](uint32_t s) { return peer(s).rank; });
    stop();
    count_traffic();
  }

  // Own node's partials and the other nodes' sums -> the caller's rows.
  HEP_DEVICE void final_sum() {
    a.set_role("final_sum_g2s");
    p.gate.wait_all_ready(a);
    const uint32_t chunk_tokens = p.rail.geometry.chunk_tokens;
    for (uint32_t begin = a.block_idx() * chunk_tokens; begin < p.plan.num_tokens; begin += a.num_blocks() * chunk_tokens)
      for (uint32_t t = begin; t < begin + chunk_tokens && t < p.plan.num_tokens; ++t) final_token(t);
    stop();
    count_traffic();
  }

 private:
  HEP_DEVICE uint64_t in_row_bytes() const { return uint64_t(p.hidden) * dtype_bytes(p.dtype); }
  HEP_DEVICE uint32_t sum_tiles() const {
    return uint32_t(div_up(p.hidden, p.tile_elems) + div_up(p.partial.weight_bytes / 4, p.tile_elems));
  }
  HEP_DEVICE void count_rows(const unsigned char* record) {
    const auto* rec = reinterpret_cast<const RecordHeader*>(record);
    const auto* dsts = reinterpret_cast<const DstEntry*>(record + MessageLayout::dsts_at());
    for (uint32_t i = 0; i < rec->num_dsts; ++i) dsts[i].local_rank == uint32_t(p.world.local_rank()) ? ++self_rows : ++node_rows;
  }
  HEP_DEVICE void count_traffic() {
    a.add_acq_rel_rank(&p.traffic->node_rows, node_rows);
    a.add_acq_rel_rank(&p.traffic->node_bytes, node_rows * p.partial.row_bytes());
    a.add_acq_rel_rank(&p.traffic->self_rows, self_rows);
    a.add_acq_rel_rank(&p.traffic->self_bytes, self_rows * p.partial.row_bytes());
  }
  template <class F>
  HEP_DEVICE void for_each_rank(const unsigned char* record, F&& add) {
    const auto* rec = reinterpret_cast<const RecordHeader*>(record);
    const auto* dsts = reinterpret_cast<const DstEntry*>(record + MessageLayout::dsts_at());
    for (uint32_t i = 0; i < rec->num_dsts; ++i) {
      add(SumRow{p.peers.recv[dsts[i].local_rank] + uint64_t(dsts[i].row) * p.partial.row_bytes()});
    }
  }

  HEP_DEVICE void sum_chunk(const RailPeer& peer, uint32_t chunk) {
    const uint32_t begin = chunk * p.rail.geometry.chunk_tokens;
    const uint32_t n = chunk_size(p.plan.rail_count[peer.node], chunk, p.rail.geometry.chunk_tokens);
    unsigned char* slot = RailSender::slot(p.rail.geometry, peer, chunk);
    for (uint32_t i = 0; i < n; ++i) {
      const unsigned char* record = p.plan.rail_records[peer.node] + uint64_t(begin + i) * p.record_bytes;
      count_rows(record);
      const SumHead send{0, 0, SumHead::kChunkEnd, 0.f, uint32_t(&peer - p.rail.peers) + 1, chunk, n};
      emit_partial([&](auto&& add) { for_each_rank(record, add); }, slot + uint64_t(i) * p.partial.row_bytes(),
                   slot + uint64_t(i) * p.partial.row_bytes() + p.partial.weights_at(), p.partial_dtype,
                   i + 1 == n ? &send : nullptr);
    }
  }

  HEP_DEVICE void final_token(uint32_t t) {
    const int32_t* pos = p.plan.node_pos + uint64_t(t) * p.world.num_nodes;
    for (uint32_t i = 0; i < p.rail.num_peers; ++i)
      if (int32_t j = pos[p.rail.peers[i].node]; j >= 0)
        RailReceiver::wait(a, net, p.rail.geometry, p.rail.peers[i], uint32_t(j) / p.rail.geometry.chunk_tokens);
    const int32_t own_pos = pos[p.world.node()];
    const unsigned char* own = own_pos < 0 ? nullptr : p.plan.records[p.world.node()] + uint64_t(own_pos) * p.record_bytes;
    if (own) count_rows(own);
    auto rows = [&](auto&& add) {
      if (own) for_each_rank(own, add);
      for (uint32_t i = 0; i < p.rail.num_peers; ++i) {
        const RailPeer& peer = p.rail.peers[i];
        const int32_t j = pos[peer.node];
        if (j < 0) continue;
        const uint32_t chunk = uint32_t(j) / p.rail.geometry.chunk_tokens, in_chunk = uint32_t(j) % p.rail.geometry.chunk_tokens;
        const uint32_t n = chunk_size(p.plan.node_count[peer.node], chunk, p.rail.geometry.chunk_tokens);
        add(SumRow{RailReceiver::slot(p.rail.geometry, peer, chunk) + uint64_t(in_chunk) * p.partial.row_bytes(), 1.f,
                   i + 1, chunk, n * sum_tiles()});
      }
    };
    emit_partial(rows, p.out_x + uint64_t(t) * in_row_bytes(),
                 reinterpret_cast<unsigned char*>(p.out_weights + uint64_t(t) * p.plan.weight_stride), p.dtype, nullptr);
  }

  // Sums of partial rows: payload tiles, then the weights as one fp32 tile.
  template <class Rows>
  HEP_DEVICE void emit_partial(Rows&& rows, unsigned char* dst, unsigned char* dst_weights, DType out, const SumHead* send) {
    emit(rows, dst, 0, p.hidden, p.partial_dtype, out, 0, p.partial.weight_bytes ? nullptr : send);
    if (p.partial.weight_bytes)
      emit(rows, dst_weights, p.partial.weights_at(), p.partial.weight_bytes / 4, DType::kFp32, DType::kFp32, SumHead::kWeights,
           send);
  }

  template <class Rows>
  HEP_DEVICE void emit(Rows&& rows, unsigned char* dst, uint32_t src_at, uint32_t elems, DType in, DType out, uint32_t flags,
                       const SumHead* send) {
    uint32_t num_rows = 0;
    rows([&](const SumRow&) { ++num_rows; });
    for (uint32_t begin = 0; begin < elems; begin += p.tile_elems) {
      SumHead head{};
      head.dst = reinterpret_cast<uint64_t>(dst) + uint64_t(begin) * dtype_bytes(out);
      head.elems = elems - begin < p.tile_elems ? elems - begin : p.tile_elems;
      const bool last_tile = begin + head.elems == elems;
      if (num_rows == 0) {  // a token that nobody holds: zeros
        finish(head, flags | SumHead::kFirst | SumHead::kLast | SumHead::kEmpty, last_tile ? send : nullptr);
        to.acquire(a);
        to.commit(a, head, 0);
        to.advance();
        continue;
      }
      const uint32_t bytes = head.elems * dtype_bytes(in);
      uint32_t k = 0;
      rows([&](const SumRow& r) {
        head.scale = r.scale;
        head.peer = r.peer, head.chunk = r.chunk, head.chunk_stages = r.chunk_stages;
        ++k;
        const uint32_t ends = (k == 1 ? uint32_t(SumHead::kFirst) : 0u) | (k == num_rows ? uint32_t(SumHead::kLast) : 0u);
        finish(head, flags | ends, last_tile && k == num_rows ? send : nullptr);
        to.acquire(a);
        to.commit(a, head, bytes);
        to.load(a, 0, r.row + src_at + uint64_t(begin) * dtype_bytes(in), bytes);
        to.advance();
      });
    }
  }
  HEP_DEVICE static void finish(SumHead& head, uint32_t flags, const SumHead* send) {
    head.flags = flags | (send ? send->flags : 0);
    if (send) head.peer = send->peer, head.chunk = send->chunk, head.chunk_stages = send->chunk_stages;
  }
  HEP_DEVICE void stop() {
    SumHead head{};
    head.flags = SumHead::kStop;
    to.stop(a, head, 1);
  }
};

// Gradients or probabilities of the row's pairs into its partial: slot k of the token belongs to pair k of the
// token, so rows of different ranks add up without meeting.
template <Arch A>
struct PackWeightsRole {
  HEP_DEVICE static void run(A& a, const CombineParams& p) {
    a.set_role("pack_weights");
    if (!p.partial.weight_bytes) return;
    for (uint32_t i = a.block_idx() * A::kLanes + a.lane(); i < p.plan.recv_rows; i += a.num_blocks() * A::kLanes) {
      auto* slots = reinterpret_cast<float*>(p.recv + uint64_t(i) * p.partial.row_bytes() + p.partial.weights_at());
      for (uint32_t k = 0; k < p.partial.weight_bytes / 4; ++k) a.st_global(slots + k, 0.f);
      const auto* rec = reinterpret_cast<const RecordHeader*>(p.plan.row_records + uint64_t(i) * p.record_bytes);
      const PairEntry* pairs = pairs_of(p, rec);
      for (uint32_t k = 0; k < rec->num_pairs; ++k) {
        if (!p.permuted) {
          const uint64_t column = uint32_t(pairs[k].expert) - p.first_node_expert;
          a.st_global(slots + rec->first_pair + k, p.x_weights[uint64_t(i) * p.num_node_experts + column]);
        } else if (uint32_t(pairs[k].expert) - p.plan.first_expert < p.plan.num_local_experts && pairs[k].row >= 0) {
          a.st_global(slots + rec->first_pair + k, p.x_weights[pairs[k].row]);
        }
      }
    }
  }
};

}  // namespace hep
