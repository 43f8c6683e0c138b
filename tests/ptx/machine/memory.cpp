#include "memory.h"

#include "impl.h"

namespace hep::ptxm {
namespace {
u64 base_of(const Range& r) {
  return reinterpret_cast<u64>(r.base);
}
}  // namespace

void Memory::map(const Range& r) {
  near_[0] = near_[1] = {};
  const u64 begin = base_of(r), end = begin + r.bytes;
  auto it = ranges_.lower_bound(begin);
  if (it != ranges_.begin()) {
    Range& before = std::prev(it)->second;
    const u64 old_end = base_of(before) + before.bytes;
    if (old_end > end) {  // what lies behind the new one stays
      Range rest = before;
      rest.base = reinterpret_cast<const void*>(end);
      rest.bytes = old_end - end;
      ranges_[end] = rest;
    }
    if (old_end > begin) before.bytes = begin - base_of(before);
  }
  while (it != ranges_.end() && it->first < end) {
    Range old = it->second;
    const u64 old_end = it->first + old.bytes;
    if (old_end > end && it->first < end) {
      old.base = reinterpret_cast<const void*>(end);
      old.bytes = old_end - end;
      it = ranges_.erase(it);
      it = ranges_.insert_or_assign(end, old).first;
      break;
    }
    it = ranges_.erase(it);
  }
  if (r.bytes) ranges_[begin] = r;
}
void Memory::unmap(u64 base) {
  near_[0] = near_[1] = {};
  ranges_.erase(base);
}
const Range* Memory::find(u64 at) const {
  auto it = ranges_.upper_bound(at);
  if (it == ranges_.begin()) return nullptr;
  --it;
  return at < it->first + it->second.bytes ? &it->second : nullptr;
}
bool Memory::look_up(u64 at, u32 n, bool write) {
  const Range* r = find(at);
  if (!r || at + n > base_of(*r) + r->bytes || (write && r->space == Space::kConstant)) return false;
  if (write && r->space == Space::kHost) return ++told_host_, true;  // not remembered: the next one counts, too
  near_[write] = {base_of(*r), base_of(*r) + r->bytes};
  return true;
}
bool Memory::mapped(u64 at, u64 n) const {
  const Range* r = find(at);
  return r && at + n <= base_of(*r) + r->bytes;
}
std::string Memory::describe(u64 at) const {
  if (const Range* r = find(at))
    return hex(at) + " (byte " + std::to_string(at - base_of(*r)) + " of " + std::to_string(r->bytes) + " of " +
           r->name + ")";
  auto it = ranges_.upper_bound(at);
  if (it != ranges_.begin()) {
    const Range& before = std::prev(it)->second;
    const u64 gap = at - (base_of(before) + before.bytes);
    if (gap < 65536)
      return hex(at) + " (" + std::to_string(gap) + " bytes behind the " + std::to_string(before.bytes) + " of " +
             before.name + ")";
  }
  return hex(at) + " (no memory of a device)";
}

}  // namespace hep::ptxm
