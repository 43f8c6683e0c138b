// hep::Arch on the simulated machine: a handle to one lane that says at which line of the role it is called.
// One lane per warp; what more lanes would do to each other is the business of the other checked executors.
#pragma once
#include <cstring>
#include <type_traits>
#include <utility>

#include "arch/concept.h"
#include "arch/sim/machine.h"
#include "common/numeric.h"

namespace hep::sim {

class SimArch {
 public:
  using Mbarrier = host::Mbarrier;
  static constexpr int kLanes = 1, kLineLanes = 1, kLineWords = Line::kWords;
  static constexpr int kWarpLanes = 32;  // of a GPU's warp, for which the one lane stands

  explicit SimArch(Lane& lane) : me_(&lane), m_(lane.machine) {}

  int lane() const { return 0; }
  int warp_idx() const { return me_->warp; }
  int num_warps() const { return me_->launch->num_warps; }
  int block_idx() const { return me_->block->idx; }
  int num_blocks() const { return me_->launch->num_blocks; }
  void set_role(Role role) { m_->set_role(*me_, role_name(role)); }
  void did(LoopStep step, Where at = Where::current()) { m_->did(here(at), step); }

  bool elect_one() { return true; }
  void warp_sync() {}
  void group_sync(int id, int warps, Where at = Where::current()) {
    if (warps > 1) m_->meet(here(at), me_->block->group_arrived[id & 15], uint64_t(warps));
  }
  void block_sync(Where at = Where::current()) { m_->meet(here(at), me_->block->arrived, uint64_t(num_warps())); }
  bool warp_whole() { return true; }  // a lane that fails ends its kernel
  bool warp_any(bool yes) { return yes; }
  bool block_whole(Where at = Where::current()) { return block_sync(at), true; }
  bool given_up() const { return false; }  // a rank that fails ends its world

  void mbar_init(Mbarrier& bar, uint32_t arrivals, bool guards_refill, Where at = Where::current()) {
    m_->init_barrier(here(at), bar, arrivals, guards_refill);
  }
  void mbar_arrive(Mbarrier& bar, Where at = Where::current()) { m_->arrive(here(at), bar, 0); }
  void mbar_arrive_expect_tx(Mbarrier& bar, uint32_t bytes, Where at = Where::current()) {
    m_->arrive(here(at), bar, bytes);
  }
  void mbar_wait(Mbarrier& bar, uint32_t parity, const WaitInfo& info, Where at = Where::current()) {
    m_->wait_phase(here(at), bar, parity, info);
  }
  bool mbar_test(Mbarrier& bar, uint32_t parity, Where at = Where::current()) {
    m_->step(here(at));
    return (bar.word ^ parity) & 1;
  }

  void bulk_g2s(void* dst, const void* src, uint32_t bytes, Mbarrier& bar, Where at = Where::current()) {
    m_->load(here(at), dst, src, bytes, bar);
  }
  void bulk_s2g(void* dst, const void* src, uint32_t bytes, Where at = Where::current()) {
    m_->store(here(at), dst, src, bytes);
  }
  void bulk_commit(Where at = Where::current()) { m_->commit(here(at)); }
  template <int kNewest>
  void bulk_wait_read(Where at = Where::current()) {
    m_->wait_stores(here(at), kNewest, false);
  }
  template <int kNewest>
  void bulk_wait(Where at = Where::current()) {
    m_->wait_stores(here(at), kNewest, true);
  }
  void publish_shared() { m_->publish(*me_); }

  template <class T>
  T ld_shared(const T* p, Where at = Where::current()) {
    m_->read_shared(here(at), p, sizeof(T), sizeof(T));
    return load<T>(p);
  }
  template <class T>
  void st_shared(T* p, const std::type_identity_t<T>& v, Where at = Where::current()) {
    m_->write_shared(here(at), p, sizeof(T), sizeof(T));
    std::memcpy(static_cast<void*>(p), &v, sizeof v);
  }
  template <class T>
  T ld_global(const T* p, Where at = Where::current()) {
    if (m_->has_payload(here(at), p)) return m_->load_payload(*me_, p, sizeof(T)), T{};
    m_->read_global(*me_, p, sizeof(T));
    return load<T>(p);
  }
  template <class T>
  void st_global(T* p, const std::type_identity_t<T>& v, Where at = Where::current()) {
    if (m_->write_global(here(at), p, sizeof(T))) std::memcpy(static_cast<void*>(p), &v, sizeof v);
  }

