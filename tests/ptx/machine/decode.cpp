// Statements to instructions. What is not here the machine does not know.
#include <algorithm>
#include <array>

#include "handlers.h"
#include "statement.h"
#include "warp_alu.h"

namespace hep::ptxm {
namespace {

class Decoder {
 public:
  Decoder(const Statement& s, Ins ins, Draft& draft) : s_(s), i_(ins), draft_(draft) {}

  void run() {
    if (!(moves() || arithmetic() || converts() || memory() || atomics() || control() || mbarriers() || bulk()))
      unknown();
    draft_.code.push_back(i_);
  }

 private:
  [[noreturn]] void unknown() const { fail_at(s_.line, "unknown instruction " + std::string(s_.opcode)); }
  [[noreturn]] void bad(const std::string& what) const { fail_at(s_.line, std::string(s_.opcode) + ": " + what); }
  bool is(std::string_view opcode) const { return s_.opcode == opcode; }
  bool begins(std::string_view text) const { return s_.opcode.substr(0, text.size()) == text; }
  const Operand& at(size_t k) const {
    if (k >= s_.operands.size()) bad("too few operands");
    return s_.operands[k];
  }
  void count_operands(size_t n) const {
    if (s_.operands.size() != n)
      bad(std::to_string(s_.operands.size()) + " operands, " + std::to_string(n) + " expected");
  }

  // ---- One operand
  u32 source(const Operand& o, u8 bytes) const {
    if (o.type == Operand::kRegister) {
      if (o.bytes != bytes) bad("register " + std::string(o.text) + " has another width");
      return o.reg;
    }
    if (o.type == Operand::kNumber) return draft_.constant(o.value, bytes);
    bad("operand " + std::string(o.text));
  }
  void read(int k, const Operand& o, u8 bytes) { i_.o[k] = source(o, bytes); }
  void write(int k, const Operand& o, u8 bytes) {
    if (o.type != Operand::kRegister || o.bytes != bytes)
      bad("result " + std::string(o.text) + " is no register of its width");
    i_.o[k] = o.reg;
    i_.defs |= u8(1u << k);
  }
  void address(int k, const Operand& o, u8 bytes) {
    if (o.type != Operand::kAddress) bad("an address is expected");
    i_.o[k] = source(o.parts[0], bytes);
    i_.offset = o.offset;
  }
  void plain_address(int k, const Operand& o, u8 bytes) {
    address(k, o, bytes);
    if (o.offset) bad("an offset in this address");
  }

