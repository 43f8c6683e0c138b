#if defined(__clang__) ? __clang_major__ < 14 : __GNUC__ < 11
#error too old
#endif
#include <concepts>
#include <version>
template <std::integral T>
T twice(T x) {
  return x + x;
}
int main() {
  return twice(0);
}
