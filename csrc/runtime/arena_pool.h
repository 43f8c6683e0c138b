// Arenas as memory of a caching allocator that is not ours: two functions which it calls for whole pieces and to give
// them back. It cuts them, lends them and reuses them in the order of streams by itself; torch's does, of a
// torch.cuda.MemPool (hybrid_ep/runtime/device_arena.py).
#pragma once
#include <cstddef>
#include <memory>

#include "runtime/arena.h"

namespace hep {

// In the exception's text.
inline constexpr const char* kNoRoom = "hybrid_ep: no room in the arena";

// What this thread's next calls of hep_pool_allocate give out; null: nothing.
void offer_arena(std::shared_ptr<Arena> arena);

}  // namespace hep

extern "C" {
// Throws std::bad_alloc where nothing is offered, or it has no room. Null would mean an exhausted device, of which
// torch writes a report, and tells whoever observes that.
void* hep_pool_allocate(ptrdiff_t bytes, int device, void* stream);
// On any thread. The piece keeps its segment mapped until then.
void hep_pool_free(void* at, ptrdiff_t bytes, int device, void* stream);
}
