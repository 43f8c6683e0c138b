// Every protocol mutant must be caught by the simulator within kMostSeeds random worlds, by a broken rule, a deadlock
// or a wrong result. Prints the table of docs/simulator.md (scripts/sim_mutants.py puts it there).
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "check.h"
#include "mutants.h"
#include "sim/world_spec.h"

#if !defined(HEP_MUTANTS)
#error build this program and the code under test with HEP_MUTANTS
#endif

HEP_TEST_MAIN

namespace hep::test {
namespace {

constexpr int kMostSeeds = 500;
constexpr int kStrategies[] = {-1, int(sim::StrategyKind::kRandom), int(sim::StrategyKind::kPct)};

// Where the unchanged code and every mutant stand; in memory that a child shares with us.
struct Report {
  int seeds = 0;
  bool caught = false;
  char how[160] = "";
};

Report& shared_report() {
  void* p = ::mmap(nullptr, sizeof(Report), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (p == MAP_FAILED) throw std::runtime_error("mmap failed");
  return *new (p) Report;
}

// Runs worlds 1, 2, ... until one fails. In a child: a mutant may crash, which counts as caught.
void hunt(Bug bug, int strategy, Report& report) {
  std::fflush(stdout);
  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(120);
    injected_bug = bug;
    for (int seed = 1; seed <= kMostSeeds && !report.caught; ++seed) {
      report.seeds = seed;
      const sim::WorldResult r = sim::run_world(sim::random_world(uint64_t(seed), strategy), {});
      report.caught = !r.failure.kind.empty();
      const std::string how = r.failure.rule;
      std::snprintf(report.how, sizeof report.how, "%s", how.c_str());
    }
    ::_exit(0);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  if (WIFEXITED(status) && WEXITSTATUS(status) == 0) return;
  report.caught = true;
  std::snprintf(report.how, sizeof report.how, "crash");
}

void check_mutant(Bug bug) {
  std::string row = std::string("| ") + name_of(bug) + " | " + sentence_of(bug);
  std::string how;
  for (const int strategy : kStrategies) {
    Report& report = shared_report();
    hunt(bug, strategy, report);
    const bool caught = report.caught;
    row += " | " + (caught ? std::to_string(report.seeds) : std::string("> ") + std::to_string(kMostSeeds));
    if (how.empty()) how = report.how;
    ::munmap(&report, sizeof report);
    if (!caught && strategy == -1) {
      std::printf("%s | SURVIVED |\n", row.c_str());
      throw check::Failure("survived " + std::to_string(kMostSeeds) + " worlds: " + sentence_of(bug));
    }
  }
  std::printf("%s | %s |\n", row.c_str(), how.c_str());
}

const bool registered = [] {
  check::tests().push_back({"unchanged_code_passes", [] {
                              for (int seed = 1; seed <= kMostSeeds; ++seed) {
                                const sim::WorldResult r = sim::run_world(sim::random_world(uint64_t(seed), -1), {});
                                if (!r.failure.kind.empty())
                                  throw check::Failure("seed " + std::to_string(seed) + ": " + r.failure.what);
                              }
                            }});
  const auto add = [](Bug bug) {
    if (std::find(std::begin(kNeedMoreLanes), std::end(kNeedMoreLanes), bug) != std::end(kNeedMoreLanes)) return;
    check::tests().push_back({std::string("mutant_") + name_of(bug), [bug] { check_mutant(bug); }});
  };
  for (const Bug bug : kWorldBugs) add(bug);
  for (const Bug bug : kSimBugs) add(bug);
  for (const Bug bug : kLatencyBugs) add(bug);
  for (const Bug bug : kLatencyRailBugs) add(bug);
  for (const Bug bug : kCloneBugs) add(bug);
  return true;
}();

}  // namespace
}  // namespace hep::test
