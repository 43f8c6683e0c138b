// Every mutant must be caught by some world: a wrong result, a broken rule, a deadline or a crash. Each runs in a
// child process, attempt after attempt; the unchanged code must pass all the same attempts.
#include "mutants.h"

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>

#include "check.h"
#include "world.h"

#if !defined(HEP_MUTANTS)
#error build this program and the code under test with HEP_MUTANTS
#endif

HEP_TEST_MAIN

namespace hep::test {
namespace {

constexpr int kAttempts = 80;            // for a mutant to be caught in
constexpr double kShortDeadline = 0.25;  // of a wait; doubled while the unchanged code cannot meet four times as much

// Small worlds, with a bias to what protocols get wrong: one slot, one token a chunk, several tiles, skew.
WorldCase attempt(int i) {
  const char* lanes4 = i % 4 == 3 ? "host_checked_mapped" : "host_checked_lanes4";
  CaseLimits limits{3, 3, 6, 12, 3, 6, 0, i % 2 ? lanes4 : "host_checked"};
  if (i % 6 == 5) limits.big_rows_one_in = 1;
  if (i % 6 == 0) {
    limits.max_tokens = 24;
    limits.max_blocks = 2;
  }
  WorldCase w = random_case(7000 + uint64_t(i), limits);
  if (i % 3 == 0) {
    w.rail_slots = 1;
    w.chunk_tokens = i % 6 == 0 ? 4 : 1;
  }
  if (i == 8) return paired_world("host");
  return i % 6 == 1 && i < 24 ? skewed_world(limits.executor) : w;
}

// The same of the latency path: more often than not a rank is a step ahead of another, or tokens go one way only.
WorldCase latency_attempt(int i) {
  CaseLimits limits{1, 4, 4, 10, 3, 10, 0, i % 2 ? "host_checked_lanes4" : "host_checked", true};
  WorldCase w = random_case(9000 + uint64_t(i), limits);
  for (OpCase& op : w.ops) {
    if (i % 3 == 2 || op.latency) continue;
    op.latency = true;
    op.salt = 2 * op.salt + 1001;  // odd, as of every dispatch that may route: weights are the routing's
  }
  return w;
}

// And over nodes.
WorldCase latency_rail_attempt(int i) {
  CaseLimits limits{3, 2, 4, 10, 3, 10, 0, i % 2 ? "host_checked_lanes4" : "host_checked", true};
  WorldCase w = random_case(9500 + uint64_t(i), limits);
  for (OpCase& op : w.ops) {
    if (i % 3 == 2 || op.latency) continue;
    op.latency = true;
    op.salt = 2 * op.salt + 1001;
  }
  return w;
}

using Attempt = WorldCase (*)(int);

// What a child leaves behind, whatever becomes of it.
struct Report {
  int attempts = 0;
  Outcome::Kind kind = Outcome::kRight;
  char what[400] = "";
};

Outcome run_with(Bug bug, WorldCase w, double timeout_s) {
  injected_bug = bug;
  w.timeout_s = timeout_s;
  return run_world(w);
}

// A deadline counts only when it passes again with more time, and the unchanged code meets it: a busy machine is no
// bug.
Outcome run_until_caught(Bug bug, Attempt attempt_of, Report& report) {
  double timeout_s = kShortDeadline;
  for (int i = 0; i < kAttempts; ++i) {
    report.attempts = i + 1;
    for (;;) {
      Outcome outcome = run_with(bug, attempt_of(i), timeout_s);
      if (outcome.kind == Outcome::kDeadline) outcome = run_with(bug, attempt_of(i), 4 * timeout_s);
      if (outcome.kind == Outcome::kRight) break;
      if (outcome.kind != Outcome::kDeadline ||
          run_with(Bug::kNone, attempt_of(i), 4 * timeout_s).kind == Outcome::kRight)
        return outcome;
      timeout_s *= 2;
    }
  }
  return {};
}

template <class F>
int in_child(F&& body) {
  std::fflush(stdout);
  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(120);  // a child that hangs dies
    body();
    ::_exit(0);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  return status;
}

Report& shared_report() {
  void* p = ::mmap(nullptr, sizeof(Report), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (p == MAP_FAILED) throw std::runtime_error("mmap failed");
  return *new (p) Report;
}

void check_mutant(Bug bug, Attempt attempt_of) {
  Report& report = shared_report();
  const auto start = std::chrono::steady_clock::now();
  const int status = in_child([&] {
    const Outcome outcome = run_until_caught(bug, attempt_of, report);
    report.kind = outcome.kind;
    std::snprintf(report.what, sizeof report.what, "%s", outcome.what.c_str());
  });
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  static constexpr const char* kHow[] = {"SURVIVED", "wrong result", "deadline", "rule", "error"};
  const bool crashed = !WIFEXITED(status) || WEXITSTATUS(status) != 0;
  std::printf("%-30s %-12s after %2d worlds, %4.1f s: %s\n", name_of(bug), crashed ? "crash" : kHow[report.kind],
              report.attempts, seconds, sentence_of(bug));
  if (!crashed && report.kind != Outcome::kRight) std::printf("          %.150s\n", report.what);
  if (!crashed && report.kind == Outcome::kRight)
    throw check::Failure("survived " + std::to_string(report.attempts) + " worlds: " + sentence_of(bug));
  ::munmap(&report, sizeof report);
}

const bool registered = [] {
  check::tests().push_back({"unchanged_code_passes", [] {
                              for (int i = 0; i < kAttempts; ++i) check_world(attempt(i));
                              for (int i = 0; i < kAttempts; ++i) check_world(latency_attempt(i));
                              for (int i = 0; i < kAttempts; ++i) check_world(latency_rail_attempt(i));
                            }});
  for (const Bug bug : kWorldBugs)
    check::tests().push_back({std::string("mutant_") + name_of(bug), [bug] { check_mutant(bug, attempt); }});
  for (const Bug bug : kLatencyBugs)
    check::tests().push_back({std::string("mutant_") + name_of(bug), [bug] { check_mutant(bug, latency_attempt); }});
  for (const Bug bug : kLatencyRailBugs)
    check::tests().push_back(
        {std::string("mutant_") + name_of(bug), [bug] { check_mutant(bug, latency_rail_attempt); }});
  return true;
}();

}  // namespace
}  // namespace hep::test
