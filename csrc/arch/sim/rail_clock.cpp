// What the latency path sends along the rail, in virtual time. A rank's places for it hold what addresses come from:
// count vectors, and the records of messages. Other bytes are charged and are not there. The put itself is that of the
// throughput path.
#include <algorithm>

#include "arch/sim/clockwork.h"

namespace hep::sim {

// How many bytes are there from `at` on, an offset into a rank's places, up to the end of the header or the place.
uint64_t Clockwork::rail_facts(const Lane& me, uint64_t at) const {
  const LatencyRail& rail = m_.layout_->latency_rail;
  const uint64_t of_peer = at % (rail.bytes() / 2 / rail.num_peers);
  if (of_peer < rail.header_bytes) return rail.header_bytes - of_peer;
  const uint64_t of_place = (of_peer - rail.header_bytes) % rail.token_bytes, moved = me.launch->moved_bytes;
  return of_place < moved ? moved - of_place : 0;
}

bool Clockwork::is_rail_fact(const Lane& me, const unsigned char* p) const {
  const BufferLayout& l = *m_.layout_;
  const uint64_t at = uint64_t(p - m_.rank(me.rank).segment);
  return rail_facts(me, at - (at >= l.latency_recv ? l.latency_recv : l.latency_send)) > 0;
}

void Clockwork::load_rail(Lane& me, const void* p, uint64_t bytes) {
  if (!m_.rank(me.rank).has_on_rail(static_cast<const unsigned char*>(p))) return;
  m_.spend(me, me.launch->rail_load_ps * Ps(bytes) / 8);
  stream(me, bytes);
}

// Whether the bytes are to be moved.
bool Clockwork::store_rail(Lane& me, const Region& region, const void* p, uint64_t bytes) {
  m_.spend(me, me.launch->rail_store_ps * Ps(bytes) / 8);
  stream(me, bytes);
  return rail_facts(me, region.offset(p)) > 0;
}

}  // namespace hep::sim
