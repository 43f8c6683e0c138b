#include "runtime/arena_pool.h"

#include <mutex>
#include <new>
#include <unordered_map>

namespace hep {
namespace {

// Pieces outlive buffers, and torch may give them back while the process ends: hence never destroyed.
struct Pieces {
  std::mutex mutex;
  std::unordered_map<void*, std::shared_ptr<unsigned char>> by_address;

  static Pieces& get() {
    static auto* all = new Pieces;
    return *all;
  }
};

std::shared_ptr<Arena>& offered() {
  static thread_local std::shared_ptr<Arena> arena;
  return arena;
}

struct NoRoom : std::bad_alloc {
  const char* what() const noexcept override { return kNoRoom; }
};

}  // namespace

void offer_arena(std::shared_ptr<Arena> arena) {
  offered() = std::move(arena);
}

}  // namespace hep

#define HEP_EXPORTED extern "C" __attribute__((visibility("default")))

HEP_EXPORTED void* hep_pool_allocate(ptrdiff_t bytes, int, void*) {
  using namespace hep;
  auto piece = bytes > 0 && offered() ? offered()->take(uint64_t(bytes)) : nullptr;
  if (!piece) throw NoRoom();
  Pieces& pieces = Pieces::get();
  std::lock_guard lock(pieces.mutex);
  void* const at = piece.get();
  pieces.by_address.emplace(at, std::move(piece));
  return at;
}

HEP_EXPORTED void hep_pool_free(void* at, ptrdiff_t, int, void*) {
  using namespace hep;
  Pieces& pieces = Pieces::get();
  std::shared_ptr<unsigned char> last;  // let go of without the lock: with it the segment may go
  std::lock_guard lock(pieces.mutex);
  if (const auto found = pieces.by_address.find(at); found != pieces.by_address.end()) {
    last = std::move(found->second);
    pieces.by_address.erase(found);
  }
}
