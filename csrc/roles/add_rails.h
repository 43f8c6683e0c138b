// An owner's end of the channels of gradients: sums of other nodes' clones, out of the rings of its node's ranks, to
// its own gradient. Node after node, from the one behind its own on, so that an element's sums are added in this order;
// an element belongs to one lane for all of them. By all lanes of a warp.
#pragma once
#include "roles/rail_channels.h"
#include "roles/vector_sum.h"

namespace hep {

template <Arch A>
class AddRailsRole {
 public:
  using C = SpareChannels;

  HEP_DEVICE AddRailsRole(A& arch, const SpareRailParams& params, const RailTable<A>& table)
      : a(arch), p(params), table_(table) {}

  // worker: of so many warps of the grid that have the role.
  HEP_DEVICE void run(uint32_t worker, uint32_t workers) {
    for (int j = int(worker); j < p.world.num_local_ranks; j += int(workers))
      for (int step = 1; step < p.world.num_nodes; ++step)
        if (!channel((p.world.node() + step) % p.world.num_nodes, j)) return;
  }

 private:
  static constexpr int kVectors = A::kLanes < 32 ? 1 : 4;  // that a lane reads together

  // False: a lane has left in its wait.
  HEP_DEVICE bool channel(int node, int j) {
    const SpareStripe stripe(p, j, C::kGradients);
    uint64_t* const count = p.count(C::kGradients, ChannelEnd::kLast, p.channel(node, j));
    uint64_t q = *count;
    for (int slot = table_.first_lead(p.world.rank, node); slot >= 0;
         slot = table_.lead(p.world.rank, node, slot + 1)) {
      const uint32_t owned = uint32_t(table_[slot].column % p.node.width());
      for (uint32_t i = 0; i < stripe.chunks(); ++i, ++q) {
        if (!await(node, j, q)) return false;
        if (injected(Bug::kChunkCreditedUnread) && i + 1 < stripe.chunks()) give_back(node, j, q + 1);
        add(node, j, owned, stripe.chunk(i), q);
        give_back(node, j, q);
      }
    }
    a.warp_sync();  // all have read it
    if (a.elect_one()) *count = q;
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
};

}  // namespace hep