  // ---- Registers alone
  bool moves() {
    if (s_.words[0] != "mov") return false;
    count_operands(2);
    const Operand &d = at(0), &a = at(1);
    if (a.type == Operand::kSpecial) return special(), true;
    if (d.type != Operand::kVector && a.type != Operand::kVector) return false;
    const bool packs = a.type == Operand::kVector;
    const Operand& parts = packs ? a : d;
    const u8 whole = type_bytes(s_.words.back()), part = u8(whole / parts.parts.size());
    i_.run = packs ? pack : unpack;
    i_.bytes = whole;
    i_.reg_bytes = part;
    i_.count = u8(parts.parts.size());
    if (i_.count > 4 || part < 2) bad("a vector of these parts");
    packs ? write(0, d, whole) : read(0, a, whole);
    for (u32 k = 0; k < i_.count; ++k) {
      const Operand& p = parts.parts[k];
      if (packs)
        read(int(k + 1), p, part);
      else if (p.type != Operand::kSink)
        write(int(k + 1), p, part);
    }
    return true;
  }
  void special() {
    static constexpr std::pair<std::string_view, Special> kSpecials[] = {
        {"%tid.x", kThread},      {"%ntid.x", kBlockSize}, {"%ctaid.x", kBlockIndex}, {"%nctaid.x", kGridSize},
        {"%globaltimer", kTimer}, {"%laneid", kLaneIndex}, {"%tid.y", kZero},         {"%tid.z", kZero},
        {"%ctaid.y", kZero},      {"%ctaid.z", kZero},     {"%ntid.y", kOne},         {"%ntid.z", kOne}};
    for (auto& [name, which] : kSpecials)
      if (at(1).text == name) {
        i_.run = do_special;
        i_.offset = which;
        i_.bytes = type_bytes(s_.words.back());
        return write(0, at(0), i_.bytes);
      }
    bad("unknown special register " + std::string(at(1).text));
  }
  bool arithmetic() {
    const AluOp op = find_alu(s_.opcode);
    if (!op.run) return false;
    i_.run = op.run;
    for (u32 k = 0; op.operands[k]; ++k) {
      const u8 bytes = op.operands[k] == 'p' ? kPredicate : u8(op.operands[k] - '0');
      k ? read(int(k), at(k), bytes) : write(0, at(0), bytes);
      if (!op.operands[k + 1]) count_operands(k + 1);
    }
    return true;
  }
  bool converts() {
    if (s_.words[0] != "cvt") return false;
    if (s_.words.size() != 3) unknown();
    const auto type = [&](std::string_view t) {
      if (t[0] != 'u' && t[0] != 's') unknown();
      return IntType{type_bytes(t), t[0] == 's'};
    };
    const IntType to = type(s_.words[1]), from = type(s_.words[2]);
    count_operands(2);
    if (at(1).type != Operand::kRegister || at(1).bytes < from.bytes || at(0).bytes < to.bytes) bad("its registers");
    i_.run = find_convert(to, at(0).bytes, from, at(1).bytes);
    i_.bytes = to.bytes;
    i_.sign = to.sign;
    i_.count = from.bytes;
    i_.strong = from.sign;
    i_.reg_bytes = at(0).bytes;
    i_.offset = at(1).bytes;
    write(0, at(0), at(0).bytes);
    read(1, at(1), at(1).bytes);
    return true;
  }

