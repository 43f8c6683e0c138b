// Deliver: receive rows to the caller's tensors, either as they are (ascending source rank, token) or permuted
// expert-major. Runs behind the node's done flags, in the dispatch kernel or in one of its own. On a plan's first
// dispatch it also keeps each row's record and weights, which the way back needs.
#pragma once
#include "common/bugs.h"
#include "roles/token_loader.h"

namespace hep {

template <Arch A>
struct DeliverG2SRole {
  HEP_DEVICE static void run(A& a, const DispatchParams& p, const StageFifo<A, TokenHead>& fifo) {
    StageProducer<A, TokenHead> to(fifo);
    const uint32_t tiles = num_tiles(p.message, p.tile_bytes);
    const unsigned char* recv = p.peers.recv[p.world.local_rank()];
    TokenHead head{};
    for (uint32_t i = a.block_idx(); i < p.plan.numbers->recv_rows; i += a.num_blocks()) {
      head.index = i;
      const auto src = TokenSource::contiguous(p.message, recv + uint64_t(i) * p.message.token_bytes());
      for (head.tile = 0; head.tile < tiles; ++head.tile) load_tile(a, to, p.message, p.tile_bytes, src, head);
    }
    head.stop = 1;
    to.stop(a, head, 1);
  }
};

template <Arch A>
struct DeliverS2GRole {
  A& a;
  const DispatchParams& p;
  StageConsumer<A, TokenHead> from;

  HEP_DEVICE DeliverS2GRole(A& arch, const DispatchParams& params, const StageFifo<A, TokenHead>& fifo)
      : a(arch), p(params), from(fifo, 0, 1) {}

  HEP_DEVICE void run() {
    a.set_role("deliver_s2g");
    for (;;) {
      const TokenHead head = from.wait(a);
      if (head.stop) break;
      if (head.tile == 0 && p.plan.fresh) keep_facts(head.index);
      p.permute ? permute(head) : copy(head);
      a.bulk_commit();
      from.advance();
      if (!injected(Bug::kDeliverStageBackEarly)) a.template bulk_wait_read<0>();
      from.release(a);
    }
    from.release(a);
    a.template bulk_wait<0>();
  }

 private:
  HEP_DEVICE RecordHeader record() {
    return std::bit_cast<RecordHeader>(a.ld_shared(reinterpret_cast<const Vec16*>(from.data())));
  }
  HEP_DEVICE PairEntry pair(uint32_t i) {
    return std::bit_cast<PairEntry>(
        a.ld_shared(reinterpret_cast<const uint64_t*>(from.data() + p.message.pairs_at()) + i));
  }
  HEP_DEVICE float weight(const RecordHeader& rec, uint32_t i) {
    return a.ld_shared(reinterpret_cast<const float*>(from.data() + p.message.weights_at()) + rec.first_pair + i);
  }
  HEP_DEVICE void keep_facts(uint32_t row) {
    a.bulk_s2g(p.plan.row_records + uint64_t(row) * p.message.record_bytes, from.data(), p.message.record_bytes);
    if (p.weights)
      a.bulk_s2g(p.plan.row_weights + uint64_t(row) * p.plan.weight_stride, from.data() + p.message.weights_at(),
                 p.message.weight_bytes);
  }
  // Tile of one token to row `row` of the caller's tensors.
  HEP_DEVICE void store(const TokenHead& head, uint64_t row) {
    const TileShape t = tile_shape(p.message, p.tile_bytes, head.tile);
    a.bulk_s2g(p.out_x + row * p.message.row_bytes + t.begin, from.data() + p.message.payload_at(), t.bytes);
    if (head.tile == 0 && p.message.scale_bytes)
      a.bulk_s2g(p.out_scales + row * p.message.scale_bytes, from.data() + p.message.scales_at(),
                 p.message.scale_bytes);
  }
  HEP_DEVICE void permute(const TokenHead& head) {
    const RecordHeader rec = record();
    for (uint32_t i = 0; i < rec.num_pairs; ++i) {
      const PairEntry e = pair(i);
      if (uint32_t(e.expert) - p.plan.first_expert >= p.plan.num_local_experts || e.row < 0) continue;
      store(head, uint64_t(e.row));
      if (head.tile == 0 && p.out_weights) a.st_global(p.out_weights + e.row, weight(rec, i));
    }
  }
  HEP_DEVICE void copy(const TokenHead& head) {
    store(head, head.index);
    if (head.tile != 0 || !p.out_weights) return;
    const RecordHeader rec = record();
    float* row = p.out_weights + uint64_t(head.index) * p.num_node_experts;
    for (uint32_t e = 0; e < p.num_node_experts; ++e) a.st_global(row + e, 0.f);
    for (uint32_t i = 0; i < rec.num_pairs; ++i)
      a.st_global(row + (uint32_t(pair(i).expert) - p.first_node_expert), weight(rec, i));
  }
};

// Permuted rows that hold no token (padding of an expert's group, the tail of a static budget) become zero.
template <Arch A>
struct ZeroRowsRole {
  HEP_DEVICE static void run(A& a, const DispatchParams& p) {
    a.set_role("zero_rows");
    if (!p.permute || injected(Bug::kPaddingNotCleared)) return;
    for (uint32_t r = 0; r <= p.plan.num_local_experts; ++r) {
      const bool tail = r == p.plan.num_local_experts;  // behind the last group, up to the result's end
      const uint64_t begin = tail ? p.plan.numbers->permuted_rows : p.plan.zero_ranges[2 * r];
      const uint64_t end = tail ? p.out_rows : p.plan.zero_ranges[2 * r + 1];
      for (uint64_t row = begin + a.block_idx(); row < end; row += a.num_blocks()) {
        zero(a, p.out_x + row * p.message.row_bytes, p.message.row_bytes);
        if (p.message.scale_bytes) zero(a, p.out_scales + row * p.message.scale_bytes, p.message.scale_bytes);
        if (p.out_weights && a.lane() == 0) a.st_global(p.out_weights + row, 0.f);
      }
    }
  }

 private:
  HEP_DEVICE static void zero(A& a, unsigned char* dst, uint32_t bytes) {
    auto* v = reinterpret_cast<Vec16*>(dst);
    for (uint32_t i = a.lane(); i < bytes / sizeof(Vec16); i += A::kLanes) a.st_global(v + i, Vec16{});
  }
};

}  // namespace hep
