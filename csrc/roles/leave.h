// The end of an operation: the last lane to leave moves the rank's progress on. Every lane that reads the progress (the
// epoch of the gate, the chunk numbers of the rails) or takes chunks counts as leaving only when it is through with it.
#pragma once
#include "common/bugs.h"
#include "roles/params.h"

namespace hep {

// sent, received: tokens by node of this operation. parties: calls in the whole grid.
template <class A, class P>
HEP_DEVICE void leave_operation(A& a, const P& p, const uint32_t* sent, const uint32_t* received, uint64_t parties) {
  if (!last_of(a.add_acq_rel_rank(&p.progress->leaving, 1), &p.progress->leaving, parties)) return;
  const uint64_t chunk = p.rail.geometry.chunk_tokens;
  for (uint32_t i = 0; i < p.rail.num_peers; ++i) {
    const RailPeer& peer = p.rail.peers[i];
    *peer.sent += div_up(sent[peer.node], chunk);
    *peer.received += div_up(received[peer.node], chunk);
  }
  for (int n = 0; n < p.world.num_nodes && !injected(Bug::kTakenNotReset); ++n)
    p.taken.to_rail[n] = p.taken.to_node[n] = 0;
  ++p.progress->operations;
}

}  // namespace hep
