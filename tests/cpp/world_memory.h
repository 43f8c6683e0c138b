// Memory of an operation in a test world: what it may write, and the edge behind it that nobody may touch.
#pragma once
#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "check.h"
#include "runtime/arena.h"

namespace hep::test {

using Bytes = std::vector<unsigned char>;

// Memory that an operation may write, with an edge behind it that nobody may touch. Never null.
class Output {
 public:
  explicit Output(size_t bytes, Arena* arena = nullptr) : bytes_(bytes), own_(arena ? 0 : bytes + kEdge) {
    if (arena) lent_ = arena->take(bytes + kEdge);
    if (arena && !lent_) throw check::Failure("the arena is full");
    data_ = arena ? lent_.get() : own_.data();
    std::fill_n(data_, bytes + kEdge, kUntouched);
  }
  static size_t size_in_arena(size_t bytes) { return align_up(bytes + kEdge, Arena::kAlignment); }
  unsigned char* data() { return data_; }
  float* floats() { return reinterpret_cast<float*>(data_); }
  bool edge_is_intact() const {
    return std::all_of(data_ + bytes_, data_ + bytes_ + kEdge, [](unsigned char b) { return b == kUntouched; });
  }
  // Keeps the block, and says what is in it.
  std::pair<std::shared_ptr<unsigned char>, Bytes> keep() const { return {lent_, {data_, data_ + bytes_}}; }

 private:
  static constexpr unsigned char kUntouched = 0xab;
  static constexpr size_t kEdge = 64;
  size_t bytes_;
  Bytes own_;
  std::shared_ptr<unsigned char> lent_;
  unsigned char* data_;
};

// Memory of a plan: 128-byte aligned, full of ones.
class PlanBlock {
 public:
  explicit PlanBlock(uint64_t bytes) : bytes_(bytes + 128, 0xff) {}
  unsigned char* data() { return reinterpret_cast<unsigned char*>(align_up(uint64_t(bytes_.data()), 128)); }

 private:
  Bytes bytes_;
};

}  // namespace hep::test
