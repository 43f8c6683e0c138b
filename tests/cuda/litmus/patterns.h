// Litmus patterns by the operations of CudaArch: a writer on one device, a reader on another, a row a round.
//
//     writer    waits for the credit of round r - slots ─ stores the row of round r ─ flag = r
//     reader    waits for flag r ─ reads the row of round r ─ looks where that of round r + slots will lie ─ credit = r
//
// Every word of a row says which round, pair and place in the row it is of, so that a reader which sees the flag of a
// round knows a word of another. Rows of a pair lie at places that a multiplication scatters. The look puts what lay
// there before into the reader's caches; the credit licenses the overwrite behind it.
#pragma once
#include "arch/sm90/cuda_arch.h"
#include "layout/line.h"

namespace hep::litmus {

inline constexpr uint32_t kRowWords = 128, kRowBytes = 8 * kRowWords, kLines = kRowWords / Line::kWords;
inline constexpr uint32_t kFlagWords = 16;  // a flag has a line of memory to itself
static_assert(kRowBytes % sizeof(Line) == 0);

// What a writer does, and what it leaves out.
enum class Send {
  kGeneric,           // generic stores by all lanes, a release
  kGenericRelaxed,    // a relaxed store in place of the release
  kBulk,              // a bulk store, bulk_wait<0>, a release
  kBulkUnwaited,      // the release before the wait
  kTwoBlocks,         // half a row each of two blocks, a chain of add_acq_rel_rank, a release by its last
  kTwoBlocksNoChain,  // the chain's atomics relaxed
  kLines,             // st_line
  kTornLines,         // a line's flag before its payload
};
enum class Receive {
  kGeneric,      // an acquire by every lane, generic loads
  kBulk,         // wait_ge_sys and a bulk load by one lane
  kBulkNoFence,  // without the fence between the proxies
  kLines,        // ld_line
  kEarlyCredit,  // as kGeneric, the credit told before the row is read
};
// When a stage's reader says that it may be filled again.
enum class Pass { kPublished, kUnpublished, kEarly };  // read and published; only read; before it is read

constexpr bool two_blocks(Send s) {
  return s == Send::kTwoBlocks || s == Send::kTwoBlocksNoChain;
}

struct Count {
  uint64_t old_words, others, first_round, first_word, first_seen, looked;
};
struct Params {
  uint64_t* rows;     // [pairs, places, kRowWords]
  uint64_t* flags;    // [pairs, kFlagWords], on the reader's device
  uint64_t* credits;  // the same on the writer's, and so
  uint64_t* met;      // what two blocks count
  Count* counts;      // [pairs]
  uint64_t rounds;
  uint32_t slots, step, places;  // rounds under way at once; an odd number; a power of two, at least the slots

  HEP_DEVICE uint64_t* row(uint32_t pair, uint64_t round) const {
    return rows + (uint64_t(pair) * places + (uint32_t(round) * step & (places - 1))) * kRowWords;
  }
  HEP_DEVICE static uint64_t value(uint32_t pair, uint64_t round, uint32_t word) {
    return round << 24 | uint64_t(pair & 0xfff) << 12 | word;
  }
};
struct alignas(128) Shared {
  uint64_t stage[kRowWords];
  CudaArch::Mbarrier full, empty;
};

// Where a lane's words lie in lines that a warp stores or loads at once.
struct LaneOfLine {
  static constexpr uint32_t kAtOnce = CudaArch::kLanes / CudaArch::kLineLanes;
  const uint32_t group, word;
  HEP_DEVICE explicit LaneOfLine(const CudaArch& a)
      : group(uint32_t(a.lane()) / CudaArch::kLineLanes),
        word(uint32_t(a.lane()) % CudaArch::kLineLanes * CudaArch::kLineWords) {}
};

template <Send kSend>
struct Writer {
  CudaArch& a;
  const Params& p;
  Shared& s;

  HEP_DEVICE void run() {
    const uint32_t pair = uint32_t(a.block_idx()) / (two_blocks(kSend) ? 2 : 1);
    for (uint64_t r = 1; r <= p.rounds; ++r) {
      const WaitInfo info{Site::kTestSite, -1, int64_t(r)};
      if (r > p.slots) a.wait_ge_sys(p.credits + pair * kFlagWords, r - p.slots, info);
      a.warp_sync();
      send(pair, r);
    }
    if (a.elect_one()) a.template bulk_wait<0>();
  }

