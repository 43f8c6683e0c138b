// The parts that a kernel's warps take, by name: what a timeout report, a checking machine and a trace call a lane.
#pragma once
#include <cstdint>

namespace hep {

// One byte, and no pointer to a name: a lane that waits keeps it in a register from one end of its role to the other.
enum class Role : uint8_t {
  kNone,  // of a lane that has not said it yet
  kRoute,
  kExchange,
  kPlace,
  kG2s,
  kN2n,
  kS2g,
  kDeliverG2s,
  kDeliverS2g,
  kZeroRows,
  kUnpermuteG2s,
  kUnpermuteReduce,
  kNodeSumG2s,
  kNodeSumReduce,
  kFinalSumG2s,
  kFinalSumReduce,
  kPackWeights,
  kLatencyRoute,
  kLatencySend,
  kLatencyForward,
  kLatencyCounts,
  kLatencyReceive,
  kLatencyPartial,
  kLatencyNodeSum,
  kLatencySum,
  kLatencyLeave,
  kExchangeCloneCounts,
  kCountForClones,
  kPlanClones,
  kShareClones,
  kRedirectToClones,
  kPushWeights,
  kAwaitWeights,
  kCollectGradients,
  kTest,  // used by conformance tests only
};

inline const char* role_name(Role role) {
  switch (role) {
    case Role::kNone: return "";
    case Role::kRoute: return "route";
    case Role::kExchange: return "exchange";
    case Role::kPlace: return "place";
    case Role::kG2s: return "g2s";
    case Role::kN2n: return "n2n";
    case Role::kS2g: return "s2g";
    case Role::kDeliverG2s: return "deliver_g2s";
    case Role::kDeliverS2g: return "deliver_s2g";
    case Role::kZeroRows: return "zero_rows";
    case Role::kUnpermuteG2s: return "unpermute_g2s";
    case Role::kUnpermuteReduce: return "unpermute_reduce";
    case Role::kNodeSumG2s: return "node_sum_g2s";
    case Role::kNodeSumReduce: return "node_sum_reduce";
    case Role::kFinalSumG2s: return "final_sum_g2s";
    case Role::kFinalSumReduce: return "final_sum_reduce";
    case Role::kPackWeights: return "pack_weights";
    case Role::kLatencyRoute: return "latency_route";
    case Role::kLatencySend: return "latency_send";
    case Role::kLatencyForward: return "latency_forward";
    case Role::kLatencyCounts: return "latency_counts";
    case Role::kLatencyReceive: return "latency_receive";
    case Role::kLatencyPartial: return "latency_partial";
    case Role::kLatencyNodeSum: return "latency_node_sum";
    case Role::kLatencySum: return "latency_sum";
    case Role::kLatencyLeave: return "latency_leave";
    case Role::kExchangeCloneCounts: return "exchange clone counts";
    case Role::kCountForClones: return "count for clones";
    case Role::kPlanClones: return "plan clones";
    case Role::kShareClones: return "share clones";
    case Role::kRedirectToClones: return "redirect to clones";
    case Role::kPushWeights: return "push_weights";
    case Role::kAwaitWeights: return "await_weights";
    case Role::kCollectGradients: return "collect_gradients";
    case Role::kTest: return "test";
  }
  return "unknown";
}

}  // namespace hep
