// Lines: 128 bytes that eight neighbouring lanes store or load by one strong vector of 16 bytes each. PTX promises
// nothing of them as a whole. Hardware makes one transaction of what a warp's lanes do by the same instruction, and
// lanes that a bar.warp.sync has brought together go on together until a branch parts them. The machine keeps to that,
// and reports a line that its lanes do not make up together, or that lies otherwise: it could be seen torn.
#include <algorithm>
#include <cstring>

#include "impl.h"

namespace hep::ptxm {
namespace {

constexpr u32 kLineBytes = 128, kVector = 16, kLineLanes = kLineBytes / kVector;
constexpr u32 kOneLine = (1u << kLineLanes) - 1;
constexpr u32 kReach = 64;  // instructions between the meeting and the access: the address and whether there is one

std::string lanes_of(u32 mask) {
  std::string s;
  for (; mask; mask &= mask - 1) s += (s.empty() ? "" : ", ") + std::to_string(std::countr_zero(mask));
  return s;
}

}  // namespace

void mark_lines(Program& program) {
  for (const Function& f : program.functions)
    for (u32 at = f.begin; at < f.end; ++at) {
      if (!program.code[at].of_line) continue;
      for (u32 k = at; k-- > f.begin && at - k <= kReach;)
        if (program.code[k].run == warp_meeting && program.code[k].offset == kWarpSync) {
          for (u32 n = k + 1; n <= at; ++n) program.code[n].to_line = true;
          break;
        }
    }
}

void check_line(Context& c, const Ins& i, u32 mask, const u64* base, bool store) {
  // Lanes that have left load nothing; a store without theirs is a line without their words.
  const u32 whole = store ? ~0u : c.warp->live;
  const char* verb = store ? "stored" : "loaded";
  for (u32 first = 0; first < kLanes; first += kLineLanes) {
    const u32 here = mask >> first & kOneLine, all = whole >> first & kOneLine;
    if (!here) continue;
    const u32 leader = first + u32(std::countr_zero(here));
    if ((here & all) != all) {
      c.machine->report("line", {*c.warp, leader}, &i,
                        std::string("a line is ") + verb + " without lanes " + lanes_of((all & ~here) << first) +
                            " of its eight: it can be seen torn");
      continue;
    }
    const u64 begin = base[leader] + u64(i.offset) - kVector * (leader - first);
    for (u32 lane = first; lane < first + kLineLanes; ++lane)
      if ((mask >> lane & 1) &&
          (begin % kLineBytes || base[lane] + u64(i.offset) != begin + kVector * (lane - first))) {
        c.machine->report("line", {*c.warp, lane}, &i,
                          std::string("eight lanes together ") + (store ? "store" : "load") +
                              " what is not one aligned line of 128 bytes, in the order of its lanes");
        break;
      }
  }
}

// Another process may store the line meanwhile, ascending: whoever looks at the flag first has the words that came
// before it.
void take_line(Context& c, const Ins& i, u32 mask, const u64* base) {
  for (u32 lane = kLanes; lane-- > 0;)
    if (mask >> lane & 1) {
      const u64* p = reinterpret_cast<const u64*>(base[lane] + u64(i.offset));
      for (u32 k = 2; k-- > 0;)
        if (const u64 v = __atomic_load_n(p + k, __ATOMIC_ACQUIRE); i.o[k] != kNone) c.set(i.o[k], 8, lane, v);
    }
}

}  // namespace hep::ptxm
