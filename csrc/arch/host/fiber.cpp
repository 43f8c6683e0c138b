// Stack switching. _FORTIFY_SOURCE replaces longjmp with a version that refuses to jump to a deeper stack,
// which is the very thing done here, so it is off in this file.
#undef _FORTIFY_SOURCE
#include "arch/host/fiber.h"

#include <cxxabi.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <new>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#define HEP_ASAN 1
#else
#define HEP_ASAN 0
#endif

namespace hep::host {
namespace {

constexpr size_t kStackBytes = HEP_ASAN ? 512 << 10 : 128 << 10;
constexpr size_t kGuardBytes = 64 << 10;  // at least one page on every page size in use

// The layout every C++ runtime shares for the state behind std::uncaught_exceptions and `throw;`.
struct ExceptionState {
  void* caught;
  unsigned uncaught;
};
ExceptionState& exception_state() {
  return *reinterpret_cast<ExceptionState*>(abi::__cxa_get_globals());
}

// Passed from the maker to a new fiber's first instruction.
struct Birth {
  Fiber* fiber = nullptr;
  ucontext_t maker;
};
thread_local Birth t_birth;

#if HEP_ASAN
thread_local FiberContext* t_left = nullptr;  // whom the switch in progress suspends
void begin_switch(FiberContext& from, const FiberContext& to) {
  t_left = &from;
  __sanitizer_start_switch_fiber(&from.fake_stack, to.stack_bottom, to.stack_bytes);
}
void end_switch(void* fake_stack) {
  __sanitizer_finish_switch_fiber(fake_stack, &t_left->stack_bottom, &t_left->stack_bytes);
}
#else
void begin_switch(FiberContext&, const FiberContext&) {}
void end_switch(void*) {}
#endif

}  // namespace

void fiber_switch(FiberContext& from, FiberContext& to) noexcept {
  ExceptionState& state = exception_state();
  from.caught_exceptions = state.caught;
  from.uncaught_exceptions = state.uncaught;
  state.caught = to.caught_exceptions;
  state.uncaught = to.uncaught_exceptions;
  begin_switch(from, to);
  if (_setjmp(from.where) == 0) _longjmp(to.where, 1);
  end_switch(from.fake_stack);
}

namespace {

struct NoStack : std::bad_alloc {
  const char* what() const noexcept override {
    return "there is no stack for another lane: each takes two of a process's memory mappings, of which the system "
           "grants vm.max_map_count (65530 where nobody changed it); take fewer ranks or blocks, or raise it: "
           "sysctl -w vm.max_map_count=1048576";
  }
};

}  // namespace

Fiber::Fiber() {
  void* mapping = mmap(nullptr, kGuardBytes + kStackBytes, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_STACK, -1, 0);
  if (mapping == MAP_FAILED) throw NoStack();
  // An overflow faults instead of corrupting a neighbour. The guard is a mapping of its own.
  if (mprotect(mapping, kGuardBytes, PROT_NONE) != 0) {
    munmap(mapping, kGuardBytes + kStackBytes);
    throw NoStack();
  }
  mapping_ = mapping;
  ucontext_t first;
  getcontext(&first);
  first.uc_stack.ss_sp = static_cast<char*>(mapping_) + kGuardBytes;
  first.uc_stack.ss_size = kStackBytes;
  first.uc_link = nullptr;
  context_.stack_bottom = first.uc_stack.ss_sp;
  context_.stack_bytes = kStackBytes;
  makecontext(&first, &Fiber::entry, 0);
  t_birth.fiber = this;
  FiberContext maker;
  begin_switch(maker, context_);
  swapcontext(&t_birth.maker, &first);  // runs entry() up to its first suspension
  end_switch(maker.fake_stack);
}

Fiber::~Fiber() {
  munmap(mapping_, kGuardBytes + kStackBytes);
}

void Fiber::entry() {
  Fiber* self = t_birth.fiber;
  end_switch(nullptr);
  if (_setjmp(self->context_.where) == 0) {
#if HEP_ASAN
    begin_switch(self->context_, *t_left);
#endif
    setcontext(&t_birth.maker);
  }
  end_switch(self->context_.fake_stack);
  self->serve();
}

void Fiber::serve() {
  for (;;) {
    FiberContext& next = main_(arg_);
    fiber_switch(context_, next);
  }
}

}  // namespace hep::host
