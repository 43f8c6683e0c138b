#include "runtime/arena_pool.h"

#include <mutex>
#include <new>
#include <unordered_map>
#include <vector>

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

std::vector<Source>& offered() {
  static thread_local std::vector<Source> sources;
  return sources;
}

struct NoRoom : std::bad_alloc {
  const char* what() const noexcept override { return kNoRoom; }
};

}  // namespace

void offer(Source source) {
  offered().push_back(std::move(source));
}

void offer_arena(std::shared_ptr<Arena> arena) {
  offer([arena = std::move(arena)](uint64_t bytes) {
    auto piece = arena->take(bytes);
    if (!piece) no_room();
    return piece;
  });
}

void no_room() {
  throw NoRoom();
}

void withdraw() {
  if (!offered().empty()) offered().pop_back();
}

}  // namespace hep

#define HEP_EXPORTED extern "C" __attribute__((visibility("default")))

HEP_EXPORTED void* hep_pool_allocate(ptrdiff_t bytes, int, void*) {
  using namespace hep;
  if (bytes <= 0 || offered().empty()) no_room();
  auto piece = offered().back()(uint64_t(bytes));
  if (!piece) return nullptr;
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
