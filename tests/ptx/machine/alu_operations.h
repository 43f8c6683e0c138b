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
struct Fma {
  static float apply(float a, float b, float c) { return std::fmaf(a, b, c); }
};

}  // namespace hep::ptxm