 private:
  HEP_DEVICE void send(uint32_t pair, uint64_t r) {
    uint64_t* flag = p.flags + pair * kFlagWords;
    if constexpr (kSend == Send::kGeneric || kSend == Send::kGenericRelaxed) {
      for (uint32_t i = uint32_t(a.lane()); i < kRowWords; i += CudaArch::kLanes)
        a.st_global(p.row(pair, r) + i, Params::value(pair, r, i));
      a.warp_sync();
      if (!a.elect_one()) return;
      kSend == Send::kGeneric ? a.st_release_sys(flag, r) : ptx::st_relaxed_sys(flag, r);
    } else if constexpr (kSend == Send::kLines || kSend == Send::kTornLines) {
      const LaneOfLine mine(a);
      for (uint32_t line = mine.group; line < kLines; line += LaneOfLine::kAtOnce) {
        auto* dst = reinterpret_cast<Line*>(p.row(pair, r)) + line;
        uint64_t words[CudaArch::kLineWords];
        for (uint32_t i = 0; i < uint32_t(CudaArch::kLineWords); ++i)
          words[i] = Params::value(pair, r, line * Line::kWords + mine.word + i);
        kSend == Send::kLines ? a.st_line(dst, words, r) : torn(dst, words, mine.word, r);
      }
    } else {
      // Half a row of each of two blocks, or all of it.
      const uint32_t half = two_blocks(kSend) ? uint32_t(a.block_idx()) % 2 : 0;
      const uint32_t first = half * (kRowWords / 2), n = two_blocks(kSend) ? kRowWords / 2 : kRowWords;
      if (a.elect_one()) a.template bulk_wait_read<0>();
      a.warp_sync();
      for (uint32_t i = uint32_t(a.lane()); i < n; i += CudaArch::kLanes)
        a.st_shared(s.stage + i, Params::value(pair, r, first + i));
      a.publish_shared();
      a.warp_sync();
      if (!a.elect_one()) return;
      a.bulk_s2g(p.row(pair, r) + first, s.stage, n * 8);
      a.bulk_commit();
      if constexpr (kSend != Send::kBulkUnwaited) a.template bulk_wait<0>();
      if constexpr (two_blocks(kSend)) {
        uint64_t* met = p.met + pair * kFlagWords;
        const uint64_t before = kSend == Send::kTwoBlocks ? a.add_acq_rel_rank(met, 1) : a.take_rank(met);
        if (before % 2 == 0) return;
      }
      a.st_release_sys(flag, r);
    }
  }
  HEP_DEVICE void torn(Line* dst, const uint64_t* words, uint32_t word, uint64_t flag) {
    const bool last = word + CudaArch::kLineWords == Line::kWords;
    if (last) ptx::st_volatile_v2(dst->words + word, words[0], flag);
    a.warp_sync();
    if (!last) ptx::st_volatile_v2(dst->words + word, words[0], words[1]);
  }
};

// What a lane found in rows, against what their round says they hold.
struct Checker {
  CudaArch& a;
  Count count{};

  HEP_DEVICE void compare(uint32_t pair, uint64_t round, uint32_t word, uint64_t seen) {
    if (seen == Params::value(pair, round, word)) return;
    const uint64_t named = seen >> 24;
    if (count.old_words + count.others == 0) {
      count.first_round = round;
      count.first_word = word;
      count.first_seen = seen;
    }
    seen == 0 || (named < round && seen == Params::value(pair, named, word)) ? ++count.old_words : ++count.others;
  }
  // By all lanes of one warp, one after another: the first wrong word is that of the first lane which has one.
  HEP_DEVICE void add_to(Count& sum) {
    for (int lane = 0; lane < CudaArch::kLanes; ++lane) {
      if (lane == a.lane()) {
        if (sum.old_words + sum.others == 0) {
          sum.first_round = count.first_round;
          sum.first_word = count.first_word;
          sum.first_seen = count.first_seen;
        }
        sum.old_words += count.old_words;
        sum.others += count.others;
        sum.looked ^= count.looked;
      }
      a.warp_sync();
    }
  }
};

template <Receive kReceive>
struct Reader {
  CudaArch& a;
  const Params& p;
  Shared& s;
  Checker checker;

  HEP_DEVICE Reader(CudaArch& arch, const Params& params, Shared& shared)
      : a(arch), p(params), s(shared), checker{arch} {}

  HEP_DEVICE void run() {
    const uint32_t pair = uint32_t(a.block_idx());
    for (uint64_t r = 1; r <= p.rounds; ++r) {
      receive(pair, r);
      if constexpr (kReceive == Receive::kEarlyCredit) continue;
      if constexpr (kReceive != Receive::kLines) look(pair, r + p.slots);
      credit(pair, r);
    }
    checker.add_to(p.counts[pair]);
  }

