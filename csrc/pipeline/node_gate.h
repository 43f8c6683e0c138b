// Entry and exit of an operation inside a node. ready: "my receive rows may be touched in operation e";
// done: "I have finished with your receive rows in operation e". Both count operations (epochs), so they are
// never reset, and a fast rank can never be mistaken for a slow one.
#pragma once
#include <cstdint>

#include "arch/concept.h"
#include "common/bugs.h"
#include "common/world.h"
#include "layout/buffer.h"

namespace hep {

struct NodeGate {
  static constexpr uint64_t kStride = BufferLayout::kFlagStride / 8;
  World world;
  const uint64_t* finished;      // operations of this rank before this one
  uint64_t *ready_in, *done_in;  // [L] cache lines in this rank's segment, entry l written by local rank l
  uint64_t* const* peer_ready;   // [L] address of OUR entry in local rank l's ready flags
  uint64_t* const* peer_done;

  HEP_DEVICE uint64_t epoch() const { return injected(Bug::kOneEpoch) ? 1 : *finished + 1; }
  // Of the operation that this rank has just left.
  HEP_DEVICE uint64_t last_epoch() const { return injected(Bug::kOneEpoch) ? 1 : *finished; }
  template <class A>
  HEP_DEVICE void announce_ready(A& a) const {
    announce(a, peer_ready);
  }
  template <class A>
  HEP_DEVICE void wait_all_ready(A& a) const {
    if (injected(Bug::kEnterUnawaited)) return;
    wait_all(a, ready_in, epoch(), Site::kPeerReady);
  }
  template <class A>
  HEP_DEVICE void announce_done(A& a) const {
    announce(a, peer_done);
  }
  template <class A>
  HEP_DEVICE void wait_all_done(A& a, uint64_t of) const {
    if (injected(Bug::kDoneUnawaited)) return;
    wait_all(a, done_in, of, Site::kPeerDone);
  }

 private:
  template <class A>
  HEP_DEVICE void announce(A& a, uint64_t* const* flags) const {
    a.st_release_sys_each(world.num_local_ranks, [=](int l) { return flags[l]; }, epoch());
  }
  template <class A>
  HEP_DEVICE void wait_all(A& a, const uint64_t* flags, uint64_t value, Site site) const {
    a.wait_ge_sys_each(
        world.num_local_ranks, [=](int l) { return flags + l * kStride; }, value,
        [=, this](int l) { return WaitInfo{site, world.rank_of(world.node(), l), -1}; });
  }
};

// True for the last of `parties` calls in a kernel (over all blocks); leaves the counter at zero. The
// acquire-release chain makes everything that earlier callers did visible to the last.
template <class A>
HEP_DEVICE bool last_of(A& a, uint64_t* counter, uint64_t parties) {
  if (a.add_acq_rel_rank(counter, 1) + 1 != parties) return false;
  if (!injected(Bug::kFinishedNotReset)) *counter = 0;
  return true;
}

}  // namespace hep
