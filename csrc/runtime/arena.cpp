#include "runtime/arena.h"

#include <algorithm>
#include <iterator>

#include "common/world.h"

namespace hep {

Arena::Arena(std::shared_ptr<Segment> segment, uint64_t offset, uint64_t bytes)
    : segment_(std::move(segment)), base_(segment_->data() + offset) {
  if (bytes) gaps_[0] = bytes;
}

std::shared_ptr<unsigned char> Arena::take(uint64_t wanted) {
  const uint64_t bytes = align_up(std::max<uint64_t>(wanted, 1), kAlignment);
  std::lock_guard lock(mutex_);
  auto best = gaps_.end();
  for (auto gap = gaps_.begin(); gap != gaps_.end(); ++gap)
    if (gap->second >= bytes && (best == gaps_.end() || gap->second < best->second)) best = gap;
  if (best == gaps_.end()) return nullptr;
  const auto [at, room] = *best;
  gaps_.erase(best);
  if (room > bytes) gaps_[at + bytes] = room - bytes;
  lent_ += bytes;
  return {base_ + at, [self = shared_from_this(), at, bytes](unsigned char*) { self->give_back(at, bytes); }};
}

uint64_t Arena::bytes_lent() const {
  std::lock_guard lock(mutex_);
  return lent_;
}

void Arena::give_back(uint64_t at, uint64_t bytes) {
  std::lock_guard lock(mutex_);
  lent_ -= bytes;
  auto gap = gaps_.emplace(at, bytes).first;
  const auto next = std::next(gap);
  if (next != gaps_.end() && at + bytes == next->first) {
    gap->second += next->second;
    gaps_.erase(next);
  }
  if (gap == gaps_.begin()) return;
  const auto before = std::prev(gap);
  if (before->first + before->second != at) return;
  before->second += gap->second;
  gaps_.erase(gap);
}

}  // namespace hep