  // ---- Memory
  void semantics() {
    for (std::string_view w : s_.words) {
      if (w == "acquire" || w == "acq_rel") i_.acquire = true;
      if (w == "release" || w == "acq_rel") i_.release = true;
      if (w == "relaxed" || w == "volatile") i_.strong = true;
      if (w == "cta") i_.scope = Scope::kCta;
      if (w == "gpu") i_.scope = Scope::kGpu;
      if (w == "sys" || w == "volatile") i_.scope = Scope::kSys;
    }
    i_.strong |= i_.acquire || i_.release;
  }
  // ld.global.cg.v4.u32 and the like: every word must be one that is known.
  void check_words(std::initializer_list<std::string_view> known) const {
    for (size_t k = 1; k + 1 < s_.words.size(); ++k)
      if (std::find(known.begin(), known.end(), s_.words[k]) == known.end()) unknown();
  }
  bool memory() {
    const bool load = s_.words[0] == "ld";
    if (!load && s_.words[0] != "st") return false;
    check_words({"global", "shared", "param", "cg", "relaxed", "acquire", "release", "volatile", "gpu", "sys", "cta",
                 "v2", "v4"});
    count_operands(2);
    semantics();
    const Operand &place = at(load ? 1 : 0), &value = at(load ? 0 : 1);
    const std::string_view type = s_.words.back();
    i_.bytes = type_bytes(type);
    i_.sign = load && type[0] == 's';
    i_.used_bytes = s_.used_bytes;
    if (!i_.bytes) unknown();
    i_.count = s_.has("v4") ? 4 : s_.has("v2") ? 2 : 1;
    if (value.parts.size() != (i_.count > 1 ? i_.count : 0u)) bad("its vector");
    for (u32 k = 0; k < i_.count; ++k) element(int(k), i_.count > 1 ? value.parts[k] : value, load);
    if (!i_.reg_bytes) i_.reg_bytes = i_.bytes < 2 ? 2 : i_.bytes;
    const bool whole =
        i_.reg_bytes == i_.bytes && std::none_of(i_.o, i_.o + i_.count, [](u32 o) { return o == kNone; });
    if (whole && i_.bytes == 4 && i_.count != 2) i_.form = i_.count == 4 ? Form::kFourWords : Form::kWord;
    if (whole && i_.bytes == 8 && i_.count == 1) i_.form = Form::kLong;
    if (s_.has("param")) {
      if (!load || place.param) {  // of a function: a fixed place in the lane's frame
        i_.run = load ? load_argument : store_argument;
        i_.offset = place.offset + (load ? s64(place.parts[0].value) : 0);
        return true;
      }
      i_.run = load_param;
      address(4, place, 8);
    } else if (s_.has("shared")) {
      i_.run = load ? load_shared : store_shared;
      address(4, place, 4);
    } else {
      i_.run = load ? load_global : store_global;
      i_.of_line = i_.strong && i_.count == 2 && i_.bytes == 8;
      address(4, place, 8);
    }
    return true;
  }
  void element(int k, const Operand& o, bool load) {  // registers may be wider than what is in memory
    if (o.type == Operand::kSink && load) return;
    if (o.type == Operand::kNumber && !load) {
      i_.o[k] = draft_.constant(o.value, i_.reg_bytes = std::max<u8>(i_.bytes, 2));
      if (s_.operands[1].parts.size() > 1)
        for (const Operand& p : s_.operands[1].parts)
          if (p.type == Operand::kRegister && p.bytes != i_.reg_bytes) bad("a vector of numbers and wider registers");
      return;
    }
    if (o.type != Operand::kRegister || o.bytes < i_.bytes || o.bytes == kPredicate)
      bad("register " + std::string(o.text));
    if (i_.reg_bytes && i_.reg_bytes != o.bytes) bad("registers of different widths");
    i_.reg_bytes = o.bytes;
    load ? write(k, o, o.bytes) : read(k, o, o.bytes);
  }
  bool atomics() {
    const bool atom = s_.words[0] == "atom";
    if (!atom && s_.words[0] != "red") return false;
    check_words({"global", "relaxed", "acq_rel", "acquire", "release", "cta", "gpu", "sys", "add", "cas"});
    const bool cas = s_.has("cas");
    if (!cas && !s_.has("add")) unknown();
    if (s_.words.back()[0] == 'f' || s_.words.back() == "s64") unknown();
    semantics();
    if (i_.scope == Scope::kNone) i_.scope = Scope::kGpu;  // what PTX says of none
    i_.strong = true;
    i_.bytes = i_.reg_bytes = type_bytes(s_.words.back());
    if (i_.bytes < 4) unknown();
    const size_t first = atom ? 1 : 0;
    count_operands(first + (cas ? 3 : 2));
    if (atom && at(0).type != Operand::kSink) write(0, at(0), i_.bytes);
    address(4, at(first), 8);
    read(1, at(first + 1), i_.bytes);
    if (cas) read(2, at(first + 2), i_.bytes);
    i_.run = cas ? atomic_cas : atomic_add;
    return true;
  }

