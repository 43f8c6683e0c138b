// Arenas as memory of a caching allocator that is not ours: two functions which it calls for whole pieces and to give
// them back. It cuts them, lends them and reuses them in the order of streams by itself; torch's does, of a
// torch.cuda.MemPool (hybrid_ep/runtime/device_arena.py).
#pragma once
#include <cstddef>
#include <functional>
#include <memory>

#include "runtime/arena.h"

namespace hep {

// In the exception's text.
inline constexpr const char* kNoRoom = "hybrid_ep: no room in the arena";

// Whence this thread's next calls of hep_pool_allocate have what they give out, until it is withdrawn; then it is what
// was offered before.
using Source = std::function<std::shared_ptr<unsigned char>(uint64_t bytes)>;  // null: the device has no more
void offer(Source source);
void offer_arena(std::shared_ptr<Arena> arena);
void withdraw();
[[noreturn]] void no_room();  // of a source, to whoever asked it

}  // namespace hep

extern "C" {
// Throws std::bad_alloc where nothing is offered, or the arena has no room. Null means an exhausted device, of which
// torch writes a report, and tells whoever observes that.
void* hep_pool_allocate(ptrdiff_t bytes, int device, void* stream);
// On any thread. The piece keeps its segment mapped until then.
void hep_pool_free(void* at, ptrdiff_t bytes, int device, void* stream);
}
