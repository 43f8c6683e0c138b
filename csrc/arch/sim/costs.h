// What the simulated machine charges, in integers: times in picoseconds, rates in MB/s (bytes per microsecond).
// A time of 0 is free, a rate of 0 is infinite. All zero = no clock: orders are chosen by seed (exploration).
#pragma once
#include <cstdint>

#include "common/loop_step.h"

namespace hep::sim {

using Ps = int64_t;

struct CostModel {
  // A kernel and its instructions.
  Ps launch_ps = 0;             // call to first instruction, and last instruction to return
  Ps loop_ps[kLoopSteps] = {};  // a round of a copy role's loop: its lane is busy so long
  Ps barrier_ps = 0;            // an mbarrier operation; also a meeting of warps
  Ps wake_ps = 0;               // an mbarrier's phase ends -> its waiter runs
  Ps poll_ps = 0;               // one look at a flag in global memory, or a counter's old value
  Ps fence_ps = 0;              // a fence of system scope: the lane waits for its stores, over NVLink too
  Ps flag_ps = 0;               // a flag store until it is visible inside the node, without the link's latency
  Ps route_token_ps = 0;        // routing one token (exchange kernel)
  Ps place_token_ps = 0;        // in a dispatch by lines what of that comes behind everybody's counts
  // TMA engine of an SM.
  uint64_t tma_read_mbps = 0, tma_write_mbps = 0;
  Ps tma_op_ps = 0;       // engine time that a copy takes at least
  Ps tma_latency_ps = 0;  // of a load from or a store to this GPU's memory
  // Lines, and the words of rows that warps load and store themselves (the latency path).
  Ps line_store_ps = 0;  // a warp's time for a line of a dispatch that it stores
  Ps line_load_ps = 0;   // for one that it looks at, finds and stores where it belongs
  Ps partial_line_ps =
      0;                // for a line of a row that it loads and adds to a partial row, and for the share of its store
  Ps sum_line_ps = 0;   // for one that it looks at, finds and adds
  Ps line_wait_ps = 0;  // a line has come -> who waits for it has it
  Ps word_load_ps = 0;  // for 8 bytes of a row that a dispatch loads from this GPU's memory
  uint64_t line_mbps = 0;  // what an SM stores so
  // The same along the rail: what a warp's share of a row takes beside its bytes. A look at the signal of a row that is
  // handed on or added; a count of what was stored of a row that warps share, with its fence.
  Ps dispatch_signal_ps = 0, combine_signal_ps = 0;
  Ps dispatch_count_ps = 0, combine_count_ps = 0;
  // Reduction of an SM: staged bytes added per unit of time, and accumulated bytes written back.
  uint64_t reduce_mbps = 0, round_mbps = 0;
  // A GPU.
  uint64_t hbm_mbps = 0;
  uint64_t nvlink_egress_mbps = 0, nvlink_ingress_mbps = 0;
  Ps nvlink_latency_ps = 0;  // one way, switch included
  // A rank's NIC.
  uint64_t nic_mbps = 0;
  Ps nic_message_ps = 0;  // NIC time that a message takes at least (1 / message rate)
  Ps nic_post_ps = 0;     // the lane's time to post a verb
  Ps nic_latency_ps = 0;  // one way, network switches included
};

inline Ps duration(uint64_t bytes, uint64_t mbps) {
  return mbps ? Ps((bytes * 1'000'000 + mbps - 1) / mbps) : 0;
}

}  // namespace hep::sim