 private:
  HEP_DEVICE void look(uint32_t pair, uint64_t r) {
    for (uint32_t i = uint32_t(a.lane()); i < kRowWords; i += CudaArch::kLanes)
      checker.count.looked ^= a.ld_global(p.row(pair, r) + i);
  }
  HEP_DEVICE void credit(uint32_t pair, uint64_t r) {
    a.warp_sync();
    if (a.elect_one()) a.st_release_sys(p.credits + pair * kFlagWords, r);
  }
  HEP_DEVICE void receive(uint32_t pair, uint64_t r) {
    const uint64_t* flag = p.flags + pair * kFlagWords;
    const WaitInfo info{Site::kTestSite, -1, int64_t(r)};
    if constexpr (kReceive == Receive::kGeneric || kReceive == Receive::kEarlyCredit) {
      a.wait_ge_sys(flag, r, info);
      if constexpr (kReceive == Receive::kEarlyCredit) credit(pair, r);
      for (uint32_t i = uint32_t(a.lane()); i < kRowWords; i += CudaArch::kLanes)
        checker.compare(pair, r, i, a.ld_global(p.row(pair, r) + i));
    } else if constexpr (kReceive == Receive::kLines) {
      const LaneOfLine mine(a);
      for (uint32_t line = mine.group; line < kLines; line += LaneOfLine::kAtOnce) {
        const auto* src = reinterpret_cast<const Line*>(p.row(pair, r)) + line;
        uint64_t words[CudaArch::kLineWords];
        while (!a.ld_line(src, r, words)) a.poll_idle(info, r, 0);
        a.poll_reset();
        for (uint32_t i = 0; i < uint32_t(CudaArch::kLineWords); ++i)
          if (mine.word + i != uint32_t(Line::kFlag))
            checker.compare(pair, r, line * Line::kWords + mine.word + i, words[i]);
      }
    } else {
      a.publish_shared();  // what was read of the stage, before it is filled again
      a.warp_sync();
      if (a.elect_one()) {
        if constexpr (kReceive == Receive::kBulk) {
          a.wait_ge_sys(flag, r, info);
        } else {
          for (uint64_t seen; (seen = ptx::ld_acquire_sys(flag)) < r;) a.poll_idle(info, r, seen);
          a.poll_reset();
        }
        a.mbar_arrive_expect_tx(s.full, kRowBytes);
        a.bulk_g2s(s.stage, p.row(pair, r), kRowBytes, s.full);
      }
      a.mbar_wait(s.full, uint32_t(r + 1) % 2, {Site::kStageFull});
      for (uint32_t i = uint32_t(a.lane()); i < kRowWords; i += CudaArch::kLanes)
        checker.compare(pair, r, i, a.ld_shared(s.stage + i));
    }
  }
};

// Patterns 6 and 7, in one block: warp 0 loads a row into the stage, warp 1 reads it and says that it may be filled
// again. Rows were written before the kernel, each at its round's place; that of the next round lies elsewhere and
// names another round.
template <Pass kPass>
struct Refill {
  CudaArch& a;
  const Params& p;
  Shared& s;

  HEP_DEVICE void run() {
    const uint32_t pair = uint32_t(a.block_idx());
    if (a.warp_idx() == 0) {
      if (a.elect_one()) fill(pair);
      return;
    }
    Checker checker{a};
    for (uint64_t r = 1; r <= p.rounds; ++r) {
      a.mbar_wait(s.full, uint32_t(r + 1) % 2, {Site::kStageFull});
      if constexpr (kPass == Pass::kEarly) pass();
      for (uint32_t i = uint32_t(a.lane()); i < kRowWords; i += CudaArch::kLanes)
        checker.compare(pair, (r - 1) % p.places + 1, i, a.ld_shared(s.stage + i));
      if constexpr (kPass == Pass::kPublished) a.publish_shared();
      if constexpr (kPass != Pass::kEarly) pass();
    }
    checker.add_to(p.counts[pair]);
  }

 private:
  HEP_DEVICE void pass() {
    a.warp_sync();
    if (a.elect_one()) a.mbar_arrive(s.empty);
  }
  HEP_DEVICE void fill(uint32_t pair) {
    for (uint64_t r = 1; r <= p.rounds; ++r) {
      if (r > 1) a.mbar_wait(s.empty, uint32_t(r) % 2, {Site::kStageEmpty});
      a.mbar_arrive_expect_tx(s.full, kRowBytes);
      a.bulk_g2s(s.stage, p.row(pair, r), kRowBytes, s.full);
    }
  }
};

}  // namespace hep::litmus
