// A test header of our own, so that the C++ tests build with a compiler and nothing else.
//   TEST(name) { CHECK(cond); CHECK_EQ(a, b); CHECK_THROWS(ExceptionType, expression); }
// A failed check ends its test. One source file of each program says HEP_TEST_MAIN.
// Program arguments: --filter TEXT runs the tests whose name contains TEXT; --list prints names.
#pragma once
#include <chrono>
#include <cstdio>
#include <cstring>
#include <exception>
#include <functional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace hep::check {

struct Failure : std::runtime_error {
  using std::runtime_error::runtime_error;
};
struct Test {
  std::string name;
  std::function<void()> body;
};
inline std::vector<Test>& tests() {
  static std::vector<Test> all;
  return all;
}
// For families of tests: `static hep::check::Register r("name<4>", [] { ... });`
struct Register {
  Register(std::string name, std::function<void()> body) { tests().push_back({std::move(name), std::move(body)}); }
};
[[noreturn]] inline void fail(const char* file, int line, const std::string& what) {
  throw Failure(std::string(file) + ":" + std::to_string(line) + ": " + what);
}
template <class A, class B>
void equal(const A& a, const B& b, const char* text, const char* file, int line) {
  if (a == b) return;
  std::ostringstream os;
  os << text << ": " << a << " != " << b;
  fail(file, line, os.str());
}

inline int main(int argc, char** argv) {
  std::string filter;
  bool list = false;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--filter") == 0 && i + 1 < argc)
      filter = argv[++i];
    else if (std::strcmp(argv[i], "--list") == 0)
      list = true;
    else
      return std::fprintf(stderr, "usage: %s [--list] [--filter TEXT]\n", argv[0]), 2;
  }
  int passed = 0, failed = 0;
  for (const Test& test : tests()) {
    if (test.name.find(filter) == std::string::npos) continue;
    if (list) {
      std::printf("%s\n", test.name.c_str());
      continue;
    }
    std::string error;
    const auto start = std::chrono::steady_clock::now();
    try {
      test.body();
    } catch (const std::exception& e) {
      error = e.what();
    } catch (...) {
      error = "an exception that is no std::exception";
    }
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
    if (took.count() > 2) std::printf("slow   %s: %.1f s\n", test.name.c_str(), took.count());
    if (!error.empty()) std::printf("FAILED %s\n  %s\n", test.name.c_str(), error.c_str());
    error.empty() ? ++passed : ++failed;
  }
  if (!list) std::printf("%d passed, %d failed\n", passed, failed);
  return failed != 0 || (!list && passed == 0);  // a filter that matches nothing is a mistake
}

}  // namespace hep::check

#define HEP_TEST_MAIN                    \
  int main(int argc, char** argv) {      \
    return hep::check::main(argc, argv); \
  }
#define TEST(name)                                                 \
  static void test_##name();                                       \
  static hep::check::Register register_##name(#name, test_##name); \
  static void test_##name()
#define CHECK(cond)                                                        \
  do {                                                                     \
    if (!(cond)) hep::check::fail(__FILE__, __LINE__, "CHECK(" #cond ")"); \
  } while (0)
#define CHECK_EQ(a, b) hep::check::equal((a), (b), "CHECK_EQ(" #a ", " #b ")", __FILE__, __LINE__)
#define CHECK_THROWS(type, ...)                                                                  \
  do {                                                                                           \
    bool threw_ = false;                                                                         \
    try {                                                                                        \
      __VA_ARGS__;                                                                               \
    } catch (const type&) {                                                                      \
      threw_ = true;                                                                             \
    }                                                                                            \
    if (!threw_) hep::check::fail(__FILE__, __LINE__, "CHECK_THROWS(" #type "): " #__VA_ARGS__); \
  } while (0)
