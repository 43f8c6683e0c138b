// Rows for registers: liveness over basic blocks, then a linear scan. A kernel of ours declares thousands of
// registers; a few hundred rows keep a warp's file in the cache.
//
// Lanes of a warp may be at different places, but each has its own column: sharing a row is a matter of one thread's
// order, as in a real allocation. A guarded write keeps the old value of its register alive.
#include <algorithm>

#include "statement.h"

namespace hep::ptxm {
namespace {

using Bits = std::vector<u64>;
bool has(const Bits& b, u32 k) {
  return b[k >> 6] >> (k & 63) & 1;
}
void add(Bits& b, u32 k) {
  b[k >> 6] |= 1ull << (k & 63);
}

bool leaves(const Ins& i) {
  return i.guard == kNone && (std::string_view(i.name) == "ret" || std::string_view(i.name) == "exit");
}

class Allocator {
 public:
  explicit Allocator(Draft& d) : draft_(d), code_(d.code), words_((d.registers.size() + 63) / 64) {}

  u32 run(u32 first) {
    find_blocks();
    find_liveness();
    find_intervals();
    const u32 bytes = scan(first);
    for (Ins& i : code_) {
      for (u32& o : i.o)
        if (o < kConstant) o = rows_[o];
      if (i.guard != kNone) i.guard = rows_[i.guard];
    }
    return bytes;
  }

 private:
  struct Block {
    u32 begin, end;
    std::vector<u32> next;
    Bits uses, defs, in, out;
  };
  struct Interval {
    u32 reg, from = kNone, to = 0;
  };

  template <class F>
  void each_operand(const Ins& i, F&& f) const {  // f(register, written)
    for (u32 k = 0; k < 6; ++k)
      if (i.o[k] < kConstant) f(i.o[k], bool(i.defs >> k & 1));
  }

  void find_blocks() {
    std::vector<bool> begins(code_.size() + 1);
    begins[0] = true;
    for (u32 k = 0; k < code_.size(); ++k)
      if (code_[k].kind == Kind::kBranch) begins[code_[k].target] = begins[k + 1] = true;
    std::vector<u32> block_of(code_.size() + 1);
    for (u32 k = 0; k < code_.size(); ++k) {
      if (begins[k]) blocks_.push_back({k, k, {}, Bits(words_), Bits(words_), Bits(words_), Bits(words_)});
      blocks_.back().end = k + 1;
      block_of[k] = u32(blocks_.size() - 1);
    }
    for (Block& b : blocks_) {
      const Ins& last = code_[b.end - 1];
      if (last.kind == Kind::kBranch) b.next.push_back(block_of[last.target]);
      const bool falls = !(last.kind == Kind::kBranch && last.guard == kNone) && !leaves(last);
      if (falls && b.end < code_.size()) b.next.push_back(block_of[b.end]);
    }
  }
  void find_liveness() {
    for (Block& b : blocks_)
      for (u32 k = b.begin; k < b.end; ++k) {
        const Ins& i = code_[k];
        if (i.guard != kNone && !has(b.defs, i.guard)) add(b.uses, i.guard);
        each_operand(i, [&](u32 r, bool written) {
          if (!written && !has(b.defs, r)) add(b.uses, r);
        });
        each_operand(i, [&](u32 r, bool written) {
          if (!written) return;
          if (i.guard != kNone && !has(b.defs, r)) add(b.uses, r);
          add(b.defs, r);
        });
      }
    for (bool changed = true; changed;) {
      changed = false;
      for (size_t n = blocks_.size(); n-- > 0;) {
        Block& b = blocks_[n];
        for (u32 next : b.next)
          for (size_t w = 0; w < words_; ++w) b.out[w] |= blocks_[next].in[w];
        for (size_t w = 0; w < words_; ++w) {
          const u64 in = b.uses[w] | (b.out[w] & ~b.defs[w]);
          changed |= in != b.in[w];
          b.in[w] = in;
        }
      }
    }
  }
  void find_intervals() {
    intervals_.resize(draft_.registers.size());
    for (u32 r = 0; r < intervals_.size(); ++r) intervals_[r].reg = r;
    const auto touch = [&](u32 r, u32 at) {
      intervals_[r].from = std::min(intervals_[r].from, at);
      intervals_[r].to = std::max(intervals_[r].to, at);
    };
    for (const Block& b : blocks_) {
      for (u32 k = b.begin; k < b.end; ++k) {
        each_operand(code_[k], [&](u32 r, bool) { touch(r, k); });
        if (code_[k].guard != kNone) touch(code_[k].guard, k);
      }
      for (u32 r = 0; r < intervals_.size(); ++r) {
        if (has(b.in, r)) touch(r, b.begin);
        if (has(b.out, r)) touch(r, b.end);  // into the instruction behind
      }
    }
  }
  u32 scan(u32 first) {
    rows_.assign(draft_.registers.size(), first);
    std::vector<Interval> order;
    for (const Interval& i : intervals_)
      if (i.from != kNone) order.push_back(i);
    std::sort(order.begin(), order.end(), [](const Interval& a, const Interval& b) { return a.from < b.from; });
    std::vector<Interval> active;
    std::vector<u32> free[9];
    u32 end = first;
    for (const Interval& i : order) {
      std::erase_if(active, [&](const Interval& a) {
        if (a.to >= i.from) return false;
        free[draft_.registers[a.reg]].push_back(rows_[a.reg]);
        return true;
      });
      std::vector<u32>& mine = free[draft_.registers[i.reg]];
      const u32 bytes = draft_.registers[i.reg] == kPredicate ? 8 : draft_.registers[i.reg] * kLanes;
      if (mine.empty()) {
        rows_[i.reg] = end;
        end += bytes;
      } else {
        rows_[i.reg] = mine.back();
        mine.pop_back();
      }
      active.push_back(i);
    }
    return (end - first + 63) / 64 * 64;
  }

  Draft& draft_;
  std::vector<Ins>& code_;
  size_t words_;
  std::vector<Block> blocks_;
  std::vector<Interval> intervals_;
  std::vector<u32> rows_;
};

}  // namespace

u32 allocate_rows(Draft& draft, u32 first) {
  return Allocator(draft).run(first);
}

}  // namespace hep::ptxm
