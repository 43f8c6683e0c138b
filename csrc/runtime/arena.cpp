#include "runtime/arena.h"

#include <algorithm>
#include <iterator>

#include "common/world.h"

namespace hep {

Arena::Arena(std::shared_ptr<Segment> segment, uint64_t offset, uint64_t bytes)
    : segment_(std::move(segment)), base_(segment_->data() + offset) {
  if (bytes) gaps_[0] = bytes;
}

// A block keeps the entry that it will have among the gaps.
struct Arena::Lent {
  const std::shared_ptr<Arena> arena;
  Gaps::node_type block;

  explicit Lent(std::shared_ptr<Arena> of) : arena(std::move(of)) {
    Gaps one{{0, 0}};
    block = one.extract(one.begin());
  }
  ~Lent() {
    if (block.mapped()) arena->give_back(std::move(block));
  }
};

std::shared_ptr<unsigned char> Arena::take(uint64_t wanted) {
  const uint64_t bytes = align_up(std::max<uint64_t>(wanted, 1), kAlignment);
  const auto lent = std::make_shared<Lent>(shared_from_this());  // all that is allocated, before anything is changed
  std::lock_guard lock(mutex_);
  auto best = gaps_.end();
  for (auto gap = gaps_.begin(); gap != gaps_.end(); ++gap)
    if (gap->second >= bytes && (best == gaps_.end() || gap->second < best->second)) best = gap;
  if (best == gaps_.end()) return nullptr;
  Gaps::node_type gap = gaps_.extract(best);
  const uint64_t at = gap.key();
  lent->block.key() = at;
  lent->block.mapped() = bytes;
  gap.key() += bytes;
  gap.mapped() -= bytes;
  if (gap.mapped()) gaps_.insert(std::move(gap));
  lent_ += bytes;
  return {lent, base_ + at};
}

uint64_t Arena::bytes_lent() const {
  std::lock_guard lock(mutex_);
  return lent_;
}

uint64_t Arena::largest_gap() const {
  std::lock_guard lock(mutex_);
  uint64_t largest = 0;
  for (const auto& [offset, bytes] : gaps_) largest = std::max(largest, bytes);
  return largest;
}

void Arena::give_back(Gaps::node_type block) {
  std::lock_guard lock(mutex_);
  lent_ -= block.mapped();
  auto gap = gaps_.insert(std::move(block)).position;
  const auto next = std::next(gap);
  if (next != gaps_.end() && gap->first + gap->second == next->first) {
    gap->second += next->second;
    gaps_.erase(next);
  }
  if (gap == gaps_.begin()) return;
  const auto before = std::prev(gap);
  if (before->first + before->second != gap->first) return;
  before->second += gap->second;
  gaps_.erase(gap);
}

}  // namespace hep
