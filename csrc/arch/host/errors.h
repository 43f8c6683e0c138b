// How a kernel on the host ends badly: a deadline passed, a rule of the machine was broken, or the user
// interrupted it. launch() throws exactly one of these (or whatever the kernel body itself threw).
#pragma once
#include <stdexcept>
#include <string>

#include "common/timeout_report.h"

namespace hep::host {

// A wait that expired. what() is the timeout report in words.
class DeadlineError : public std::runtime_error {
 public:
  explicit DeadlineError(const TimeoutReport& timeout_report);
  const TimeoutReport& timeout_report() const noexcept { return timeout_report_; }

 private:
  TimeoutReport timeout_report_;
};

// LaunchConfig::interrupted said stop.
class Interrupted : public std::runtime_error {
 public:
  Interrupted() : std::runtime_error("interrupted while waiting for other ranks") {}
};

// The rules of the machine that the checked model enforces.
enum class Rule {
  kAlignment,        // address or size not as the access demands
  kOutsideShared,    // a shared access (or barrier) outside the block's shared memory
  kBarrierState,     // a barrier used before mbar_init, overwritten, or initialised with a bad count
  kLapped,           // a phase ended before every waiter for the previous one had got away
  kArriveCount,      // more arrivals than the barrier's phase has left
  kExpectTx,         // bytes announced and bytes loaded disagree
  kUnpublished,      // the async proxy meets generic accesses that nobody published
  kLoadInFlight,     // an access to memory that a bulk load may still write
  kStoreInFlight,    // a write to memory that a bulk store may still read
  kOpenGroup,        // a lane returned with bulk stores it never committed
  kUnfinishedGroup,  // a lane returned before its bulk stores were complete
  kUnfinishedLoad,   // a block returned while loads into its shared memory were in flight
  kDivergence,       // the lanes of a warp did not meet at the same place
  kNamedBarrier,     // group_sync: id out of range, or shared by two groups of warps
};

const char* rule_name(Rule rule);

class ProtocolError : public std::logic_error {
 public:
  ProtocolError(Rule rule, const std::string& what) : std::logic_error(what), rule_(rule) {}
  Rule rule() const noexcept { return rule_; }

 private:
  Rule rule_;
};

struct LaneBase;

[[noreturn]] void throw_deadline(const LaneBase& lane, const WaitInfo& info, uint64_t expected, uint64_t seen,
                                 double waited_s);
// what() = "<rule>: <detail> (rank 1, block 0, warp 2, lane 0, role g2s)".
[[noreturn]] void throw_protocol(const LaneBase& lane, Rule rule, const std::string& detail);

}  // namespace hep::host
