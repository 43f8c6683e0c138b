// The words of the host executor's exceptions.
#include "arch/host/errors.h"

#include <cstdio>

#include "arch/host/lane.h"

namespace hep::host {
namespace {

std::string rank_text(int rank, int node) {
  std::string text = "rank " + std::to_string(rank);
  if (node >= 0) text += " (node " + std::to_string(node) + ")";
  return text;
}

std::string timeout_text(const TimeoutReport& o) {
  char waited[32];
  std::snprintf(waited, sizeof waited, "%.1f s", o.waited_s);
  std::string text = rank_text(o.rank, o.node) + " waited " + waited;
  if (o.role != nullptr && *o.role != '\0') text += std::string(" in role ") + o.role;
  text += ", block " + std::to_string(o.block) + ", warp " + std::to_string(o.warp) + ": " + site_name(o.site);
  if (o.peer >= 0) text += " from " + rank_text(o.peer, o.peer_node);
  if (o.chunk >= 0) text += ", chunk " + std::to_string(o.chunk);
  return text + ": expected " + std::to_string(o.expected) + ", saw " + std::to_string(o.seen);
}

}  // namespace

DeadlineError::DeadlineError(const TimeoutReport& timeout_report)
    : std::runtime_error(timeout_text(timeout_report)), timeout_report_(timeout_report) {}

const char* rule_name(Rule rule) {
  switch (rule) {
    case Rule::kAlignment: return "alignment";
    case Rule::kOutsideShared: return "outside_shared";
    case Rule::kBarrierState: return "barrier_state";
    case Rule::kLapped: return "lapped";
    case Rule::kArriveCount: return "arrive_count";
    case Rule::kExpectTx: return "expect_tx";
    case Rule::kUnpublished: return "unpublished";
    case Rule::kLoadInFlight: return "load_in_flight";
    case Rule::kStoreInFlight: return "store_in_flight";
    case Rule::kOpenGroup: return "open_group";
    case Rule::kUnfinishedGroup: return "unfinished_group";
    case Rule::kUnfinishedLoad: return "unfinished_load";
    case Rule::kDivergence: return "divergence";
    case Rule::kNamedBarrier: return "named_barrier";
  }
  return "unknown";
}

void throw_deadline(const LaneBase& lane, const WaitInfo& info, uint64_t expected, uint64_t seen, double waited_s) {
  const LaunchConfig& config = *lane.block->config;
  TimeoutReport o;
  o.site = info.site;
  o.rank = config.rank;
  o.node = config.node;
  o.peer = info.peer;
  o.peer_node = info.peer >= 0 && config.num_local_ranks > 0 ? info.peer / config.num_local_ranks : -1;
  o.block = lane.block->idx;
  o.warp = lane.warp;
  o.role = lane.role;
  o.chunk = info.chunk;
  o.expected = expected;
  o.seen = seen;
  o.waited_s = waited_s;
  throw DeadlineError(o);
}

void throw_protocol(const LaneBase& lane, Rule rule, const std::string& detail) {
  throw ProtocolError(rule, std::string(rule_name(rule)) + ": " + detail + " (rank " +
                                std::to_string(lane.block->config->rank) + ", block " +
                                std::to_string(lane.block->idx) + ", warp " + std::to_string(lane.warp) + ", lane " +
                                std::to_string(lane.lane) + ", role " + (*lane.role != '\0' ? lane.role : "-") + ")");
}

}  // namespace hep::host
