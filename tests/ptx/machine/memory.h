// Which addresses are memory of the devices, byte by byte.
#pragma once
#include <map>

#include "machine.h"
#include "program.h"

namespace hep::ptxm {

class Memory {
 public:
  void map(const Range& r);
  void unmap(u64 base);
  // Whether all of it lies in one range that may be touched so.
  bool holds(u64 at, u32 n, bool write) {
    const Near& near = near_[write];
    if (at >= near.begin && n <= near.end - near.begin && at <= near.end - n) return true;
    return look_up(at, n, write);
  }
  bool mapped(u64 at, u64 n) const;
  u64 told_host() const { return told_host_; }  // writes to memory of the host
  std::string describe(u64 at) const;           // where it lies, for a report

 private:
  struct Near {                      // the range of the last access
    u64 begin = ~0ull, end = ~0ull;  // none
  };
  bool look_up(u64 at, u32 n, bool write);
  const Range* find(u64 at) const;  // that contains it, or null

  u64 told_host_ = 0;
  std::map<u64, Range> ranges_;
  Near near_[2];
};

}  // namespace hep::ptxm
