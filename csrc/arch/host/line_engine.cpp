// Landing lines.
#include "arch/host/line_engine.h"

#include <utility>

#include "common/bugs.h"

namespace hep::host {
namespace {

constexpr uint32_t kAll = (1u << Line::kWords) - 1, kFlagWord = 1u << Line::kFlag, kLowerHalf = 0xff;
constexpr uint64_t kSeldom = 16;

}  // namespace

LineEngine::~LineEngine() {
  collect();
  for (Pending* pending : in_flight_) {
    land(*pending, pending->words);
    delete pending;
  }
}

// Release without acquire, as of loads: lanes that push learn nothing of each other.
void LineEngine::push(Line* dst, const Line& line) {
  auto* node = new Pending{dst, line, kAll, inbox_.load(std::memory_order_relaxed)};
  while (!inbox_.compare_exchange_weak(node->next, node, std::memory_order_release, std::memory_order_relaxed)) {
  }
}

void LineEngine::collect() {
  for (Pending* p = inbox_.exchange(nullptr, std::memory_order_acquire); p != nullptr; p = p->next)
    in_flight_.push_back(p);
}

bool LineEngine::complete_one(Rng& rng) {
  collect();
  // The last ones stay for long, or lanes that meet after every line would find all of them there.
  if (in_flight_.empty() || in_flight_.size() <= rng.below(kSeldom)) return false;
  std::swap(in_flight_[rng.below(in_flight_.size())], in_flight_.back());
  Pending& pending = *in_flight_.back();
  uint32_t part = pending.words;
  if (injected(Bug::kTornLine) && part == kAll) part = rng.one_in(2) ? kLowerHalf : kAll & ~kLowerHalf;
  if (injected(Bug::kFlagBeforePayload) && part == kAll) part = kFlagWord;
  land(pending, part);
  if (pending.words != 0) return true;
  delete in_flight_.back();
  in_flight_.pop_back();
  return true;
}

void LineEngine::land(Pending& pending, uint32_t words) {
  for (int i = 0; i < Line::kFlag; ++i)
    if (words >> i & 1) pending.dst->words[i] = pending.line.words[i];
  if (words & kFlagWord)
    std::atomic_ref(pending.dst->words[Line::kFlag]).store(pending.line.words[Line::kFlag], std::memory_order_release);
  pending.words &= ~words;
}

}  // namespace hep::host
