// Entry and exit of an operation inside a node. ready: "my memory may be touched in operation e", and where its rows
// are to land (a dispatch) or lie (a combine); done: "I have finished with your memory in operation e". Both count
// operations (epochs), so they are never reset, and a fast rank can never be mistaken for a slow one.
#pragma once
#include <bit>
#include <cstdint>

#include "arch/concept.h"
#include "common/bugs.h"
#include "common/world.h"
#include "layout/landing.h"

namespace hep {

struct NodeGate {
  static constexpr uint64_t kStride = BufferLayout::kFlagStride / 8;
  World world;
  const uint64_t* finished;      // operations of this rank before this one
  uint64_t *ready_in, *done_in;  // [L] cache lines in this rank's segment, entry l written by local rank l
  uint64_t* const* peer_ready;   // [L] address of OUR entry in local rank l's ready flags
  uint64_t* const* peer_done;
  uint64_t* waited;  // [R] nanoseconds that operations of this kind waited for each rank to be ready

  HEP_DEVICE uint64_t epoch() const { return injected(Bug::kOneEpoch) ? 1 : *finished + 1; }
  // And what is said with it, a Landing or a Reading. When it is overwritten nobody reads it any more: before this rank
  // leaves the operation, all others have announced that they are done. Announcements and waits are by all lanes of a
  // warp; waits that are not kTogether by one lane.
  template <class A, class Said>
  HEP_DEVICE void announce_ready(A& a, Said said) const {
    if (injected(Bug::kSaidAfterReady)) announce(a, peer_ready);
    said.epoch = epoch();
    const auto words = std::bit_cast<Words<Said>>(said);
    for (int l = a.lane(); l < world.num_local_ranks; l += A::kLanes) {
      auto* to = reinterpret_cast<Vec16*>(reinterpret_cast<unsigned char*>(peer_ready[l]) + Landing::kAt);
      for (uint32_t i = 0; i < Words<Said>::kNumber; ++i) a.st_global(to + i, words.v[i]);
    }
    if (!injected(Bug::kSaidAfterReady)) announce(a, peer_ready);
  }
  // What local rank l said, by a lane that has seen it ready. Of one that is in another operation, what it said then.
  template <class Said, class A>
  HEP_DEVICE Said said(A& a, uint32_t l) const {
    const auto* from =
        reinterpret_cast<const Vec16*>(reinterpret_cast<const unsigned char*>(ready_in + l * kStride) + Landing::kAt);
    return std::bit_cast<Said>(Words<Said>{{a.ld_global(from), a.ld_global(from + 1), a.ld_global(from + 2)}});
  }
  // Of one that is in another operation, or means rows of another size, the deadline is waited for.
  template <class A>
  HEP_DEVICE Landing landing(A& a, uint32_t l, uint64_t operation, const MessageLayout& message) const {
    const auto landing = said<Landing>(a, l);
    while (!landing.is_for(operation, message))
      a.poll_idle({Site::kLanding, world.rank_of(world.node(), int(l))}, operation, landing.epoch);
    return landing;
  }
  // False: a lane has left in its wait. counts: what it waits for goes into `waited`; for one warp, since all wait.
  template <bool kTogether = true, class A>
  HEP_DEVICE bool wait_all_ready(A& a, bool counts) const {
    if (injected(Bug::kEnterUnawaited)) return true;
    return wait_all<kTogether>(a, ready_in, Site::kPeerReady, [=, this](int l) {
      return counts && l != world.local_rank() ? waited + world.rank_of(world.node(), l) : nullptr;
    });
  }
  template <class A>
  HEP_DEVICE void announce_done(A& a) const {
    announce(a, peer_done);
  }
  template <bool kTogether = true, class A>
  HEP_DEVICE bool wait_all_done(A& a) const {
    return injected(Bug::kDoneUnawaited) || wait_all<kTogether>(a, done_in, Site::kPeerDone, NotCounted{});
  }

 private:
  template <class Said>
  struct Words {
    static constexpr uint32_t kNumber = sizeof(Said) / sizeof(Vec16);
    Vec16 v[kNumber];
  };
  template <class A>
  HEP_DEVICE void announce(A& a, uint64_t* const* flags) const {
    a.st_release_sys_warp(world.num_local_ranks, [=](int l) { return flags[l]; }, epoch());
  }
  template <bool kTogether, class A, class Waited>
  HEP_DEVICE bool wait_all(A& a, const uint64_t* flags, Site site, const Waited& counted) const {
    const auto flag = [=](int l) { return flags + l * kStride; };
    const auto info = [=, this](int l) { return WaitInfo{site, world.rank_of(world.node(), l), -1}; };
    if constexpr (kTogether) return a.wait_ge_sys_warp(world.num_local_ranks, flag, epoch(), info, counted);
    a.wait_ge_sys_each(world.num_local_ranks, flag, epoch(), info, counted);
    return true;
  }
};

// True for the last of `parties` calls in a kernel (over all blocks); leaves the counter at zero. `before`: what the
// caller found in it when it added 1, by an acquire and release, whose chain makes everything that earlier callers did
// visible to the last: add_acq_rel_sys where that one speaks for all of them to other ranks, else add_acq_rel_rank.
HEP_DEVICE bool last_of(uint64_t before, uint64_t* counter, uint64_t parties) {
  if (before + 1 != parties) return false;
  if (!injected(Bug::kFinishedNotReset)) *counter = 0;
  return true;
}

}  // namespace hep
