// Stream-ordered memory. No address is given out twice, so that whoever uses a block after its free, in the order of
// the streams, touches memory that is not there.
#include <set>

#include "capture.h"
#include "memory.h"

struct CUmemPoolHandle_st {
  int device = 0;
};

namespace hep::ptxr {
namespace {

std::set<cudaMemPool_t>& pools() {
  static auto* all = new std::set<cudaMemPool_t>;
  return *all;
}

cudaError_t release_now(void* p) {
  Memory::get().release(p);
  return cudaSuccess;
}

}  // namespace

HEP_PTXR_API cudaError_t cudaMemPoolCreate(cudaMemPool_t* pool, const cudaMemPoolProps* props) {
  Devices& d = Devices::get();
  Lock lock(d.mutex);
  if (!props || props->allocType != cudaMemAllocationTypePinned || props->location.type != cudaMemLocationTypeDevice ||
      props->location.id < 0 || props->location.id >= d.count())
    return said(cudaErrorInvalidValue);
  *pool = new CUmemPoolHandle_st{props->location.id};
  pools().insert(*pool);
  return cudaSuccess;
}

HEP_PTXR_API cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t pool, cudaMemPoolAttr, void* value) {
  Devices& d = Devices::get();
  Lock lock(d.mutex);
  return said(pools().count(pool) && value ? cudaSuccess : cudaErrorInvalidValue);
}

// The block is usable in stream order, and here at once: nothing that an earlier owner did can reach it.
HEP_PTXR_API cudaError_t cudaMallocFromPoolAsync(void** p, size_t bytes, cudaMemPool_t pool, cudaStream_t stream) {
  // Of a graph it would be a memory node: nothing of this project makes one.
  return outside_capture(stream, [&](Devices&, Lock&, cudaStream_t s) {
    if (!pools().count(pool) || pool->device != s->device) return cudaErrorInvalidValue;
    *p = bytes ? Memory::get().allocate(Kind::kPool, bytes, s->device, "cudaMallocFromPoolAsync") : nullptr;
    return *p || !bytes ? cudaSuccess : cudaErrorMemoryAllocation;
  });
}

HEP_PTXR_API cudaError_t cudaFreeAsync(void* p, cudaStream_t stream) {
  return outside_capture(stream, [&](Devices&, Lock&, cudaStream_t s) {
    if (!p) return cudaSuccess;
    Block* block = Memory::get().find(p);
    if (!block || block->kind != Kind::kPool || block->freed) return cudaErrorInvalidValue;
    block->freed = true;
    Op op;
    op.act = [p] { return release_now(p); };
    return submit(s, std::move(op));
  });
}

}  // namespace hep::ptxr
