// Looking up memory, and what reads and writes of it must find.
#include "arch/sim/global_memory.h"

#include <algorithm>

#include "arch/sim/failure.h"

namespace hep::sim {
namespace {

std::string bytes_text(const Region& r, const void* p, uint64_t bytes) {
  const uint64_t at = r.offset(p);
  return "bytes [" + std::to_string(at) + ", " + std::to_string(at + bytes) + ") of rank " + std::to_string(r.rank) +
         "'s " + r.name;
}

}  // namespace

Region& GlobalMemory::add(const Region& region) {
  auto owned = std::make_unique<Region>(region);
  if (watch_ && region.watches_writes()) owned->watch();
  const auto at = std::upper_bound(regions_.begin(), regions_.end(), region.begin,
                                   [](const unsigned char* p, const auto& r) { return p < r->begin; });
  return **regions_.insert(at, std::move(owned));
}

void GlobalMemory::drop_rank(int rank) {
  std::erase_if(regions_, [&](const auto& r) { return r->rank == rank && !r->is_registered(); });
}

Region* GlobalMemory::find(const void* p, uint64_t bytes) const {
  const auto* at = static_cast<const unsigned char*>(p);
  const auto it = std::upper_bound(regions_.begin(), regions_.end(), at,
                                   [](const unsigned char* x, const auto& r) { return x < r->begin; });
  if (it == regions_.begin()) return nullptr;
  Region* r = std::prev(it)->get();
  return r->contains(p, bytes) ? r : nullptr;
}

Region* GlobalMemory::registered(int rank, Region::Use use) const {
  for (const auto& r : regions_)
    if (r->rank == rank && r->use == use) return r.get();
  return nullptr;
}

Region& GlobalMemory::require(const Lane& me, const void* p, uint64_t bytes, const char* operation) const {
  Region* r = find(p, bytes);
  if (!r) {
    const Region* near = find(p, 1);
    throw_rule(me, "outside_memory",
               std::string(operation) + " of " + std::to_string(bytes) + " bytes " +
                   (near ? "across the end of rank " + std::to_string(near->rank) + "'s " + near->name
                         : "outside all memory that this kernel may touch"));
  }
  if (!r->is_registered() && r->rank != me.rank)
    throw_rule(me, "outside_memory", std::string(operation) + " of another rank's private " + r->name);
  return *r;
}

void GlobalMemory::check_read(const Lane& me, const Region& r, const void* p, uint64_t bytes,
                              const char* operation) const {
  if (!r.watches_writes()) return;
  const GranuleSpan s(r.offset(p), bytes);
  if (any(r.writing, s.at, s.n))
    throw_rule(me, "read_races_write",
               std::string(operation) + " reads " + bytes_text(r, p, bytes) + " while a write of them is not complete");
  if (r.use != Region::Use::kCounts && r.use != Region::Use::kRail && !every(r.written, s.at, s.n))
    throw_rule(me, "never_written",
               std::string(operation) + " reads " + bytes_text(r, p, bytes) +
                   ", which nobody has written since they became free");
}

void GlobalMemory::check_write(const Lane& me, const Region& r, const void* p, uint64_t bytes, const char* operation,
                               bool again) const {
  if (r.use == Region::Use::kInput)
    throw_rule(me, "outside_memory", std::string(operation) + " writes into input memory: " + bytes_text(r, p, bytes));
  const GranuleSpan s(r.offset(p), bytes);
  if (any(r.reading, s.at, s.n))
    throw_rule(me, "write_races_read",
               std::string(operation) + " writes " + bytes_text(r, p, bytes) + " while a copy still reads them");
  if (any(r.writing, s.at, s.n))
    throw_rule(me, "write_races_write",
               std::string(operation) + " writes " + bytes_text(r, p, bytes) + " while another write is not complete");
  if (!again && (r.is_licensed() || r.use == Region::Use::kOutput) && any(r.written, s.at, s.n))
    throw_rule(me, "outside_licence",
               std::string(operation) + " writes " + bytes_text(r, p, bytes) +
                   ", which hold data that their reader has not given back");
}

void GlobalMemory::fill(Region& r, uint64_t at, uint64_t bytes) const {
  if (!watch_ || bytes == 0) return;
  const GranuleSpan s(at, bytes);
  set(r.written, s.at, s.n, 0xff);
}

void GlobalMemory::free(Region& r, uint64_t at, uint64_t bytes) const {
  if (!watch_ || bytes == 0) return;
  const GranuleSpan s(at, bytes);
  set(r.written, s.at, s.n, 0);
}

}  // namespace hep::sim
