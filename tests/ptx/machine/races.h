// Happens-before: stub.
#pragma once
#include <memory>
#include "machine.h"
#include "program.h"

namespace hep::ptxm {

class MachineImpl;
struct Who; struct Warp; struct Block; struct Run; struct Mbar; struct BulkCopy;
struct WarpClocks {};
struct MbarClocks {};
struct RunClocks {};
struct CopyClocks {};
struct BlockCells {};

class Races {
 public:
  explicit Races(MachineImpl&) {}
  void start(Run&) {}
  void start(Block&) {}
  void end(Block&) {}
  void exit(const Who&) {}
  void global(const Who&, u64, u32, bool, const Ins&) {}
  void shared(const Who&, u32, u32, bool, const Ins&) {}
  void atomic(const Who&, u64, u32, const Ins&) {}
  void fence(const Who&, Scope) {}
  void meet(Warp&, u32) {}
  void meet(Block&, u32) {}
  void init(const Who&, Mbar&, const Ins&) {}
  void use(const Who&, Mbar&, const Ins&) {}
  void arrive(const Who&, Mbar&) {}
  void complete(Mbar&) {}
  void observe(const Who&, Mbar&) {}
  void issue(const Who&, BulkCopy&, const Ins&) {}
  void waited(const Who&, u32, bool) {}
  void proxy_fence(const Who&, u32) {}
  void forget(u64, u64) {}
  Order order_of(Run&) { return {}; }
  void quiesce() {}
};

}  // namespace hep::ptxm
