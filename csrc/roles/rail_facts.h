// How many experts a channel carries, and in how many chunks, as each of its places counts them: in a block's shared
// memory.
#pragma once
#include "roles/rail_stripe.h"
#include "roles/rail_table.h"

namespace hep {

struct alignas(16) ChannelFacts {
  uint64_t before;           // chunks that went through it before this kernel
  uint32_t experts, chunks;  // that go through it in this one; of each of them
  HEP_DEVICE uint32_t total() const { return experts * chunks; }
};

// From an owner to the node of the clones, by way of the rail of a local rank.
struct ChannelRoute {
  int owner, node, rail;

  HEP_DEVICE static ChannelRoute of(const SpareRailParams& p, SpareChannels::Direction d, SpareChannels::Place place,
                                    uint32_t channel) {
    const ChannelPeer peer = ChannelPeer::of(p, channel);
    const int own = p.world.local_rank();
    if (place == SpareChannels::kMiddle) return {p.world.rank_of(p.world.node(), peer.local), peer.node, own};
    if ((place == SpareChannels::kFirst) == (d == SpareChannels::kWeights))
      return {p.world.rank, peer.node, peer.local};
    return {p.world.rank_of(peer.node, peer.local), p.world.node(), own};
  }
};

template <class A>
class RailFacts {
 public:
  HEP_DEVICE RailFacts(A& arch, const SpareRailParams& params, SpareChannels::Direction direction, std::byte* smem)
      : a(arch), p(params), direction_(direction), facts_(reinterpret_cast<Vec16*>(smem)) {}

  HEP_HOST_DEVICE static uint64_t bytes(const SpareRailParams& p) {
    return align_up(sizeof(ChannelFacts) * SpareChannels::kPlaces * uint64_t(p.channels.number()), 128);
  }
  // By all lanes of a block, which meet. False: one of them has left.
  HEP_DEVICE bool fill(const RailTable<A>& table) const {
    const uint32_t number = p.channels.number(), step = uint32_t(a.num_warps() * A::kLanes);
    for (uint32_t i = uint32_t(a.warp_idx() * A::kLanes + a.lane()); i < SpareChannels::kPlaces * number; i += step) {
      const auto place = SpareChannels::Place(i / number);
      const ChannelRoute route = ChannelRoute::of(p, direction_, place, i % number);
      const ChannelFacts facts{*p.count(direction_, place, i % number), table.leads(route.owner, route.node),
                               SpareStripe(p, route.rail, direction_).chunks()};
      a.st_shared(facts_ + i, std::bit_cast<Vec16>(facts));
    }
    return a.block_whole();
  }
  HEP_DEVICE ChannelFacts get(SpareChannels::Place place, uint32_t channel) const {
    return std::bit_cast<ChannelFacts>(a.ld_shared(facts_ + place * p.channels.number() + channel));
  }
  // The last warp of a place to leave: what went through is counted.
  HEP_DEVICE void count(SpareChannels::Place place) const {
    for (uint32_t c = 0; c < p.channels.number(); ++c) {
      const ChannelFacts facts = get(place, c);
      *p.count(direction_, place, c) = facts.before + facts.total();
    }
  }

 private:
  A& a;
  const SpareRailParams& p;
  const SpareChannels::Direction direction_;
  Vec16* facts_;
};

}  // namespace hep
