#include "warp_alu.h"

#include <cstring>
#include <string>
#include <type_traits>
#include <unordered_map>

#include "alu_operations.h"
#include "context.h"

namespace hep::ptxm {
namespace {

// ---- The shapes: result and sources by type, the operation as a type of its own
template <class F, class D, class A>
Flow unary(Context& c, const Ins& i, u32 mask) {
  D* d = c.row<D>(i.o[0]);
  const A* a = c.row<A>(i.o[1]);
  each_lane(mask, [&](u32 l) { d[l] = F::apply(a[l]); });
  return Flow::kGo;
}
template <class F, class D, class A, class B>
Flow binary(Context& c, const Ins& i, u32 mask) {
  D* d = c.row<D>(i.o[0]);
  const A* a = c.row<A>(i.o[1]);
  const B* b = c.row<B>(i.o[2]);
  each_lane(mask, [&](u32 l) { d[l] = F::apply(a[l], b[l]); });
  return Flow::kGo;
}
template <class F, class D, class A, class B, class C>
Flow ternary(Context& c, const Ins& i, u32 mask) {
  D* d = c.row<D>(i.o[0]);
  const A* a = c.row<A>(i.o[1]);
  const B* b = c.row<B>(i.o[2]);
  const C* e = c.row<C>(i.o[3]);
  each_lane(mask, [&](u32 l) { d[l] = F::apply(a[l], b[l], e[l]); });
  return Flow::kGo;
}
template <class F, class A>
Flow compare(Context& c, const Ins& i, u32 mask) {
  const A* a = c.row<A>(i.o[1]);
  const A* b = c.row<A>(i.o[2]);
  u32 bits = 0;
  if (mask == ~0u) {
    alignas(8) u8 yes[kLanes];
    for (u32 l = 0; l < kLanes; ++l) yes[l] = F::apply(a[l], b[l]);
    for (u32 k = 0; k < 4; ++k) {
      u64 eight;
      std::memcpy(&eight, yes + 8 * k, 8);
      bits |= u32((eight * 0x0102040810204080u) >> 56) << (8 * k);  // a bit of each byte, in order
    }
  } else {
    for (u32 m = mask; m; m &= m - 1) {
      const u32 l = u32(std::countr_zero(m));
      bits |= u32(F::apply(a[l], b[l])) << l;
    }
  }
  u32& p = c.predicate(i.o[0]);
  p = (p & ~mask) | bits;
  return Flow::kGo;
}
template <class T>
Flow select(Context& c, const Ins& i, u32 mask) {
  T* d = c.row<T>(i.o[0]);
  const T* a = c.row<T>(i.o[1]);
  const T* b = c.row<T>(i.o[2]);
  const u32 p = c.predicate(i.o[3]);
  each_lane(mask, [&](u32 l) { d[l] = p >> l & 1 ? a[l] : b[l]; });
  return Flow::kGo;
}
template <class F>
Flow on_predicates(Context& c, const Ins& i, u32 mask) {
  const u32 a = c.predicate(i.o[1]), b = i.o[2] == kNone ? 0 : c.predicate(i.o[2]);
  u32& d = c.predicate(i.o[0]);
  d = (d & ~mask) | (F::apply(a, b) & mask);
  return Flow::kGo;
}

template <class T>
Flow insert_bits(Context& c, const Ins& i, u32 mask) {  // bfi d, a, b, position, length
  const u32 kBits = 8 * sizeof(T);
  each_lane(mask, [&](u32 l) {
    const T a = c.row<T>(i.o[1])[l], b = c.row<T>(i.o[2])[l];
    const u32 at = c.row<u32>(i.o[3])[l] & 255, n = c.row<u32>(i.o[4])[l] & 255;
    T field = 0, shifted = 0;
    if (at < kBits) {
      field = T((n >= kBits ? T(~T(0)) : T((T(1) << n) - 1)) << at);
      shifted = T(a << at);
    }
    c.row<T>(i.o[0])[l] = T((b & ~field) | (shifted & field));
  });
  return Flow::kGo;
}

Flow extract_bits(Context& c, const Ins& i, u32 mask) {  // bfe.u32 d, a, position, length
  each_lane(mask, [&](u32 l) {
    const u32 at = c.row<u32>(i.o[2])[l] & 255, n = c.row<u32>(i.o[3])[l] & 255;
    const u32 shifted = at < 32 ? c.row<u32>(i.o[1])[l] >> at : 0;
    c.row<u32>(i.o[0])[l] = n >= 32 ? shifted : shifted & ((1u << n) - 1);
  });
  return Flow::kGo;
}

// ---- The table
using Table = std::unordered_map<std::string, AluOp>;

template <class T>
constexpr char width() {
  return char('0' + sizeof(T));
}
template <class T>
const char* same(int n) {  // "444": n operands of one width
  static const std::string s(6, width<T>());
  return s.c_str() + (6 - n);
}
template <class T>
const char* shape(const char* form) {  // 'T' is T's width
  static std::unordered_map<std::string, std::string> made;
  auto [it, fresh] = made.try_emplace(form, form);
  if (fresh)
    for (char& k : it->second) k = k == 'T' ? width<T>() : k;
  return it->second.c_str();
}

template <class T>
void add_comparisons(Table& t, const std::string& type) {
  const char* form = shape<T>("pTT");
  t["setp.eq" + type] = {compare<Eq, T>, form};
  t["setp.ne" + type] = {compare<Ne, T>, form};
  t["setp.lt" + type] = {compare<Lt, T>, form};
  t["setp.le" + type] = {compare<Le, T>, form};
  t["setp.gt" + type] = {compare<Gt, T>, form};
  t["setp.ge" + type] = {compare<Ge, T>, form};
}
template <class T>
void add_moves(Table& t, const std::string& type) {
  t["mov" + type] = {unary<Move, T, T>, same<T>(2)};
  t["selp" + type] = {select<T>, shape<T>("TTTp")};
}
template <class T>
void add_integers(Table& t, const std::string& type) {
  using Two = Flow (*)(Context&, const Ins&, u32);
  const auto two = [&](const char* name, Two run) { t[name + type] = {run, same<T>(3)}; };
  two("add", binary<Add, T, T, T>), two("sub", binary<Sub, T, T, T>), two("mul.lo", binary<Mul, T, T, T>);
  two("div", binary<Div, T, T, T>), two("rem", binary<Rem, T, T, T>);
  two("min", binary<Min, T, T, T>), two("max", binary<Max, T, T, T>);
  if constexpr (sizeof(T) >= 4) two("mul.hi", binary<MulHigh, T, T, T>);
  t["mad.lo" + type] = {ternary<MulAdd, T, T, T, T>, same<T>(4)};
  t["shr" + type] = {binary<Shr, T, T, u32>, shape<T>("TT4")};
  if constexpr (std::is_signed_v<T>) {
    t["neg" + type] = {unary<Neg, T, T>, same<T>(2)};
    t["abs" + type] = {unary<Abs, T, T>, same<T>(2)};
  }
  add_comparisons<T>(t, type), add_moves<T>(t, type);
}
template <class T>
void add_bits(Table& t, const std::string& type) {
  t["and" + type] = {binary<And, T, T, T>, same<T>(3)};
  t["or" + type] = {binary<Or, T, T, T>, same<T>(3)};
  t["xor" + type] = {binary<Xor, T, T, T>, same<T>(3)};
  t["not" + type] = {unary<Not, T, T>, same<T>(2)};
  t["shl" + type] = {binary<Shl, T, T, u32>, shape<T>("TT4")};
  t["shr" + type] = {binary<Shr, T, T, u32>, shape<T>("TT4")};
  t["setp.eq" + type] = {compare<Eq, T>, shape<T>("pTT")};
  t["setp.ne" + type] = {compare<Ne, T>, shape<T>("pTT")};
  add_moves<T>(t, type);
  if constexpr (sizeof(T) >= 4) {
    t["bfi" + type] = {insert_bits<T>, shape<T>("TTT44")};
    t["popc" + type] = {unary<PopCount, u32, T>, shape<T>("4T")};
    t["clz" + type] = {unary<LeadingZeros, u32, T>, shape<T>("4T")};
  }
}
template <class W, class T>
void add_wide(Table& t, const std::string& type) {
  static const std::string mul = {width<W>(), width<T>(), width<T>(), 0},
                           mad = {width<W>(), width<T>(), width<T>(), width<W>(), 0};
  t["mul.wide" + type] = {binary<MulWide<W>, W, T, T>, mul.c_str()};
  t["mad.wide" + type] = {ternary<MulAddWide<W>, W, T, T, W>, mad.c_str()};
}
void add_floats(Table& t) {
  for (const char* round : {"", ".rn"}) {
    const std::string type = std::string(round) + ".f32";
    t["add" + type] = {binary<Add, float, float, float>, "444"};
    t["sub" + type] = {binary<Sub, float, float, float>, "444"};
    t["mul" + type] = {binary<Mul, float, float, float>, "444"};
  }
  t["fma.rn.f32"] = {ternary<Fma, float, float, float, float>, "4444"};
  t["setp.num.f32"] = {compare<Numbers, float>, "p44"};
  t["cvt.rn.bf16x2.f32"] = {binary<RoundPair<RoundBf16>, u32, float, float>, "444"};
  t["cvt.rn.f16x2.f32"] = {binary<RoundPair<RoundF16>, u32, float, float>, "444"};
  t["cvt.f32.f16"] = {unary<WidenF16, float, u16>, "42"};
  add_moves<u32>(t, ".f32");
  add_comparisons<float>(t, ".f32");
}

Table make_table() {
  Table t;
  add_integers<s16>(t, ".s16"), add_integers<u16>(t, ".u16"), add_integers<s32>(t, ".s32");
  add_integers<u32>(t, ".u32"), add_integers<s64>(t, ".s64"), add_integers<u64>(t, ".u64");
  add_bits<u16>(t, ".b16"), add_bits<u32>(t, ".b32"), add_bits<u64>(t, ".b64");
  add_wide<u64, u32>(t, ".u32"), add_wide<s64, s32>(t, ".s32");
  add_wide<u32, u16>(t, ".u16"), add_wide<s32, s16>(t, ".s16");
  add_floats(t);
  t["and.pred"] = {on_predicates<And>, "ppp"};
  t["or.pred"] = {on_predicates<Or>, "ppp"};
  t["xor.pred"] = {on_predicates<Xor>, "ppp"};
  t["not.pred"] = {on_predicates<NotPredicate>, "pp"};
  t["mov.pred"] = {on_predicates<MovePredicate>, "pp"};
  t["bfe.u32"] = {extract_bits, "4444"};
  t["prmt.b32"] = {ternary<Permute, u32, u32, u32, u32>, "4444"};
  for (const char* name : {"cvta.to.global.u64", "cvta.global.u64"}) t[name] = {unary<Move, u64, u64>, "88"};
  return t;
}

template <class W, class V>
Flow convert(Context& c, const Ins& i, u32 mask) {
  W* d = c.row<W>(i.o[0]);
  const V* a = c.row<V>(i.o[1]);
  each_lane(mask, [&](u32 l) { d[l] = static_cast<W>(a[l]); });
  return Flow::kGo;
}
template <class W>
Handler convert_to(IntType from) {
  switch (from.bytes) {
    case 2: return from.sign ? convert<W, s16> : convert<W, u16>;
    case 4: return from.sign ? convert<W, s32> : convert<W, u32>;
    default: return from.sign ? convert<W, s64> : convert<W, u64>;
  }
}
u64 extend(u64 v, u32 bytes, bool sign) {
  if (bytes == 8) return v;
  const u32 shift = 64 - 8 * bytes;
  return sign ? u64(s64(v << shift) >> shift) : v << shift >> shift;
}

}  // namespace

AluOp find_alu(std::string_view opcode) {
  static const Table table = make_table();
  const auto it = table.find(std::string(opcode));
  return it == table.end() ? AluOp{} : it->second;
}

Handler find_convert(IntType to, u8 to_register, IntType from, u8 from_register) {
  if (to.bytes != to_register || from.bytes != from_register) return convert_any;
  switch (to.bytes) {
    case 2: return convert_to<u16>(from);
    case 4: return convert_to<u32>(from);
    default: return convert_to<u64>(from);
  }
}
// bytes, sign: of the result's type; count, strong: of the source's; reg_bytes and offset: of their registers.
Flow convert_any(Context& c, const Ins& i, u32 mask) {
  each_lane(mask, [&](u32 l) {
    const u64 from = extend(c.value(i.o[1], u32(i.offset), l), i.count, i.strong);
    c.set(i.o[0], i.reg_bytes, l, extend(from, i.bytes, i.sign));
  });
  return Flow::kGo;
}
Flow pack(Context& c, const Ins& i, u32 mask) {
  each_lane(mask, [&](u32 l) {
    u64 v = 0;
    for (u32 k = 0; k < i.count; ++k) v |= c.value(i.o[k + 1], i.reg_bytes, l) << (8 * i.reg_bytes * k);
    c.set(i.o[0], i.bytes, l, v);
  });
  return Flow::kGo;
}
Flow unpack(Context& c, const Ins& i, u32 mask) {
  each_lane(mask, [&](u32 l) {
    const u64 v = c.value(i.o[0], i.bytes, l);
    for (u32 k = 0; k < i.count; ++k)
      if (i.o[k + 1] != kNone) c.set(i.o[k + 1], i.reg_bytes, l, v >> (8 * i.reg_bytes * k));
  });
  return Flow::kGo;
}

}  // namespace hep::ptxm
