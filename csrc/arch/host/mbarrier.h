// A transaction barrier as one 64-bit word, and its transitions as pure functions. The word is 8 bytes in
// shared memory as on the GPU, so layouts are the same; executors differ only in how they swap it.
//
//   bit 0      phase parity            bits 14-25  arrivals still missing in this phase
//   bit 1      guards_refill           bits 26-39  bulk loads in flight on it (checked model only)
//   bits 2-13  arrivals per phase      bits 40-63  signed: bytes announced minus bytes landed
#pragma once
#include <cstdint>

namespace hep::host {

struct Mbarrier {
  uint64_t word;
};

namespace mbar {

inline constexpr int kCountShift = 2, kPendingShift = 14, kLoadsShift = 26, kTxShift = 40;
inline constexpr uint64_t kFieldMask = 0xfff;  // of count and pending
inline constexpr uint64_t kPendingMask = kFieldMask << kPendingShift;
inline constexpr uint64_t kTxMask = ~uint64_t{0} << kTxShift;
inline constexpr uint32_t kMaxArrivals = 0xfff;
inline constexpr int64_t kMaxTx = (1 << 20) - 1;  // the hardware's limit

constexpr uint64_t fresh(uint32_t arrivals, bool guards_refill) {
  return uint64_t{arrivals} << kPendingShift | uint64_t{arrivals} << kCountShift | uint64_t{guards_refill} << 1;
}
constexpr uint32_t phase(uint64_t w) {
  return w & 1;
}
constexpr bool guards_refill(uint64_t w) {
  return (w & 2) != 0;
}
constexpr uint32_t pending(uint64_t w) {
  return (w >> kPendingShift) & kFieldMask;
}
constexpr uint32_t loads(uint64_t w) {
  return (w >> kLoadsShift) & 0x3fff;
}
constexpr int64_t tx(uint64_t w) {
  return static_cast<int64_t>(w) >> kTxShift;
}

// Ends the phase when nothing is missing.
constexpr uint64_t settle(uint64_t w) {
  if ((w & (kPendingMask | kTxMask)) != 0) return w;
  return (w ^ 1) + (((w >> kCountShift) & kFieldMask) << kPendingShift);
}
constexpr uint64_t arrive(uint64_t w) {
  return w - (uint64_t{1} << kPendingShift);
}
constexpr uint64_t expect(uint64_t w, uint32_t bytes) {
  return w + (uint64_t{bytes} << kTxShift);
}
constexpr uint64_t land(uint64_t w, uint32_t bytes) {
  return w - (uint64_t{bytes} << kTxShift);
}
constexpr uint64_t add_load(uint64_t w) {
  return w + (uint64_t{1} << kLoadsShift);
}
constexpr uint64_t drop_load(uint64_t w) {
  return w - (uint64_t{1} << kLoadsShift);
}

}  // namespace mbar
}  // namespace hep::host
