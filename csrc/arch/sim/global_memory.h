// The map of global memory: every stretch that a kernel may touch, by address. An access outside all of them, or
// against a stretch's use, is a broken rule.
#pragma once
#include <vector>

#include "arch/sim/lane.h"
#include "arch/sim/shadow.h"

namespace hep::sim {

class GlobalMemory {
 public:
  explicit GlobalMemory(bool watch) : watch_(watch) {}
  // Regions must not overlap. The returned reference lives until drop() or the end.
  Region& add(const Region& region);
  void drop_rank(int rank);  // all but the registered ones
  Region* find(const void* p, uint64_t bytes) const;
  Region& require(const Lane& me, const void* p, uint64_t bytes, const char* operation) const;
  Region* registered(int rank, Region::Use use) const;

  // A read or write that is about to start, or that starts and ends at once.
  void check_read(const Lane& me, const Region& r, const void* p, uint64_t bytes, const char* operation) const;
  void check_write(const Lane& me, const Region& r, const void* p, uint64_t bytes, const char* operation,
                   bool again = false) const;
  // The owner's data lie there, since before the launch.
  void fill(Region& r, uint64_t at, uint64_t bytes) const;
  // The owner gives the licence back: what lies there is dead.
  void free(Region& r, uint64_t at, uint64_t bytes) const;

 private:
  bool watch_;
  std::vector<std::unique_ptr<Region>> regions_;  // by address
};

}  // namespace hep::sim
