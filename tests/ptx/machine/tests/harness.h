// Small kernels, written here, on the machine: a body is put between a module's lines, run, and what it left and what
// was reported is looked at.
#pragma once
#include <cstdio>
#include <functional>
#include <string>
#include <vector>

#include "../machine.h"

namespace hep::ptxm::test {

struct Case {
  std::string name;
  std::function<void()> run;
};
std::vector<Case>& cases();
struct Add {
  Add(const char* name, std::function<void()> run) { cases().push_back({name, std::move(run)}); }
};
void fail(const char* file, int line, const std::string& what);

// A kernel `k` with one pointer, in %rd1; %r1 is the thread, %r2 the block; sh is 1 KiB of static shared memory.
std::string kernel(const std::string& body, const std::string& more = "");

struct Outcome {
  std::vector<uint64_t> out;  // of 64 words, zero at first
  std::vector<Report> reports;
  Progress last = Progress::kIdle;
  uint64_t thread_instructions = 0;
  bool has(const std::string& kind, const std::string& words = "") const;
  std::string all() const;
};
struct Shape {
  uint32_t grid = 1, block = 32, dynamic = 0;
  bool races = false;
  uint64_t seed = 1;
  uint32_t kernels = 1;  // started at once, on the same memory
  uint32_t devices = 1;  // kernel n is on device n % devices
  bool apart = false;    // and on a GPU of its own where scopes are judged
  uint32_t split_percent = 20;
};
Outcome run(const std::string& text, const Shape& shape = {});
// The same by many seeds, joined: every report, the last memory.
Outcome run_seeds(const std::string& text, Shape shape, uint32_t seeds = 20);

}  // namespace hep::ptxm::test

#define HEP_CASE(name)                                          \
  static void case_##name();                                    \
  static ::hep::ptxm::test::Add add_##name(#name, case_##name); \
  static void case_##name()
#define HEP_EXPECT(what, shown)                                                                        \
  do {                                                                                                 \
    if (!(what)) ::hep::ptxm::test::fail(__FILE__, __LINE__, std::string(#what) + "\n    " + (shown)); \
  } while (0)
