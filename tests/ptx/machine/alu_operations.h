// What each operation does to one lane's values, as PTX says.
#pragma once
#include <bit>
#include <cmath>
#include <type_traits>

#include "program.h"

namespace hep::ptxm {

template <class T>
T wrap(u64 v) {
  return static_cast<T>(v);
}

struct Move {
  template <class T>
  static T apply(T a) {
    return a;
  }
};
struct Add {
  template <class T>
  static T apply(T a, T b) {
    if constexpr (std::is_floating_point_v<T>)
      return a + b;
    else
      return wrap<T>(u64(a) + u64(b));
  }
};
struct Sub {
  template <class T>
  static T apply(T a, T b) {
    if constexpr (std::is_floating_point_v<T>)
      return a - b;
    else
      return wrap<T>(u64(a) - u64(b));
  }
};
struct Mul {
  template <class T>
  static T apply(T a, T b) {
    if constexpr (std::is_floating_point_v<T>)
      return a * b;
    else
      return wrap<T>(u64(a) * u64(b));
  }
};
struct MulHigh {
  template <class T>
  static T apply(T a, T b) {
    using W = std::conditional_t<std::is_signed_v<T>, __int128, unsigned __int128>;
    return static_cast<T>((W(a) * W(b)) >> (8 * sizeof(T)));
  }
};
template <class W>
struct MulWide {
  template <class T>
  static W apply(T a, T b) {
    return W(W(a) * W(b));
  }
};
struct MulAdd {
  template <class T>
  static T apply(T a, T b, T c) {
    return wrap<T>(u64(a) * u64(b) + u64(c));
  }
};
template <class W>
struct MulAddWide {
  template <class T>
  static W apply(T a, T b, W c) {
    return wrap<W>(u64(W(W(a) * W(b))) + u64(c));
  }
};
// What PTX leaves undefined: all bits, as the hardware's code does.
struct Div {
  template <class T>
  static T apply(T a, T b) {
    if (b == 0) return T(~T(0));
    if constexpr (std::is_signed_v<T>)
      if (b == -1) return wrap<T>(0 - u64(a));
    return T(a / b);
  }
};
struct Rem {
  template <class T>
  static T apply(T a, T b) {
    if (b == 0) return a;
    if constexpr (std::is_signed_v<T>)
      if (b == -1) return 0;
    return T(a % b);
  }
};
struct Min {
  template <class T>
  static T apply(T a, T b) {
    return a < b ? a : b;
  }
};
struct Max {
  template <class T>
  static T apply(T a, T b) {
    return a > b ? a : b;
  }
};
struct And {
  template <class T>
  static T apply(T a, T b) {
    return T(a & b);
  }
};
struct Or {
  template <class T>
  static T apply(T a, T b) {
    return T(a | b);
  }
};
struct Xor {
  template <class T>
  static T apply(T a, T b) {
    return T(a ^ b);
  }
};
struct Not {
  template <class T>
  static T apply(T a) {
    return T(~a);
  }
};
struct NotPredicate {
  static u32 apply(u32 a, u32) { return ~a; }
};
struct MovePredicate {
  static u32 apply(u32 a, u32) { return a; }
};
struct Neg {
  template <class T>
  static T apply(T a) {
    return wrap<T>(0 - u64(a));
  }
};
struct Abs {
  template <class T>
  static T apply(T a) {
    return a < 0 ? wrap<T>(0 - u64(a)) : a;
  }
};
struct Eq {
  template <class T>
  static bool apply(T a, T b) {
    return a == b;
  }
};
struct Ne {
  template <class T>
  static bool apply(T a, T b) {
    return a != b;
  }
};
struct Lt {
  template <class T>
  static bool apply(T a, T b) {
    return a < b;
  }
};
struct Le {
  template <class T>
  static bool apply(T a, T b) {
    return a <= b;
  }
};
struct Gt {
  template <class T>
  static bool apply(T a, T b) {
    return a > b;
  }
};
struct Ge {
  template <class T>
  static bool apply(T a, T b) {
    return a >= b;
  }
};
struct Numbers {  // neither is a NaN
  static bool apply(float a, float b) { return a == a && b == b; }
};
// Shifts by the width or more give zeros, or copies of the sign.
struct Shl {
  template <class T>
  static T apply(T a, u32 n) {
    return n >= 8 * sizeof(T) ? T(0) : T(a << n);
  }
};
struct Shr {
  template <class T>
  static T apply(T a, u32 n) {
    constexpr u32 kTop = 8 * sizeof(T) - 1;
    if constexpr (std::is_signed_v<T>)
      return T(a >> (n > kTop ? kTop : n));
    else
      return n > kTop ? T(0) : T(a >> n);
  }
};
struct PopCount {
  template <class T>
  static u32 apply(T a) {
    return u32(std::popcount(a));
  }
};
struct LeadingZeros {
  template <class T>
  static u32 apply(T a) {
    return u32(std::countl_zero(a));
  }
};
struct Permute {
  static u32 apply(u32 a, u32 b, u32 selector) {
    const u64 both = u64(a) | u64(b) << 32;
    u32 d = 0;
    for (u32 k = 0; k < 4; ++k) {
      const u32 n = selector >> (4 * k) & 15;
      u32 byte = u32(both >> (8 * (n & 7))) & 255;
      if (n & 8) byte = byte & 128 ? 255 : 0;  // its sign instead
      d |= byte << (8 * k);
    }
    return d;
  }
};
// To the nearest, ties to even; a NaN to the one that the ISA names.
struct RoundBf16 {
  static u32 apply(float a) {
    const u32 bits = std::bit_cast<u32>(a), below = bits & 0xffff, kept = bits >> 16;
    if (a != a) return 0x7fff;
    return kept + (below > 0x8000 || (below == 0x8000 && kept % 2 != 0));
  }
};
struct RoundF16 {
  static u32 apply(float a) {
    if (a != a) return 0x7fff;
    const u32 sign = std::signbit(a) ? 0x8000 : 0;
    const double size = std::fabs(double(a));
    if (size >= 65520) return sign | 0x7c00;
    const int exponent = size < 0x1p-14 ? -14 : std::ilogb(size);  // below, steps have one size
    const u32 steps = u32(std::nearbyint(std::ldexp(size, 10 - exponent)));
    return sign + (u32(exponent + 14) << 10) + steps;  // 1024 steps and more carry into the exponent
  }
};
template <class Round>
struct RoundPair {  // the first source becomes the upper half
  static u32 apply(float upper, float lower) { return Round::apply(upper) << 16 | Round::apply(lower); }
};
struct WidenF16 {
  static float apply(u16 a) {
    const u32 exponent = a >> 10 & 31, steps = a & 1023;
    float size = std::ldexp(float(exponent ? steps + 1024 : steps), (exponent ? int(exponent) : 1) - 25);
    if (exponent == 31) size = std::bit_cast<float>(steps ? 0x7fffffffu : 0x7f800000u);
    return steps && exponent == 31 ? size : std::copysign(size, a & 0x8000 ? -1.f : 1.f);
  }
};
struct Fma {
  static float apply(float a, float b, float c) { return std::fmaf(a, b, c); }
};

}  // namespace hep::ptxm
