// The memory model users run: bulk copies are memcpy, one view of shared memory, nothing is checked.
// Legal under the contract, which allows a copy to complete at any time, hence also at once.
#pragma once
#include <cstring>
#include <memory>

#include "arch/host/lane.h"
#include "arch/host/mbarrier.h"
#include "arch/host/scheduler.h"
#include "arch/host/stream_copy.h"

namespace hep::host {

template <class ExecOf>
struct PlainModel {
  using Exec = ExecOf;
  static constexpr bool kChecked = false;
  struct Lane : LaneBase {};
  struct Block : BlockBase {};
  struct World {  // per launch
    explicit World(uint64_t) {}
    AsyncEngine* engine() { return nullptr; }
    void adopt(Block&) {}
  };

  template <int kLanes>
  static void lane_begins(Lane&, World&) {}
  static void lane_returns(Lane&) {}
  static void step(Lane&) {}
  static void meets_warp(Lane&, bool) {}
  static void meets_group(Lane&, int, int) {}
  template <class T>
  static void flag_access(Lane&, const T*) {}

  static void mbar_init(Lane&, Mbarrier& bar, uint32_t arrivals, bool guards_refill) {
    bar.word = mbar::fresh(arrivals, guards_refill);
  }
  static void mbar_arrive(Lane&, Mbarrier& bar) {
    Exec::swap_word(bar.word, std::memory_order_acq_rel, [](uint64_t w) { return mbar::settle(mbar::arrive(w)); });
  }
  static void mbar_arrive_expect_tx(Lane&, Mbarrier& bar, uint32_t bytes) {
    Exec::swap_word(bar.word, std::memory_order_acq_rel,
                    [=](uint64_t w) { return mbar::settle(mbar::arrive(mbar::expect(w, bytes))); });
  }
  static void mbar_wait(Lane& me, Mbarrier& bar, uint32_t parity, const WaitInfo& info) {
    Exec::wait(me, {&bar.word, parity, true}, info);
  }
  static bool mbar_test(Lane&, Mbarrier& bar, uint32_t parity) { return WaitFor{&bar.word, parity, true}.met(); }

  static void bulk_g2s(Lane&, void* dst, const void* src, uint32_t bytes, Mbarrier& bar) {
    std::memcpy(dst, src, bytes);
    Exec::swap_word(bar.word, std::memory_order_acq_rel,
                    [=](uint64_t w) { return mbar::settle(mbar::land(w, bytes)); });
  }
  static void bulk_s2g(Lane&, void* dst, const void* src, uint32_t bytes) { stream_copy(dst, src, bytes); }
  static void bulk_commit(Lane&) {}
  static void bulk_wait_read(Lane&, int) {}
  static void bulk_wait(Lane&, int) { stream_fence(); }
  static void publish_shared(Lane&) {}

  // The words of a lane, without the flag; `group`: which of the warp's lines it is.
  static void st_line_words(Lane&, Line* dst, int, int first, const uint64_t* words, int n) {
    std::memcpy(dst->words + first, words, 8 * size_t(first + n == Line::kWords ? n - 1 : n));
  }
  static void st_line_flag(Lane&, Line* dst, int, uint64_t flag) {
    std::atomic_ref(dst->words[Line::kFlag]).store(flag, std::memory_order_release);
  }
  static bool ld_line(Lane&, const Line* src, uint64_t flag, int first, uint64_t* words, int n) {
    return load_line(src, flag, first, words, n);
  }
  static bool load_line(const Line* src, uint64_t flag, int first, uint64_t* words, int n) {
    const uint64_t seen = load_word(src->words + Line::kFlag, std::memory_order_acquire);
    const bool has_flag = first + n == Line::kWords;
    if (has_flag) words[n - 1] = seen;
    if (seen != flag) return false;
    std::memcpy(words, src->words + first, 8 * size_t(has_flag ? n - 1 : n));
    return true;
  }

  // memcpy of a constant size is one load or store, and unlike *p it may read what was written as floats.
  template <class T>
  static T load(const T* p) {
    T value;
    std::memcpy(&value, std::assume_aligned<alignof(T)>(p), sizeof value);
    return value;
  }
  template <class T>
  static void store(T* p, const T& value) {
    std::memcpy(std::assume_aligned<alignof(T)>(p), &value, sizeof value);
  }
  template <class T>
  static T ld_shared(Lane&, const T* p) {
    return load(p);
  }
  template <class T>
  static void st_shared(Lane&, T* p, const T& value) {
    store(p, value);
  }
  template <class T>
  static T ld_global(Lane&, const T* p) {
    return load(p);
  }
  template <class T>
  static void st_global(Lane&, T* p, const T& value) {
    store(p, value);
  }
};

}  // namespace hep::host
