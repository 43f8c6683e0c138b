// The memory model of the tests: as weak as the GPU's, and it says which rule was broken. Loads land late
// and in any order; stores mostly at the last legal moment; generic and async accesses see different bytes
// until publish_shared. Rules and state are in checked_memory; here are the barrier transitions, which
// depend on the executor.
#pragma once
#include "arch/host/checked_memory.h"
#include "arch/host/plain_model.h"

namespace hep::host {

template <class ExecOf>
struct CheckedModel {
  using Exec = ExecOf;
  using Plain = PlainModel<Exec>;
  static constexpr bool kChecked = true;
  using Lane = CheckedLane;
  using Block = CheckedBlock;

  class World {
   public:
    explicit World(uint64_t seed) : seed_(seed), memory_(&land) {}
    AsyncEngine* engine() { return &memory_; }
    AsyncMemory& memory() { return memory_; }
    uint64_t seed() const { return seed_; }
    void adopt(Block& block) { block.prepare(seed_ + ++num_blocks_); }

   private:
    uint64_t seed_, num_blocks_ = 0;
    AsyncMemory memory_;
  };

  template <int kLanes>
  static void lane_begins(Lane& me, World& world) {
    me.prepare(kLanes, world.memory(), world.seed());
  }
  static void lane_returns(Lane& me) { me.returns(); }
  static void step(Lane& me) { Exec::step(me); }
  static void meets_warp(Lane& me, bool electing) {
    me.meets_warp(electing);
    step(me);
  }
  static void meets_group(Lane& me, int id, int num_warps) {
    me.meets_group(id, num_warps);
    step(me);
  }
  template <class T>
  static void flag_access(Lane& me, const T* flag) {
    me.check_global(flag, sizeof *flag, "flag access");
  }

  static void mbar_init(Lane& me, Mbarrier& bar, uint32_t arrivals, bool guards_refill) {
    CheckedBlock::Barrier& known = me.shared().barrier(me, bar, "mbar_init", false);
    if (arrivals < 1 || arrivals > mbar::kMaxArrivals) {
      throw_protocol(me, Rule::kBarrierState, "mbar_init with " + std::to_string(arrivals) + " arrivals");
    }
    const size_t at = static_cast<size_t>(reinterpret_cast<std::byte*>(&bar) - me.shared().smem);
    me.shared().check_zero(me, me.shared().loading, {at, sizeof bar}, Rule::kLoadInFlight, "mbar_init",
                           "while a bulk load into it is in flight");
    // Atomic, because a lane that has not been told yet may look (and be told that this is not allowed).
    std::atomic_ref(bar.word).store(mbar::fresh(arrivals, guards_refill), std::memory_order_relaxed);
    poke(known.live, uint16_t{1});
  }
  static void mbar_arrive(Lane& me, Mbarrier& bar) { arrive(me, bar, 0, "mbar_arrive"); }
  static void mbar_arrive_expect_tx(Lane& me, Mbarrier& bar, uint32_t bytes) {
    arrive(me, bar, bytes, "mbar_arrive_expect_tx");
  }
  static void mbar_wait(Lane& me, Mbarrier& bar, uint32_t parity, const WaitInfo& info) {
    step(me);
    uint16_t& waiting = me.shared().barrier(me, bar, "mbar_wait").waiting[parity & 1];
    check_parity(me, parity);
    bump(waiting, 1);
    try {
      Exec::wait(me, {&bar.word, parity, true}, info);
      bump(waiting, -1);
    } catch (const DeadlineError&) {
      const uint64_t w = peek(bar.word);
      if (mbar::pending(w) != 0 || mbar::tx(w) <= 0 || mbar::loads(w) != 0) throw;
      throw_protocol(me, Rule::kExpectTx,
                     std::string(site_name(info.site)) + " waits for " + std::to_string(mbar::tx(w)) +
                         " announced bytes nobody loads");
    }
  }
  static bool mbar_test(Lane& me, Mbarrier& bar, uint32_t parity) {
    step(me);
    me.shared().barrier(me, bar, "mbar_test");
    check_parity(me, parity);
    return WaitFor{&bar.word, parity, true}.met();
  }

  static void bulk_g2s(Lane& me, void* dst, const void* src, uint32_t bytes, Mbarrier& bar) {
    step(me);
    const Load load = me.begin_load(dst, src, bytes, bar);
    Exec::swap_word(bar.word, std::memory_order_relaxed, &mbar::add_load);
    me.loads->push(load);
  }
  static void bulk_s2g(Lane& me, void* dst, const void* src, uint32_t bytes) { me.begin_store(dst, src, bytes); }
  static void bulk_commit(Lane& me) {
    me.commit();
    step(me);
  }
  static void bulk_wait_read(Lane& me, int newest) {
    step(me);
    me.wait_read(newest);
  }
  static void bulk_wait(Lane& me, int newest) {
    step(me);
    me.wait_written(newest);
  }
  static void publish_shared(Lane& me) { me.publish(); }

