// S2G of deliver: what arrived, to the caller's tensors: weights from the metadata, and rows to where they did not land
// themselves. On a plan's first dispatch it also keeps each row's record and weights, which the way back needs.
#pragma once
#include "common/bugs.h"
#include "roles/token_loader.h"

namespace hep {

template <Arch A>
struct DeliverS2GRole {
  A& a;
  const DispatchParams& p;
  StageConsumer<A, TokenHead> from;
  uint64_t copied_rows = 0;

  HEP_DEVICE DeliverS2GRole(A& arch, const DispatchParams& params, const StageFifo<A, TokenHead>& fifo)
      : a(arch), p(params), from(fifo, 0, 1) {}

  HEP_DEVICE void run() {
    a.set_role(Role::kDeliverS2g);
    const bool keeps = from.fifo.num_stages >= kManyStages;
    bool held = false;  // a stage whose stores may still read it
    for (;; held = keeps) {
      const TokenHead head = from.wait(a);
      if (head.stop) break;
      if (head.tile == 0 && p.plan.fresh) keep_metadata(head.index);
      p.permute ? permute(head) : copy(head);
      a.bulk_commit();
      a.did(LoopStep::kDeliverStore);
      from.advance();
      if (!keeps)
        give_back<0>();
      else if (held)
        give_back<1>();
    }
    if (held) give_back<0>();
    from.release(a);
    a.template bulk_wait<0>();
    if (!copied_rows) return;
    a.count_rank(&p.traffic->copied_rows, copied_rows);
    a.count_rank(&p.traffic->copied_bytes, copied_rows * (p.message.row_bytes + p.message.scale_bytes));
  }

 private:
  // The oldest stage, once at most so many groups of stores behind it may still read theirs.
  template <int kLater>
  HEP_DEVICE void give_back() {
    if (!injected(Bug::kDeliverStageBackEarly)) a.template bulk_wait_read<kLater>();
    from.release(a);
  }
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
