// What a wait says when its deadline passes: who waited, where, for whom, for what, and what it saw.
#pragma once
#include <cstdint>

namespace hep {

// Every place in the role code that can wait. Names are what a user reads in the exception.
enum class Site : uint16_t {
  kStageFull,            // a shared-memory stage: its loads have landed
  kStageEmpty,           // a shared-memory stage: its consumers are done with it
  kCountsFromRail,       // a rail peer's count vector
  kCountsFromNode,       // count vectors forwarded by a rank of this node
  kPeerReady,            // a rank of this node has entered the operation
  kPeerDone,             // a rank of this node has finished with this rank's memory
  kRailSlotFree,         // a credit: the rail peer consumed the slot's previous chunk
  kRailChunk,            // a chunk of tokens from a rail peer
  kRailAny,              // any chunk from any rail peer
  kRailCall,             // never comes: a rail peer is in another call, or means rows of other sizes
  kHeaders,              // never comes: another rank means a different call, and no host saw it
  kLanding,              // never comes: a rank of this node is in another operation, or means rows of other sizes
  kRowsLanded,           // receive rows, stored by ranks of this node
  kPartialRows,          // partial rows of a rank of this node
  kLatencyHeader,        // latency path: the header of a rank's slab
  kLatencyRow,           // latency path: a line of a rank's row
  kSlotsFree,            // a rank whose spare slots get weights has entered the push
  kCloneWeights,         // weights of a clone that this rank holds, from their owner
  kCloneGradients,       // gradients of a clone, from the rank that holds it
  kCloneGradientsTaken,  // the owner of a clone has added its gradients
  kBlockSync,            // the other lanes of this block
  kGridMeeting,          // the other blocks of this kernel
  kNotification,         // on the host: the counts of an exchange that has started
  kKernelStart,          // on the host: the start of an exchange that was launched
  kTestSite,             // used by conformance tests only
};
inline constexpr int kSites = int(Site::kTestSite) + 1;

inline const char* site_name(Site s) {
  switch (s) {
    case Site::kStageFull: return "stage_full";
    case Site::kStageEmpty: return "stage_empty";
    case Site::kCountsFromRail: return "counts_from_rail";
    case Site::kCountsFromNode: return "counts_from_node";
    case Site::kPeerReady: return "peer_ready";
    case Site::kPeerDone: return "peer_done";
    case Site::kRailSlotFree: return "rail_slot_free";
    case Site::kRailChunk: return "rail_chunk";
    case Site::kRailAny: return "rail_any";
    case Site::kRailCall: return "rail_differs";
    case Site::kHeaders: return "headers_differ";
    case Site::kLanding: return "landing_differs";
    case Site::kRowsLanded: return "rows_landed";
    case Site::kPartialRows: return "partial_rows";
    case Site::kLatencyHeader: return "latency_header";
    case Site::kLatencyRow: return "latency_row";
    case Site::kSlotsFree: return "spare_slots_free";
    case Site::kCloneWeights: return "clone_weights";
    case Site::kCloneGradients: return "clone_gradients";
    case Site::kCloneGradientsTaken: return "clone_gradients_taken";
    case Site::kBlockSync: return "block_sync";
    case Site::kGridMeeting: return "grid_meeting";
    case Site::kNotification: return "counts_to_host";
    case Site::kKernelStart: return "kernel_start";
    case Site::kTestSite: return "test_site";
  }
  return "unknown";
}

// Passed with every wait. `peer` is a rank of the EP group, -1 when the wait is inside this rank.
// `chunk` is the chunk or stage index the role is working on, -1 when it has none.
struct WaitInfo {
  Site site;
  int32_t peer = -1;
  int64_t chunk = -1;
};

struct TimeoutReport {
  Site site = Site::kTestSite;
  int32_t rank = -1, peer = -1, node = -1, peer_node = -1, block = -1, warp = -1;
  const char* role = "";
  int64_t chunk = -1;
  uint64_t expected = 0, seen = 0;
  double waited_s = 0;
};

}  // namespace hep
