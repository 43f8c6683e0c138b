// The arena out of memory: whatever allocation fails, no byte of it is lost, and nothing is lent twice.
#include "runtime/arena.h"

#include <cstdlib>
#include <new>
#include <vector>

#include "check.h"

namespace {
int allocations_left = -1;  // until one fails; negative: none does
}

// Inlined into each other, they would look to the compiler like a new that is freed.
[[gnu::noinline]] void* operator new(std::size_t bytes) {
  if (allocations_left == 0) throw std::bad_alloc();
  if (allocations_left > 0) --allocations_left;
  if (void* p = std::malloc(bytes)) return p;
  throw std::bad_alloc();
}
[[gnu::noinline]] void operator delete(void* p) noexcept {
  std::free(p);
}
[[gnu::noinline]] void operator delete(void* p, std::size_t) noexcept {
  std::free(p);
}

HEP_TEST_MAIN

namespace hep {
namespace {

constexpr uint64_t kRoom = 8 * Arena::kAlignment;

TEST(a_block_that_cannot_be_lent_stays_in_the_arena) {
  for (const uint64_t bytes : {Arena::kAlignment, kRoom}) {  // a part of a gap, and all of it
    const auto arena = std::make_shared<Arena>(Segment::private_memory(kRoom), 0, kRoom);
    int failures = 0;
    for (bool lent = false; !lent; ++failures) {
      allocations_left = failures;
      try {
        lent = arena->take(bytes) != nullptr;
      } catch (const std::bad_alloc&) {
      }
      allocations_left = -1;
      CHECK_EQ(arena->bytes_lent(), 0u);
      CHECK(arena->take(kRoom) != nullptr);
    }
    CHECK(failures > 1);
  }
}

TEST(blocks_come_back_without_an_allocation) {
  const auto arena = std::make_shared<Arena>(Segment::private_memory(kRoom), 0, kRoom);
  std::vector<std::shared_ptr<unsigned char>> blocks;
  for (int i = 0; i < 8; ++i) blocks.push_back(arena->take(Arena::kAlignment));
  CHECK(!arena->take(1));
  allocations_left = 0;
  for (const int i : {1, 3, 2, 7, 0, 5, 6, 4}) blocks[size_t(i)].reset();
  allocations_left = -1;
  CHECK_EQ(arena->bytes_lent(), 0u);
  CHECK(arena->take(kRoom) != nullptr);
}

}  // namespace
}  // namespace hep
