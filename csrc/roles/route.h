// Routing of this rank's own tokens: lists of (expert, weight) pairs, counts, and every pair's position among them.
// Tokens are cut into runs, in order, one for each warp that counts ("walker") of each block. A walker counts its run
// by columns, one for each rank, node and expert, and notes how many of a column came before. Where its own begin is
// known when all have counted: behind the walkers before. So no row depends on the number of blocks or warps.
#pragma once
#include "common/bugs.h"
#include "layout/headers.h"
#include "roles/exchange_share.h"
#include "roles/pair_lists.h"

namespace hep {

template <Arch A>
struct RouteRole {
  // Steps of a walk, and blocks, whose loads are made together: one after another they would be most of the time.
  static constexpr uint32_t kAhead = A::kLanes < 32 ? 1 : 4, kBlocksAhead = A::kLanes < 32 ? 1 : 8;

  const ExchangeParams& p;
  A& a;
  const ExchangeSmem smem;
  uint32_t* const words;
  const TokenShare share;
  const uint32_t width, me;  // lanes over all warps of the block

  HEP_DEVICE RouteRole(A& arch, const ExchangeParams& params, std::byte* shared)
      : p(params),
        a(arch),
        smem{params.layout, params.walkers},
        words(reinterpret_cast<uint32_t*>(shared)),
        share(TokenShare::of(arch, params)),
        width(uint32_t(arch.num_warps() * A::kLanes)),
        me(uint32_t(arch.warp_idx() * A::kLanes + arch.lane())) {}
  // Lists and counts of this block's tokens; the columns' sums are in block_counts when all lanes have returned.
  HEP_DEVICE void count() {
    const PairLists<A> lists{a, p};
    for (uint32_t i = me; i < share.count; i += width) lists.make(share.begin + i);
    const uint64_t nodes = uint64_t(share.count) * p.layout.num_nodes;
    for (uint64_t i = me; i < nodes; i += width) p.node_pos[uint64_t(share.begin) * p.layout.num_nodes + i] = -1;
    for (uint32_t i = me; i < p.walkers * smem.columns(); i += width) a.st_shared(words + i, 0);
    a.block_sync();
    walk();
    a.block_sync();
    for (uint32_t c = me; c < smem.columns(); c += width) {
      uint32_t sum = 0;
      for (uint32_t w = 0; w < p.walkers; ++w) {
        uint32_t* counter = words + smem.of_walker(w) + c;
        const uint32_t n = a.ld_shared(counter);
        a.st_shared(counter, injected(Bug::kWarpsBeforeForgotten) ? 0 : sum);
        sum += n;
      }
      p.block_counts[uint64_t(a.block_idx()) * smem.columns() + c] = sum;
    }
  }
  // Behind the meeting of all blocks: where this block's walkers begin; the last block's end is the count vector. The
  // block must meet before either is read.
  HEP_DEVICE void begin_behind_other_blocks() {
    const bool last = uint32_t(a.block_idx()) == p.blocks - 1;
    auto* vector = reinterpret_cast<uint32_t*>(p.counts + p.parity_bytes() + p.world.rank * p.layout.vector_bytes());
    for (uint32_t w = me; last && w < uint32_t(kCountHeaderWords); w += width)
      a.st_global(vector + w,
                  p.header[w] | (p.notification && w == uint32_t(kHeaderTopk) ? header_excess(p.progress->excess) : 0));
    for (uint32_t c = me; c < smem.columns(); c += width) {
      const uint32_t before = injected(Bug::kBlocksBeforeForgotten) ? 0 : counted_before(c);
      for (uint32_t w = 0; before && w < p.walkers; ++w) {
        uint32_t* begin = words + smem.of_walker(w) + c;
        a.st_shared(begin, a.ld_shared(begin) + before);
      }
      if (last)
        a.st_global(vector + kCountHeaderWords + c,
                    before + p.block_counts[uint64_t(a.block_idx()) * smem.columns() + c]);
    }
  }