  // ---- Control and meetings
  bool control() {
    if (is("ret") || is("exit")) return i_.run = is("ret") ? do_return : do_exit, i_.kind = Kind::kCollective, true;
    if (is("nanosleep.u32")) return i_.run = do_nanosleep, i_.kind = Kind::kCollective, read(1, at(0), 4), true;
    if (begins("membar.") || begins("fence.acq_rel.") || begins("fence.sc.")) {
      const std::string_view w = s_.words.back();
      i_.scope = w == "cta" ? Scope::kCta : w == "gl" || w == "gpu" ? Scope::kGpu : Scope::kSys;
      if (w != "cta" && w != "gl" && w != "gpu" && w != "sys") unknown();
      return i_.run = do_fence, true;
    }
    if (is("fence.proxy.async.global") || is("fence.proxy.async.shared::cta") || is("fence.proxy.async"))
      return i_.run = proxy_fence, i_.offset = s_.has("global") ? 2 : is("fence.proxy.async") ? 3 : 1, true;
    if (is("bar.sync") || is("barrier.sync.aligned")) {
      count_operands(1);  // of all threads
      return i_.run = block_barrier, i_.kind = Kind::kCollective, read(1, at(0), 4), true;
    }
    if (is("bar.red.popc.u32")) {
      count_operands(3);
      i_.run = block_barrier;
      i_.kind = Kind::kCollective;
      return write(0, at(0), 4), read(1, at(1), 4), read(2, at(2), kPredicate), true;
    }
    if (is("bar.warp.sync")) return meeting(kWarpSync), read(1, at(0), 4), true;
    if (is("vote.sync.ballot.b32"))
      return meeting(kBallot), write(0, at(0), 4), read(2, at(1), kPredicate), read(1, at(2), 4), true;
    if (is("redux.sync.max.u32") || is("redux.sync.max.s32"))
      return meeting(is("redux.sync.max.u32") ? kLargest : kLargestSigned), write(0, at(0), 4), read(2, at(1), 4),
             read(1, at(2), 4), true;
    if (is("elect.sync")) {
      if (at(0).parts.size() != 2 || at(0).parts[0].type != Operand::kSink) bad("a leader's number");
      return meeting(kElect), write(0, at(0).parts[1], kPredicate), read(1, at(1), 4), true;
    }
    return false;
  }
  void meeting(Meeting which) {
    i_.run = warp_meeting;
    i_.kind = Kind::kCollective;
    i_.offset = which;
  }

  // ---- mbarriers and bulk copies
  bool mbarriers() {
    if (is("mbarrier.init.shared::cta.b64")) return i_.run = mbar_init, address(4, at(0), 4), read(1, at(1), 4), true;
    if (is("mbarrier.arrive.release.cta.shared::cta.b64") ||
        is("mbarrier.arrive.expect_tx.release.cta.shared::cta.b64")) {
      i_.run = mbar_arrive;
      address(4, at(1), 4);  // the state that it returns is not kept: nobody of ours reads it
      if (s_.has("expect_tx")) read(1, at(2), 4);
      return true;
    }
    if (is("mbarrier.try_wait.parity.acquire.cta.shared::cta.b64") ||
        is("mbarrier.test_wait.parity.acquire.cta.shared::cta.b64")) {
      count_operands(3);
      i_.run = mbar_wait;
      i_.sign = s_.words[1] == "try_wait";
      return write(0, at(0), kPredicate), address(4, at(1), 4), read(1, at(2), 4), true;
    }
    return false;
  }
  bool bulk() {
    if (is("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes")) {
      count_operands(4);
      i_.run = bulk_load;
      plain_address(1, at(0), 4);
      plain_address(2, at(1), 8);
      plain_address(4, at(3), 4);
      return read(3, at(2), 4), true;
    }
    if (is("cp.async.bulk.global.shared::cta.bulk_group")) {
      count_operands(3);
      i_.run = bulk_store;
      plain_address(2, at(0), 8);
      plain_address(1, at(1), 4);
      return read(3, at(2), 4), true;
    }
    if (is("cp.async.bulk.commit_group")) return i_.run = bulk_commit, true;
    if (is("cp.async.bulk.wait_group") || is("cp.async.bulk.wait_group.read")) {
      i_.run = bulk_wait;
      i_.kind = Kind::kCollective;
      i_.sign = s_.has("read");
      i_.offset = s64(at(0).value);
      return true;
    }
    return false;
  }

  const Statement& s_;
  Ins i_;
  Draft& draft_;
};

}  // namespace

void decode(const Statement& s, Ins ins, Draft& draft) {
  Decoder(s, ins, draft).run();
}

}  // namespace hep::ptxm