  // What the lanes of a line leave in their warp, the flag's lane takes; the line lands when it may.
  static void st_line_words(Lane& me, Line* dst, int group, int first, const uint64_t* words, int n) {
    me.check_global(dst, sizeof *dst, "st_line");
    std::memcpy(me.line_of_warp(group).words + first, words, 8 * size_t(n));
  }
  static void st_line_flag(Lane& me, Line* dst, int group, uint64_t flag) {
    Line& line = me.line_of_warp(group);
    line.words[Line::kFlag] = flag;
    me.lines->push(dst, line);
  }
  static bool ld_line(Lane& me, const Line* src, uint64_t flag, int first, uint64_t* words, int n) {
    me.check_global(src, sizeof *src, "ld_line");
    return Plain::load_line(src, flag, first, words, n);
  }

  template <class T>
  static T ld_shared(Lane& me, const T* p) {
    me.check_load_shared(p, sizeof(T));
    return Plain::load(p);
  }
  template <class T>
  static void st_shared(Lane& me, T* p, const T& value) {
    me.note_store_shared(p, sizeof(T));
    Plain::store(p, value);
  }
  template <class T>
  static T ld_global(Lane& me, const T* p) {
    me.check_global(p, sizeof(T), "ld_global");
    return Plain::load(p);
  }
  template <class T>
  static void st_global(Lane& me, T* p, const T& value) {
    me.check_global(p, sizeof(T), "st_global");
    Plain::store(p, value);
  }

 private:
  static void check_parity(Lane& me, uint32_t parity) {
    if (parity > 1) throw_protocol(me, Rule::kBarrierState, "parity " + std::to_string(parity) + " is neither 0 nor 1");
  }

  static void arrive(Lane& me, Mbarrier& bar, uint32_t bytes, const char* operation) {
    step(me);
    me.shared().barrier(me, bar, operation);
    if (mbar::guards_refill(peek(bar.word)) && !me.touched.empty()) {
      throw_protocol(me, Rule::kUnpublished,
                     std::string(operation) + " on a barrier that guards a refill while " +
                         std::to_string(me.touched.size() * kGranule) +
                         " bytes accessed by this lane are not published");
    }
    const auto is_legal = [=](uint64_t w) {
      return mbar::pending(w) > 0 && mbar::tx(w) + int64_t{bytes} <= mbar::kMaxTx;
    };
    const auto next = [=](uint64_t w) { return is_legal(w) ? mbar::settle(mbar::arrive(mbar::expect(w, bytes))) : w; };
    uint32_t late = 0;
    const uint64_t before = swap_phase(me, me.shared(), bar, next, late);
    if (mbar::pending(before) == 0) {
      throw_protocol(me, Rule::kArriveCount, std::string(operation) + ": the phase already has all its arrivals");
    }
    if (!is_legal(before)) {
      throw_protocol(
          me, Rule::kExpectTx,
          std::string(operation) + ": more than " + std::to_string(mbar::kMaxTx) + " bytes announced in one phase");
    }
    check_phase_end(me, me.shared(), bar, before, next(before), late);
  }

  // Called by whoever drives the launch, never by the lane that issued the load.
  static void land(const Load& load) {
    const auto next = [&](uint64_t w) { return mbar::settle(mbar::land(mbar::drop_load(w), load.bytes)); };
    uint32_t late = 0;
    const uint64_t before = swap_phase(*load.issuer, *load.block, *load.bar, next, late);
    check_phase_end(*load.issuer, *load.block, *load.bar, before, next(before), late);
  }

  // Replaces the barrier's word by next(word); `late`: lanes still inside a wait for the phase before, where this
  // ends a phase. They are counted against the very word that is replaced: once the phase is over, quick lanes of
  // the next one wait for the same parity and are nobody's fault.
  template <class F>
  static uint64_t swap_phase(const LaneBase& me, CheckedBlock& block, Mbarrier& bar, const F& next, uint32_t& late) {
    const uint16_t* waiting = block.barrier(me, bar, "mbar_arrive").waiting;
    return Exec::swap_word(bar.word, std::memory_order_acq_rel, [&](uint64_t word) {
      const uint64_t after = next(word);
      late = mbar::phase(word) == mbar::phase(after) ? 0 : peek(waiting[mbar::phase(after)]);
      return after;
    });
  }

  // Two things must be over when a phase ends.
  // Its loads: if one is still in flight, fewer bytes were announced than loaded, and waiters read memory
  // that is still being written.
  // The waits for the phase before it: parity is one bit, so a lane that has not looked yet sees its own
  // phase open again and never gets away. Lanes of a warp that all wait must meet (elect_one, warp_sync)
  // before one of them does what lets the next phase end.
  static void check_phase_end(const LaneBase& me, const CheckedBlock& block, const Mbarrier& bar, uint64_t before,
                              uint64_t after, uint32_t late) {
    if (mbar::phase(before) == mbar::phase(after)) return;
    if (mbar::loads(after) != 0) {
      throw_protocol(me, Rule::kExpectTx,
                     "a phase ended with " + std::to_string(mbar::loads(after)) +
                         " bulk loads in flight: fewer bytes were announced than loaded");
    }
    if (late != 0) {
      throw_protocol(me, Rule::kLapped,
                     "a phase of the mbarrier at offset " +
                         std::to_string(reinterpret_cast<const std::byte*>(&bar) - block.smem) +
                         " ended while a lane still waits for the phase before it");
    }
  }
};

}  // namespace hep::host