 private:
  HEP_DEVICE uint32_t counted_before(uint32_t column) {
    const uint32_t blocks = uint32_t(a.block_idx()), *counts = p.block_counts + column;
    uint32_t sum = 0;
    for (uint32_t b = 0; b < blocks; b += kBlocksAhead) {
      uint32_t n[kBlocksAhead];
      HEP_UNROLL
      for (uint32_t i = 0; i < kBlocksAhead; ++i) n[i] = counts[uint64_t(b + i < blocks ? b + i : b) * smem.columns()];
      HEP_UNROLL
      for (uint32_t i = 0; i < kBlocksAhead; ++i) sum += b + i < blocks ? n[i] : 0;
    }
    return sum;
  }
  // The walk of a warp over its run in order. A step takes the pairs of several tokens, a lane each, which count in
  // turn. Experts of a token differ, so lanes never meet in a column.
  HEP_DEVICE void walk() {
    const uint32_t warp = uint32_t(a.warp_idx()), lane = uint32_t(a.lane()), skip = warp * p.run_tokens;
    if (warp >= p.walkers || skip >= share.count) return;
    const uint32_t begin = share.begin + skip, left = share.count - skip;
    const uint32_t end = begin + (left < p.run_tokens ? left : p.run_tokens);
    const uint32_t turn = p.by_token_lanes.quotient(lane), first_k = lane - turn * p.lanes_of_token;
    uint32_t t = begin, k = first_k;
    while (t < end) {
      Pair pairs[kAhead];
      HEP_UNROLL
      for (uint32_t i = 0; i < kAhead; ++i) {
        pairs[i] = load(t + turn, k, turn < p.step_tokens && t + turn < end && k < p.topk, begin);
        k += p.lanes_of_token;
        if (k - first_k < p.topk) continue;
        k = first_k;
        t += p.step_tokens;
      }
      HEP_UNROLL
      for (uint32_t i = 0; i < kAhead; ++i) take_turns(pairs[i], turn);
    }
  }
  struct Pair {
    uint32_t t;
    bool first, there;  // of its token; a lane may have none
    uint64_t cell;
    int32_t expert, before;  // the token's pair before it
  };
  // Loads without a branch: the run's first pair where the lane has none.
  HEP_DEVICE Pair load(uint32_t t, uint32_t k, bool there, uint32_t begin) {
    const uint64_t cell = there ? uint64_t(t) * p.topk + k : uint64_t(begin) * p.topk;
    const bool first = !there || k == 0;
    return {t, first, there, cell, p.pair_expert[cell], p.pair_expert[cell - !first]};
  }
  HEP_DEVICE void take_turns(const Pair& pair, uint32_t turn) {
    const bool there = pair.there && pair.expert >= 0;
    const uint32_t rank = there ? p.place.by_rank.quotient(uint32_t(pair.expert)) : 0,
                   node = there ? p.place.by_node.quotient(uint32_t(pair.expert)) : 0;
    const uint32_t of_rank = p.place.experts_of_rank, of_node = p.place.experts_of_node;
    const bool new_rank = there && (pair.first || pair.before < int32_t(rank * of_rank)),
               new_node = there && (pair.first || pair.before < int32_t(node * of_node));
    uint32_t* const counters = words + smem.of_walker(uint32_t(a.warp_idx()));
    uint32_t* const of_expert = counters + smem.experts_at() + (there ? pair.expert : 0);
    uint32_t in_expert = 0, in_rank = 0, in_node = 0;
    HEP_NO_UNROLL
    for (uint32_t i = 0; i < p.step_tokens; ++i) {
      if (there && turn == i) {
        in_expert = a.ld_shared(of_expert);
        if (new_rank) in_rank = a.ld_shared(counters + rank);
        if (new_node) in_node = a.ld_shared(counters + smem.nodes_at() + node);
        a.st_shared(of_expert, in_expert + 1);
        if (new_rank) a.st_shared(counters + rank, in_rank + 1);
        if (new_node) a.st_shared(counters + smem.nodes_at() + node, in_node + 1);
      }
      if (!injected(Bug::kPairsCountedUnordered)) a.warp_sync();
    }
    if (there) p.pair_pos[pair.cell] = in_expert;
    if (new_rank) p.row_pos[pair.cell] = in_rank;
    if (new_node) p.node_pos[uint64_t(pair.t) * p.layout.num_nodes + node] = int32_t(in_node);
  }
};

}  // namespace hep
