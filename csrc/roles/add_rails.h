// An owner's end of the channels of gradients: sums of other nodes' clones, out of the rings of its node's ranks, to
// its own gradient, chunk by chunk, of each from the node behind its own on. So an element's sums are added in this
// order, and all nodes send at once; an element belongs to one lane for all of them. By all lanes of a warp.
#pragma once
#include "roles/rail_channels.h"
#include "roles/vector_sum.h"

namespace hep {

template <Arch A>
class AddRailsRole {
 public:
  using C = SpareChannels;

  HEP_DEVICE AddRailsRole(A& arch, const SpareRailParams& params, const RailTable<A>& table,
                          const RailChannels<A>& channels)
      : a(arch), p(params), table_(table), channels_(channels) {}

  HEP_DEVICE void run() {
    for (int j = int(channels_.worker()); j < p.world.num_local_ranks; j += int(channels_.workers()))
      if (!stripe(j)) return;
  }

 private:
  static constexpr int kVectors = A::kLanes < 32 ? 1 : 4;  // that a lane reads together

  // False: a lane has left in its wait.
  HEP_DEVICE bool stripe(int j) {
    if (a.elect_one()) each_node([&](int node) { channels_.begin_own(table_, C::kGradients, p.channel(node, j)); });
    const SpareStripe stripe(p, j, C::kGradients);
    for (uint32_t owned = 0; owned < p.node.num_owners; ++owned)
      for (uint32_t i = 0; i < stripe.chunks(); ++i)
        for (int step = 1; step < p.world.num_nodes; ++step)
          if (!chunk((p.world.node() + step) % p.world.num_nodes, j, owned, stripe, i)) return false;
    if (!a.warp_whole()) return false;
    if (a.elect_one())
      each_node([&](int node) {
        const uint32_t c = p.channel(node, j);
        *p.count(C::kGradients, C::kLast, c) += channels_.get(c).total;
      });
    return true;
  }
  template <class Do>
  HEP_DEVICE void each_node(const Do& todo) const {
    for (int step = 1; step < p.world.num_nodes; ++step) todo((p.world.node() + step) % p.world.num_nodes);
  }
  HEP_DEVICE bool chunk(int node, int j, uint32_t owned, const SpareStripe& stripe, uint32_t i) {
    const uint32_t c = p.channel(node, j);
    if (!a.warp_whole()) return false;  // the cursor, which one lane sets, is read by all
    ChannelCursor at = channels_.get(c);
    if (at.slot < 0 || table_[at.slot].column != p.world.rank * p.node.width() + int(owned)) return true;
    const uint64_t q = *p.count(C::kGradients, C::kLast, c) + at.done;
    if (!await(node, j, q)) return false;
    if (injected(Bug::kChunkCreditedUnread) && i + 1 < stripe.chunks()) give_back(node, j, q + 1);
    add(node, j, owned, stripe.chunk(i), q);
    give_back(node, j, q);
    if (++at.done % stripe.chunks() == 0) at.slot = table_.lead(p.world.rank, node, at.slot);
    if (a.elect_one()) channels_.set(c, at);
    return true;
  }
  HEP_DEVICE bool await(int node, int j, uint64_t q) {
    if (a.elect_one() && !injected(Bug::kSumUnawaited))
      a.wait_ge_sys(p.own_flag(p.channels.flag(C::kGradients, p.channel(node, j), C::kNodeFull)), q + 1,
                    {Site::kCloneGradients, p.world.rank_of(p.world.node(), j), int64_t(q)});
    return a.warp_whole();
  }
  HEP_DEVICE void give_back(int node, int j, uint64_t q) {
    a.warp_sync();  // what all lanes have read, one gives back
    const uint32_t there = p.channel(node, p.world.local_rank());
    if (a.elect_one()) a.st_release_sys(p.flag(j, p.channels.flag(C::kGradients, there, C::kNodeFree)), q + 1);
  }
  HEP_DEVICE void add(int node, int j, uint32_t owned, const SpareStripe::Chunk& chunk, uint64_t q) {
    const uint32_t there = p.channel(node, p.world.local_rank());
    const auto* const from = reinterpret_cast<const Vec16*>(p.ring(j, C::kGradients, C::kBehind, there, q));
    const uint64_t to = a.ld_global(p.node.experts + uint64_t(owned) * p.node.num_matrices + chunk.matrix);
    const bool whole = to % sizeof(Vec16) == 0;
    for (uint32_t i = chunk.begin + uint32_t(a.lane()); i < chunk.end; i += A::kLanes * kVectors) {
      Vec16 v[kVectors];
      HEP_UNROLL
      for (int w = 0; w < kVectors; ++w)
        if (const uint32_t at = i + uint32_t(w) * A::kLanes; at < chunk.end)
          v[w] = a.ld_global(from + (at - chunk.begin));
      HEP_UNROLL
      for (int w = 0; w < kVectors; ++w)
        if (const uint32_t at = i + uint32_t(w) * A::kLanes; at < chunk.end)
          add_to_sum(a, reinterpret_cast<float*>(to) + uint64_t(at) * 4, v[w], whole);
    }
  }

  A& a;
  const SpareRailParams& p;
  const RailTable<A>& table_;
  const RailChannels<A>& channels_;
};

}  // namespace hep
