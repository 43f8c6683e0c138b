// Lines under way, on the checked executors: each lands later, in any order, whole. Two mutants break that: a machine
// whose lines tear.
#pragma once
#include <atomic>
#include <vector>

#include "arch/host/rng.h"
#include "arch/host/scheduler.h"
#include "layout/line.h"

namespace hep::host {

class LineEngine : public AsyncEngine {
 public:
  ~LineEngine() override;  // what is still under way lands: a kernel that has ended has stored its lines
  void push(Line* dst, const Line& line);
  bool complete_one(Rng& rng) override;

 private:
  struct Pending {
    Line* dst;
    Line line;
    uint32_t words;  // that have not landed, a bit each
    Pending* next;
  };
  void collect();
  static void land(Pending& pending, uint32_t words);

  std::atomic<Pending*> inbox_ = nullptr;
  std::vector<Pending*> in_flight_;
};

}  // namespace hep::host
