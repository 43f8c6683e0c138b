// A simulated machine that memory fails: it says so, though nothing more is to be had until something large is freed.
#include <cstdlib>
#include <new>

#include "arch/sim/machine.h"
#include "check.h"

HEP_TEST_MAIN

namespace {

bool short_of_memory = false;
constexpr size_t kMark = 64;  // in front of each block: its size, and alignment

}  // namespace

void* operator new(size_t bytes) {
  auto* const block = short_of_memory ? nullptr : static_cast<size_t*>(std::malloc(bytes + kMark));
  if (!block) throw std::bad_alloc();
  *block = bytes;
  return reinterpret_cast<char*>(block) + kMark;
}
void operator delete(void* data) noexcept {
  if (!data) return;
  auto* const block = reinterpret_cast<size_t*>(static_cast<char*>(data) - kMark);
  if (*block >= 32 * 1024) short_of_memory = false;
  std::free(block);
}
void operator delete(void* data, size_t) noexcept {
  operator delete(data);
}
void* operator new[](size_t bytes) {
  return operator new(bytes);
}
void operator delete[](void* data) noexcept {
  operator delete(data);
}
void operator delete[](void* data, size_t) noexcept {
  operator delete(data);
}

namespace hep::test {

struct Short : std::bad_alloc {
  const char* what() const noexcept override {
    return "there is no room, which takes more words to say than fit into a string without an allocation";
  }
};

TEST(memory_that_ran_out_is_reported_from_a_reserve) {
  for (const int ranks : {1, 4}) {
    sim::MachineConfig config;
    config.num_local_ranks = ranks;
    sim::Machine machine(config);
    machine.run([&](int rank) {
      if (rank) return;
      short_of_memory = true;
      throw Short();
    });
    short_of_memory = false;
    CHECK_EQ(machine.failure().kind, std::string("memory"));
    CHECK_EQ(machine.failure().what, std::string(Short().what()));
  }
}

}  // namespace hep::test
