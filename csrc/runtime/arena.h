// The part of a rank's registered memory that is lent to results. A block returns when its last user lets go of it, on
// whatever thread that is; blocks outlive the engine, for they keep the segment mapped.
#pragma once
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>

#include "runtime/segment.h"

namespace hep {

class Arena : public std::enable_shared_from_this<Arena> {
 public:
  // [offset, offset + bytes) of the segment; offset a multiple of kAlignment.
  Arena(std::shared_ptr<Segment> segment, uint64_t offset, uint64_t bytes);

  static constexpr uint64_t kAlignment = 128;

  // The smallest gap that holds so many bytes, the lowest of those; null: there is none. std::bad_alloc leaves the
  // arena as it was. Giving back allocates nothing: it happens in destructors.
  std::shared_ptr<unsigned char> take(uint64_t bytes);
  uint64_t bytes_lent() const;
  uint64_t largest_gap() const;

 private:
  using Gaps = std::map<uint64_t, uint64_t>;  // bytes by offset; no two of them touch
  struct Lent;
  void give_back(Gaps::node_type block);

  std::shared_ptr<Segment> segment_;
  unsigned char* base_;
  mutable std::mutex mutex_;
  Gaps gaps_;
  uint64_t lent_ = 0;
};

}  // namespace hep
