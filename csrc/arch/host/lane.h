// What every executor and every memory model knows about a rank's launch, a block and a lane, and the one
// form all waits take: a 64-bit word reaches a value, or an mbarrier's phase bit leaves a parity.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "common/timeout_report.h"

namespace hep::host {

struct LaunchConfig {
  int num_blocks = 1;
  int num_warps = 1;        // per block
  size_t smem_bytes = 0;    // per block
  int rank = 0, node = 0;   // for timeout reports
  int num_local_ranks = 1;  // peer_node = peer / num_local_ranks
  double timeout_s = 100;   // deadline of every single wait
  uint64_t seed = 0;        // checked model: chooses the interleaving
  bool given_up = false;    // the rank, before this launch
  // Called once per scheduler round; true = it did something. Return true while anything is still to come:
  // the scheduler sleeps when nothing moves. Thread executor: called by the launching thread.
  std::function<bool()> progress;
  // Asked about every 100 ms; true = end the launch with Interrupted.
  std::function<bool()> interrupted;
};

inline uint64_t load_word(const uint64_t* p, std::memory_order order) {
  return std::atomic_ref<uint64_t>(*const_cast<uint64_t*>(p)).load(order);
}

// The condition of a wait. Phase: bit 0 of an mbarrier word differs from `value`. Otherwise: *word >= value.
struct WaitFor {
  const uint64_t* word = nullptr;
  uint64_t value = 0;
  bool phase = false;
  bool poll = false;  // a poll_idle: being resumed is no progress

  bool met(std::memory_order order = std::memory_order_acquire) const {
    const uint64_t now = load_word(word, order);
    return phase ? ((now ^ value) & 1) != 0 : now >= value;
  }
};

// Arrival counters of one block. They only grow, so every meeting of lanes is a wait for "at least".
struct BlockBase {
  int idx = 0;
  const LaunchConfig* config = nullptr;
  std::byte* smem = nullptr;
  uint64_t block_arrived = 0;
  uint64_t group_arrived[16] = {};
  std::vector<uint64_t> warp_arrived;  // elect_one and warp_sync
  std::vector<uint64_t> warp_votes;    // two a warp, used in turn: lanes that voted yes, over the launch

  void reset(int block_idx, const LaunchConfig& launch_config, std::byte* shared) {
    idx = block_idx;
    config = &launch_config;
    smem = shared;
    block_arrived = 0;
    for (uint64_t& arrived : group_arrived) arrived = 0;
    warp_arrived.assign(static_cast<size_t>(launch_config.num_warps), 0);
    warp_votes.assign(2 * static_cast<size_t>(launch_config.num_warps), 0);
  }
};

// When one missing event makes many waits expire together: the wait that names another rank is nearest to the
// cause (one for this rank's own part waits for such a wait), then one that names a site; lanes that merely meet
// wait for one of those.
inline int how_telling(const WaitInfo& info, int own_rank) {
  if (info.peer >= 0) return info.peer != own_rank ? 3 : 2;
  return info.site != Site::kBlockSync ? 1 : 0;
}

class Scheduler;
class ThreadTeam;

enum class Verdict : uint8_t { kGo, kExpired, kAbandoned };

struct LaneBase {
  BlockBase* block = nullptr;
  int lane = 0, warp = 0;
  int elected_lane = 0;  // of this lane's warp
  uint32_t index = 0;    // among all lanes of the launch
  const char* role = "";
  Scheduler* scheduler = nullptr;  // fiber executor
  ThreadTeam* team = nullptr;      // thread executor

  // The wait in progress (fiber executor). The clock of a wait starts at the scheduler's first look at it.
  Verdict verdict = Verdict::kGo;
  WaitInfo info{Site::kBlockSync};
  uint64_t poll_expected = 0, poll_seen = 0;
  int64_t wait_since_ns = 0;
  int64_t poll_since_ns = 0;  // 0 = no fruitless round since poll_reset
  uint32_t steps = 0;         // thread executor: varies where the lane yields
  uint64_t num_votes = 0;     // of its warp, and what it found in each of the two counters last
  uint64_t votes_seen[2] = {};

  void reset(BlockBase& of_block, int warp_idx, int lane_idx) {
    *this = LaneBase{};
    block = &of_block;
    warp = warp_idx;
    lane = lane_idx;
  }
};

// Thrown through a lane that must end because another lane failed. Never leaves launch().
struct Abandoned {};

}  // namespace hep::host
