// An owner's end of the channels of gradients: sums of other nodes' clones, out of the rings of its node's ranks, to
// its own gradient. Experts follow one another; of one, the grid's warps take a chunk each, of all rails in turn, and
// add what each node sends of it, from the node behind the owner's on. So an element's sums are added in this order, by
// one lane. When all are added, the blocks that serve the node add its own clones (add_gradients.h). Warps wait, but
// not for each other in a ring: all take chunks in one order, which is that of every channel, so that the first of all
// that are not added yet has its place in the ring, and a warp that waits for it (as all of a grid's blocks run at
// once). By all lanes of a warp.
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
      : a(arch), p(params), table_(table), channels_(channels), elected_(arch.elect_one()) {}

  // False: a lane has left in its wait.
  HEP_DEVICE bool run() {
    const uint32_t rails = uint32_t(p.world.num_local_ranks), most = SpareStripe(p, 0, C::kGradients).chunks();
    if (elected_)
      for (int n = 1; n < p.world.num_nodes; ++n) set(n, {0, 0, 0, table_.lead(p.world.rank, node(n), -1)});
    for (uint32_t owned = 0; owned < p.node.num_owners; ++owned) {
      if (!a.warp_whole()) return false;  // what one lane has set, all read
      if (!has_clones(owned)) continue;
      for (uint32_t i = channels_.worker().number; i < most * rails; i += channels_.worker().of)
        if (!chunk(owned, int(i % rails), i / rails)) return false;
      if (!a.warp_whole()) return false;
      if (elected_) pass(owned);
    }
    if (elected_ && channels_.end()) a.add_acq_rel_rank(&p.node.progress->of_nodes, 1);
    return true;
  }

 private:
  static constexpr int kVectors = A::kLanes < 32 ? 1 : 8;  // that a lane reads together

  // Cursors are by the distance of the node: how many experts went before, and the slot that leads with the next.
  HEP_DEVICE int node(int behind) const { return (p.world.node() + behind) % p.world.num_nodes; }
  HEP_DEVICE void set(int behind, const ChannelCursor& at) const { channels_.set(uint32_t(behind - 1), at); }
  HEP_DEVICE ChannelCursor get(int behind) const { return channels_.get(uint32_t(behind - 1)); }
  HEP_DEVICE bool is_at(const ChannelCursor& at, uint32_t owned) const {
    return at.at >= 0 && table_[at.at].column == p.world.rank * p.node.width() + int(owned);
  }
  HEP_DEVICE bool has_clones(uint32_t owned) const {
    bool any = false;
    for (int n = 1; n < p.world.num_nodes; ++n) any = any || is_at(get(n), owned);
    return any;
  }
  HEP_DEVICE void pass(uint32_t owned) const {
    for (int n = 1; n < p.world.num_nodes; ++n)
      if (const ChannelCursor at = get(n); is_at(at, owned))
        set(n, {0, at.done + 1, 0, table_.lead(p.world.rank, node(n), at.at)});
  }

  // Chunk i of stripe j. False: a lane has left in its wait.
  HEP_DEVICE bool chunk(uint32_t owned, int j, uint32_t i) {
    const SpareStripe stripe(p, j, C::kGradients);
    if (i >= stripe.chunks()) return true;
    for (int n = 1; n < p.world.num_nodes; ++n) {
      const ChannelCursor at = get(n);
      if (!is_at(at, owned)) continue;
      const uint64_t q = channels_.facts(p.channel(node(n), j)).before + at.done * stripe.chunks() + i;
      if (!await(node(n), j, q)) return false;
      if (injected(Bug::kChunkCreditedUnread) && i + 1 < stripe.chunks()) give_back(node(n), j, q + 1);
      add(node(n), j, owned, stripe.chunk(i), q);
      give_back(node(n), j, q);
    }
    return true;
  }
  HEP_DEVICE bool await(int node, int j, uint64_t q) {
    if (elected_ && !injected(Bug::kSumUnawaited))
      a.wait_ge_sys(p.own_flag(p.channels.flag(C::kGradients, p.channel(node, j), C::kNodeFull, q)), q + 1,
                    {Site::kCloneGradients, p.world.rank_of(p.world.node(), j), int64_t(q)});
    return a.warp_whole();
  }
  HEP_DEVICE void give_back(int node, int j, uint64_t q) {
    a.warp_sync();  // what all lanes have read, one gives back
    const uint32_t there = p.channel(node, p.world.local_rank());
    if (elected_) a.st_release_sys(p.flag(j, p.channels.flag(C::kGradients, there, C::kNodeFree, q)), q + 1);
  }
  HEP_DEVICE void add(int node, int j, uint32_t owned, const SpareStripe::Chunk& chunk, uint64_t q) {
    const uint32_t there = p.channel(node, p.world.local_rank());
    const auto* const from = reinterpret_cast<const Vec16*>(p.ring(j, C::kGradients, C::kBehind, there, q));
    const uint64_t address = a.ld_global(p.node.experts + uint64_t(owned) * p.node.num_matrices + chunk.matrix);
    auto* const to = reinterpret_cast<float*>(address);
    const bool whole = address % sizeof(Vec16) == 0;
    for (uint32_t i = chunk.begin + uint32_t(a.lane()); i < chunk.end; i += A::kLanes * kVectors) {
      Vec16 v[kVectors];
      const auto at = [&](int w) { return i + uint32_t(w) * A::kLanes; };
      HEP_UNROLL
      for (int w = 0; w < kVectors; ++w) v[w] = a.ld_global(from + ((at(w) < chunk.end ? at(w) : i) - chunk.begin));
      const auto sum = [&](int w) { return at(w) < chunk.end ? to + uint64_t(at(w)) * 4 : nullptr; };
      add_to_sums(a, v, sum, whole);
    }
  }

  A& a;
  const SpareRailParams& p;
  const RailTable<A>& table_;
  const RailChannels<A>& channels_;
  const bool elected_;
};

}  // namespace hep
