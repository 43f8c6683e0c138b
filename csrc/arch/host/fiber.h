// A stack that can be switched to. A fiber is made once (makecontext, two system calls) and then serves
// lane after lane, launch after launch; a switch is _setjmp + _longjmp, which makes no system call.
#pragma once
#include <csetjmp>
#include <cstddef>

namespace hep::host {

// Where a suspended flow of control continues. The launching thread has one too.
struct FiberContext {
  std::jmp_buf where;
  void* caught_exceptions = nullptr;  // the C++ runtime's per-thread state, kept per flow of control
  unsigned uncaught_exceptions = 0;
  const void* stack_bottom = nullptr;  // AddressSanitizer wants to know
  size_t stack_bytes = 0;
  void* fake_stack = nullptr;
};

// Suspends the running flow of control into `from` and continues `to`.
void fiber_switch(FiberContext& from, FiberContext& to) noexcept;

class Fiber {
 public:
  // Runs `main(arg)` when next switched to; then continues whatever context it returned.
  using Main = FiberContext& (*)(void* arg);

  Fiber();  // std::bad_alloc when no stack can be mapped
  ~Fiber();
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  // Only while the fiber is idle: fresh, or its last main has returned.
  void assign(Main main, void* arg) {
    main_ = main;
    arg_ = arg;
  }
  FiberContext& context() { return context_; }

 private:
  static void entry();
  [[noreturn]] void serve();

  FiberContext context_;
  Main main_ = nullptr;
  void* arg_ = nullptr;
  void* mapping_ = nullptr;
};

}  // namespace hep::host
