// What the tests of the host executors share: the list of executors and a small grid to run on them.
#pragma once
#include <string>

#include "arch/host/launch.h"
#include "check.h"

namespace hep::host::test {

inline constexpr WaitInfo kSite{Site::kTestSite};

inline LaunchConfig grid(int blocks, int warps, size_t smem_bytes = 0, uint64_t seed = 1) {
  LaunchConfig config;
  config.num_blocks = blocks;
  config.num_warps = warps;
  config.smem_bytes = smem_bytes;
  config.seed = seed;
  config.timeout_s = 20;  // generous: a slow machine is no failure
  return config;
}

template <class A>
inline constexpr bool kIsChecked = A::Model::kChecked;

// ThreadSanitizer does not follow stack switches, so its build runs the thread executors only.
#if defined(__SANITIZE_THREAD__)
#define HEP_FIBERS(...)
#else
#define HEP_FIBERS(...) __VA_ARGS__
#endif

#define HEP_REGISTER(body, A) static hep::check::Register body##_##A(#body "<" #A ">", &body<A>)

using CheckedFibers1 = CheckedFibers<1>;
using CheckedFibers4 = CheckedFibers<4>;
using CheckedThreads1 = CheckedThreads<1>;
using CheckedThreads4 = CheckedThreads<4>;
using PlainThreads1 = PlainThreads<1>;
using PlainThreads4 = PlainThreads<4>;

// Registers `template <class A> void body()` for every checked executor, or for every executor.
#define ON_CHECKED(body)                                                              \
  HEP_FIBERS(HEP_REGISTER(body, CheckedFibers1); HEP_REGISTER(body, CheckedFibers4);) \
  HEP_REGISTER(body, CheckedThreads1);                                                \
  HEP_REGISTER(body, CheckedThreads4)
#define ON_ALL(body)                           \
  HEP_FIBERS(HEP_REGISTER(body, PlainFibers);) \
  HEP_REGISTER(body, PlainThreads1);           \
  HEP_REGISTER(body, PlainThreads4);           \
  ON_CHECKED(body)

}  // namespace hep::host::test