  uint64_t ld_acquire_sys(const uint64_t* flag, Where at = Where::current()) { return look(at, flag, ~0ull); }
  bool flag_reached(const uint64_t* flag, uint64_t value, Where at = Where::current()) {
    return flag_value(flag, value, at) >= value;
  }
  // What it is, for a lane that goes on when it is at least `value`.
  uint64_t flag_value(const uint64_t* flag, uint64_t value, Where at = Where::current()) {
    return look(at, flag, value);
  }
  void st_release_sys(uint64_t* flag, uint64_t value, Where at = Where::current()) {
    m_->fence_sys(here(at));
    m_->set_flag(here(at), flag, value, false);
  }
  void add_release_sys(uint64_t* flag, uint64_t value, Where at = Where::current()) {
    m_->fence_sys(here(at));
    m_->set_flag(here(at), flag, value, true);
  }
  uint64_t add_acq_rel_rank(uint64_t* word, uint64_t value, Where at = Where::current()) {
    return add(at, word, value);
  }
  uint64_t add_acq_rel_sys(uint64_t* word, uint64_t value, Where at = Where::current()) {
    return m_->add_rank(here(at), word, value, me_->launch->count_ps);
  }
  uint64_t take_rank(uint64_t* word, Where at = Where::current()) { return add(at, word, 1); }
  uint64_t clock_ns() { return 0; }
  void count_rank(uint64_t* word, uint64_t value) { *word += value; }  // nobody looks before the kernel has ended
  void wait_ge_sys(const uint64_t* flag, uint64_t value, const WaitInfo& info, Where at = Where::current()) {
    m_->wait_word(here(at), flag, value, info, m_->config().costs.poll_ps);
  }
  template <class Flag>
  void st_release_sys_each(int n, const Flag& flag, uint64_t value, Where at = Where::current()) {
    m_->fence_sys(here(at));  // one for all of them
    for (int i = 0; i < n; ++i) m_->set_flag(here(at), flag(i), value, false);
  }
  template <class Flag, class Value>
  void add_release_sys_each(int n, const Flag& flag, const Value& value, Where at = Where::current()) {
    m_->fence_sys(here(at));
    for (int i = 0; i < n; ++i)
      if (const uint64_t v = value(i)) m_->set_flag(here(at), flag(i), v, true);
  }
  template <class Flag>
  void st_release_sys_warp(int n, const Flag& flag, uint64_t value, Where at = Where::current()) {
    st_release_sys_each(n, flag, value, at);
  }
  template <class Flag, class Info, class Waited = NotCounted>  // its waits are in its traces
  void wait_ge_sys_each(int n, const Flag& flag, uint64_t value, const Info& info, const Waited& = {},
                        Where at = Where::current()) {
    for (int i = 0; i < n; ++i) wait_ge_sys(flag(i), value, info(i), at);
  }
  template <class Flag, class Info, class Waited = NotCounted>
  bool wait_ge_sys_warp(int n, const Flag& flag, uint64_t value, const Info& info, const Waited& = {},
                        Where at = Where::current()) {
    const CostModel& costs = m_->config().costs;  // kWarpLanes look at once, and fence when they have seen all
    for (int i = 0; i < n; ++i) m_->wait_word(here(at), flag(i), value, info(i), i % kWarpLanes ? 0 : costs.poll_ps);
    if (m_->timed()) m_->spend(*me_, costs.fence_ps);
    return true;
  }
  static constexpr bool kMayLookTogether = true;
  bool looks_together() const { return m_->config().looks_together; }
  template <class Flag, class Info>
  void acquire_ge_sys_warp(int n, const Flag& flag, uint64_t value, const Info& info, Where at = Where::current()) {
    for (int first = 0; first < n; first += kWarpLanes) {  // which look at once, at what memory says that they are to
      Ps look = 2 * m_->config().costs.poll_ps;
      for (int i = first; i < n && i < first + kWarpLanes; ++i)
        if (const uint64_t* const word = flag(i)) m_->wait_word(here(at), word, value, info(i), std::exchange(look, 0));
    }
  }
  // A line that is stored lands when it may.
  void st_line(Line* dst, const uint64_t* words, uint64_t flag, Where at = Where::current()) {
    if (dst) m_->store_line(here(at), dst, words, flag);
  }
  bool ld_line(const Line* src, uint64_t flag, uint64_t* words, Where at = Where::current()) {
    return !src || m_->look_at_line(here(at), src, flag, words);
  }
  void poll_idle(const WaitInfo& info, uint64_t expected, uint64_t seen, Where at = Where::current()) {
    m_->poll(here(at), info, expected, seen);
  }
  void poll_reset() { m_->poll_reset(*me_); }

  // For the simulated rail, which lives in the machine.
  void rail_put(const Where& at, int node, uint64_t offset, const void* src, uint64_t bytes, const uint64_t* flag,
                uint64_t value) {
    m_->put(here(at), node, offset, src, bytes, flag, value);
  }
  uint64_t rail_signal(const Where& at, const uint64_t* flag, uint64_t value) {
    return m_->look(here(at), flag, value, me_->launch->signal_ps);
  }

 private:
  Lane& here(const Where& at) const {
    me_->where = at;
    return *me_;
  }
  uint64_t look(const Where& at, const uint64_t* flag, uint64_t value) {
    return m_->look(here(at), flag, value, m_->config().costs.poll_ps);
  }
  uint64_t add(const Where& at, uint64_t* word, uint64_t value) {
    return m_->add_rank(here(at), word, value, m_->config().costs.poll_ps);
  }
  template <class T>
  static T load(const T* p) {
    T value;
    std::memcpy(&value, p, sizeof value);
    return value;
  }

  Lane* me_;
  Machine* m_;
};

static_assert(Arch<SimArch>);

// Whole tiles at once: the lane owns the tile. Same operations on the same elements in the same order.
struct SimTile {
  static void add_row(const TileRow& row, float* acc);
};

}  // namespace hep::sim

namespace hep {
template <>
struct TileMath<sim::SimArch> : sim::SimTile {
  static constexpr bool kOffered = true, kReadsRows = false;
};
}  // namespace hep
