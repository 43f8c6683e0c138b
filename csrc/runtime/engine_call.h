// Around every operation of an engine: one at a time, none after a failure.
#pragma once
#include <stdexcept>

#include "arch/host/errors.h"
#include "runtime/engine.h"

namespace hep {

// std::invalid_argument when no kernel could place the routing as the call says.
void require_placeable(const RoutingInput& in, const PlaceCall& c, uint32_t num_experts);

class Engine::Call {
 public:
  explicit Call(Engine& e) : e_(e) {
    if (e.busy_.exchange(true))
      throw std::runtime_error(
          "this buffer is in use by another thread; give every concurrent operation a buffer of its own");
    try {
      if (!e.failure_.empty())
        throw std::runtime_error("this buffer failed earlier and cannot be used any more: " + e.failure_);
      require_alive();
    } catch (...) {
      e.busy_ = false;
      throw;
    }
  }
  ~Call() { e_.busy_ = false; }
  // From here on a failure leaves the ranks out of step: the buffer is lost.
  template <class F>
  void run(F&& kernel) {
    try {
      kernel();
    } catch (const std::exception& ex) {
      e_.failure_ = ex.what();
      throw;
    }
    require_alive();
  }

 private:
  // A kernel that ran beside the host may have ended with a timeout report, in this call or in an earlier one.
  void require_alive() {
    if (const auto died = e_.executor_->timeout_report()) {
      const host::DeadlineError error(*died);
      e_.failure_ = error.what();
      throw error;
    }
  }
  Engine& e_;
};

}  // namespace hep
