// Deliver: what arrived, to the caller's tensors. Behind the node's done flags, in the dispatch kernel or in one of its
// own: weights from the metadata, and rows to where they did not land themselves. On a plan's first dispatch it also
// keeps each row's record and weights, which the way back needs.
#pragma once
#include "common/bugs.h"
#include "roles/token_loader.h"

namespace hep {

template <Arch A>
struct DeliverG2SRole {
  A& a;
  const DispatchParams& p;
  StageProducer<A, TokenHead> to;

  HEP_DEVICE DeliverG2SRole(A& arch, const DispatchParams& params, const StageFifo<A, TokenHead>& fifo)
      : a(arch), p(params), to(fifo) {}

  HEP_DEVICE void run() {
    const uint32_t tiles = num_tiles(p.message, p.tile_bytes);
    const unsigned char* recv = p.peers.recv[p.world.local_rank()];
    const bool reads_metadata = p.plan.fresh || p.out_weights;
    const uint32_t rows = reads_metadata || p.copies ? p.plan.numbers->recv_rows : 0;
    TokenHead head{};
    for (uint32_t i = a.block_idx(); i < rows; i += a.num_blocks()) {
      const unsigned char* metadata = recv + uint64_t(i) * p.message.metadata_bytes();
      head.index = i, head.tile = 0;
      const int64_t landed = p.copies ? row_to_copy(metadata, i) : -1;
      head.bare = landed < 0;
      if (landed < 0) {
        if (reads_metadata) load_metadata(a, to, p.message, metadata, head);
        continue;
      }
      const TokenSource src{metadata, p.message.weight_bytes ? metadata + p.message.weights_at() : nullptr,
                            p.message.scale_bytes ? recv + p.landing.scales + landed * p.message.scale_bytes : nullptr,
                            recv + p.landing.x + landed * p.message.row_bytes};
      for (; head.tile < tiles; ++head.tile) load_tile(a, to, p.message, p.tile_bytes, src, head);
    }
    head.stop = 1;
    to.stop(a, head, 1);
  }

 private:
  // Where the token of receive row i landed, if it has to be copied from there; else -1.
  HEP_DEVICE int64_t row_to_copy(const unsigned char* metadata, uint32_t i) {
    if (p.landing.in == LandIn::kReceiveRow) return i;
    const auto rec = std::bit_cast<RecordHeader>(a.ld_global(reinterpret_cast<const Vec16*>(metadata)));
    const auto* pairs = reinterpret_cast<const uint64_t*>(metadata + p.message.pairs_at());
    int64_t first = -1;
    for (uint32_t k = 0; k < rec.num_pairs; ++k) {
      const PairEntry e = std::bit_cast<PairEntry>(a.ld_global(pairs + k));
      if (!p.plan.has_row(e)) continue;
      if (first >= 0) return first;  // there is another
      first = e.row;
    }
    return -1;
  }
};

template <Arch A>
struct DeliverS2GRole {
  A& a;
  const DispatchParams& p;
  StageConsumer<A, TokenHead> from;
  uint64_t copied_rows = 0;

  HEP_DEVICE DeliverS2GRole(A& arch, const DispatchParams& params, const StageFifo<A, TokenHead>& fifo)
      : a(arch), p(params), from(fifo, 0, 1) {}

  HEP_DEVICE void run() {
    a.set_role("deliver_s2g");
    for (;;) {
      const TokenHead head = from.wait(a);
      if (head.stop) break;
      if (head.tile == 0 && p.plan.fresh) keep_metadata(head.index);
      p.permute ? permute(head) : copy(head);
      a.bulk_commit();
      from.advance();
      if (!injected(Bug::kDeliverStageBackEarly)) a.template bulk_wait_read<0>();
      from.release(a);
    }
    from.release(a);
    a.template bulk_wait<0>();
    if (!copied_rows) return;
    a.count_rank(&p.traffic->copied_rows, copied_rows);
    a.count_rank(&p.traffic->copied_bytes, copied_rows * (p.message.row_bytes + p.message.scale_bytes));
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
  HEP_DEVICE void keep_metadata(uint32_t row) {
    a.bulk_s2g(p.plan.row_records + uint64_t(row) * p.message.record_bytes, from.data(), p.message.record_bytes);
    if (p.weights)
      a.bulk_s2g(p.plan.row_weights + uint64_t(row) * p.plan.weight_stride, from.data() + p.message.weights_at(),
                 p.message.weight_bytes);
  }
  // Tile of one token to row `row` of the caller's tensors.
  HEP_DEVICE void store(const TokenHead& head, uint64_t row) {
    const TileShape t = tile_shape(p.message, p.tile_bytes, head.tile);
    a.bulk_s2g(p.out_x + row * p.message.row_bytes + t.begin, from.data() + p.message.payload_at(), t.bytes);
    if (head.tile != 0) return;
    ++copied_rows;
    if (p.message.scale_bytes)
      a.bulk_s2g(p.out_scales + row * p.message.scale_bytes, from.data() + p.message.scales_at(),
                 p.message.scale_bytes);
  }
  HEP_DEVICE void permute(const TokenHead& head) {
    const RecordHeader rec = record();
    const bool in_first = p.landing.in == LandIn::kFirstPair;
    bool lies_there = in_first;  // in the next row that is found
    for (uint32_t i = 0; i < rec.num_pairs; ++i) {
      const PairEntry e = pair(i);
      if (!p.plan.has_row(e)) continue;
      const bool forgotten = injected(Bug::kDuplicateForgotten) && in_first && i + 1 == rec.num_pairs;
      if (!head.bare && !lies_there && !forgotten) store(head, uint64_t(e.row));
      lies_there = false;
      if (head.tile == 0 && p.out_weights) a.st_global(p.out_weights + e.row, weight(rec, i));
    }
  }
  HEP_DEVICE void copy(const TokenHead& head) {
    if (!head.bare) store(head, head.index);
    if (head.tile != 0 || !p.out_weights) return;
    const RecordHeader rec = record();
    float* row = p.out_weights + uint64_t(head.index) * p.num_node_experts;
    for (uint32_t e = 0; e < p.num_node_experts; ++e) a.st_global(row + e, 0.f);
    for (uint32_t i = 0; i < rec.num_pairs; ++i)
      a.st_global(row + (uint32_t(pair(i).expert) - p.first_node_expert), weight(rec, i));
  }
};

}  // namespace hep
