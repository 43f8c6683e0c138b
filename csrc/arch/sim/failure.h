// How a simulated world ends badly.
#pragma once
#include <stdexcept>
#include <string>

namespace hep::sim {

struct Lane;

// A rule of the machine was broken, at a line of a role.
class RuleError : public std::logic_error {
 public:
  RuleError(const char* rule, const std::string& what) : std::logic_error(what), rule_(rule) {}
  const char* rule() const noexcept { return rule_; }

 private:
  const char* rule_;
};

// A result that the oracle does not expect; thrown by a rank's program.
class WrongResult : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

// what() = "<rule>: <detail> (rank 1, block 0, role g2s, chunk 3; g2s.h:55)"
[[noreturn]] void throw_rule(const Lane& lane, const char* rule, const std::string& detail);
std::string lane_text(const Lane& lane);  // "rank 1, block 0, role g2s"
std::string wait_text(const Lane& lane);  // "... waits at stage_full for ..., stage_fifo.h:114"

struct Failure {
  std::string kind;  // "" = none; deadlock, rule, wrong, deadline, error
  std::string rule;
  std::string what;  // one line, or the wait-for graph
};

}  // namespace hep::sim
