// Tokens of a latency dispatch, as their senders see them: what a message says of its pairs, and where it goes. What it
// says is of one node. Of a dispatch that routes, a row's place in the result is not known yet: a pair has its position
// among those of its source for the expert, and a slot is the token's position among those of its source for the rank.
// Of a plan, the record is complete, and a slot the token's number, which receivers have in theirs.
#pragma once
#include <bit>

#include "common/bugs.h"
#include "roles/exchange_share.h"
#include "roles/latency_params.h"

namespace hep {

// A token that this block has counted, for one node at a time: that of its pairs from `first` on. kNodes: there is more
// than one.
template <Arch A, bool kNodes>
struct CountedToken {
  A& a;
  const LatencyDispatchParams& p;
  const ExchangeSmem smem;
  const uint32_t t;
  const uint32_t* begins;  // of the walker that counted it
  uint32_t all_pairs = 0, first = 0, num_pairs = 0, num_dsts = 0;
  uint32_t node = 0;

  HEP_DEVICE CountedToken(A& arch, const LatencyDispatchParams& params, const ExchangeSmem& shared, uint32_t token,
                          const uint32_t* walker)
      : a(arch), p(params), smem(shared), t(token), begins(walker) {
    while (all_pairs < p.route.topk && expert(all_pairs) >= 0) ++all_pairs;
    begin_node();
  }
  HEP_DEVICE bool has_node() const { return first < all_pairs; }
  HEP_DEVICE void next_node() {
    first += num_pairs;
    begin_node();
  }
  // Among this rank's tokens for the node.
  HEP_DEVICE uint32_t position() const {
    return uint32_t(p.route.node_pos[uint64_t(t) * p.route.layout.num_nodes + node]) +
           a.ld_shared(begins + smem.nodes_at() + node);
  }
  // with_dsts: for a rank that hands it on.
  HEP_DEVICE uint64_t record_word(uint32_t m, bool with_dsts) const {
    if (m == 0) return uint64_t(begin()) << 32 | uint64_t(num_pairs) << 16 | (with_dsts ? num_dsts : 0);
    if (m == 1) return uint64_t(t) << 32 | uint32_t(p.world.rank);
    if constexpr (kNodes)
      if (with_dsts && m < p.message.pairs_at() / 8) return dst_word(m - MessageLayout::dsts_at() / 8);
    const uint32_t k = m - p.message.pairs_at() / 8;  // of the words before: a very large number
    if (k >= num_pairs) return 0;
    const uint32_t e = uint32_t(expert(begin() + k));
    const uint32_t position = p.route.pair_pos[cell(begin() + k)] + a.ld_shared(begins + smem.experts_at() + e);
    return uint64_t(position) << 32 | e;
  }
  // f(local rank, slot) for each of the node's ranks that it goes to.
  template <class F>
  HEP_DEVICE void each_dst(F&& f) const {
    uint32_t rank = ~0u;
    const uint32_t before = kNodes ? node * uint32_t(p.world.num_local_ranks) : 0;
    for (uint32_t k = begin(); k < begin() + num_pairs; ++k) {
      const uint32_t to = p.route.place.by_rank.quotient(uint32_t(expert(k)));
      if (to == rank) continue;
      rank = to;
      f(rank - before, a.ld_shared(begins + rank) + p.route.row_pos[cell(k)]);
    }
  }

 private:
  HEP_DEVICE uint32_t begin() const { return kNodes ? first : 0; }
  HEP_DEVICE uint64_t cell(uint32_t k) const { return uint64_t(t) * p.route.topk + k; }
  HEP_DEVICE int32_t expert(uint32_t k) const { return p.route.pair_expert[cell(k)]; }
  HEP_DEVICE void begin_node() {
    num_pairs = num_dsts = 0;
    if constexpr (!kNodes) {
      num_pairs = all_pairs;
      return;
    }
    if (!has_node()) return;
    node = p.route.place.by_node.quotient(uint32_t(expert(first)));
    const uint32_t end = (node + 1) * p.route.place.experts_of_node;
    while (first + num_pairs < all_pairs && uint32_t(expert(first + num_pairs)) < end) ++num_pairs;
    each_dst([&](uint32_t, uint32_t) { ++num_dsts; });
  }
  HEP_DEVICE uint64_t dst_word(uint32_t d) const {
    uint64_t word = 0;
    each_dst([&](uint32_t local, uint32_t slot) { word = d-- == 0 ? uint64_t(slot) << 32 | local : word; });
    return word;
  }
};

// The `position`-th token of a complete plan for a node.
struct RecordedToken {
  const uint64_t* record;
  uint32_t t, node, index;

  HEP_DEVICE static RecordedToken of(const LatencyDispatchParams& p, uint32_t node, uint32_t index) {
    const auto* record =
        reinterpret_cast<const uint64_t*>(p.plan.records[node] + uint64_t(index) * p.message.record_bytes);
    return {record, p.plan.node_tokens[node][index], node, index};
  }
  HEP_DEVICE uint32_t position() const { return index; }
  HEP_DEVICE uint64_t record_word(uint32_t m, bool) const { return record[m]; }
  template <class F>
  HEP_DEVICE void each_dst(F&& f) const {
    const auto* dsts = reinterpret_cast<const DstEntry*>(record + MessageLayout::dsts_at() / 8);
    const uint32_t n = std::bit_cast<RecordHeader>(*reinterpret_cast<const Vec16*>(record)).num_dsts;
    for (uint32_t i = 0; i < n; ++i) f(dsts[i].local_rank, t);
  }
};

}  // namespace hep
