// Launches, and the blocks that an SM has room for.
#include <algorithm>
#include <stdexcept>

#include "impl.h"

namespace hep::ptxm {

DeviceModel DeviceModel::h100() {
  return {"H100", 132, 1024, 2048, 32, 65536, 233472, 232448, 1024};
}
DeviceModel DeviceModel::b200() {
  return {"B200", 148, 1024, 2048, 32, 65536, 233472, 232448, 1024};
}

namespace {
u32 registers_of(const Kernel& k, const DeviceModel& d, u32 registers) {
  if (registers) return (registers + 7) / 8 * 8;
  // What ptxas may take at most under .maxntid and .minnctapersm.
  const u32 threads = (k.max_threads + 31) / 32 * 32 * std::max(1u, k.min_blocks);
  return std::min(255u, d.registers_per_sm / threads) / 8 * 8;
}
u32 threads_of(u32 block) {
  return (block + 31) / 32 * 32;
}
}  // namespace

std::string MachineImpl::refusal(const Launch& l) const {
  if (!l.kernel) return "no kernel";
  if (l.device < 0 || size_t(l.device) >= devices.size()) return "no device " + std::to_string(l.device);
  const Kernel& k = *l.kernel;
  const DeviceModel& d = devices[size_t(l.device)].model;
  const auto more = [](const char* what, u64 n, u64 most) {
    return std::string(what) + ": " + std::to_string(n) + ", at most " + std::to_string(most);
  };
  if (!l.grid || !l.block) return "an empty grid or block";
  if (l.block > k.max_threads) return more("threads of a block, by the kernel's bound", l.block, k.max_threads);
  if (l.block > d.threads_per_block) return more("threads of a block", l.block, d.threads_per_block);
  if (u64 n = u64(k.static_shared) + l.dynamic_shared; n > d.shared_per_block)
    return more("bytes of shared memory", n, d.shared_per_block);
  if (u64 n = u64(registers_of(k, d, l.registers)) * threads_of(l.block); n > d.registers_per_sm)
    return more("registers of a block", n, d.registers_per_sm);
  if (l.params.size() != k.param_bytes)
    return "parameters of " + std::to_string(l.params.size()) + " bytes, the kernel has " +
           std::to_string(k.param_bytes);
  if (k.program->code.empty()) return "a kernel without code";
  return {};
}
u32 MachineImpl::blocks_per_sm(const Kernel& k, int device, u32 block, u32 dynamic, u32 registers) const {
  const DeviceModel& d = devices.at(size_t(device)).model;
  const u32 shared = k.static_shared + dynamic + d.shared_reserved, threads = threads_of(block);
  if (!block || block > d.threads_per_block || shared > d.shared_per_sm ||
      shared - d.shared_reserved > d.shared_per_block)
    return 0;
  return std::min({d.blocks_per_sm, d.threads_per_sm / threads, d.shared_per_sm / shared,
                   d.registers_per_sm / std::max(1u, registers_of(k, d, registers) * threads)});
}

LaunchId MachineImpl::start(Launch l) {
  if (const std::string why = refusal(l); !why.empty()) throw std::invalid_argument("launch refused: " + why);
  auto r = std::make_unique<Run>();
  r->id = next_id++;
  r->launch = std::move(l);
  r->program = r->launch.kernel->program.get();
  if (r->launch.name.empty()) r->launch.name = r->launch.kernel->name;
  if (programs.try_emplace(r->program, r->launch.kernel->program).second)
    for (const Variable& v : r->program->variables)
      memory.map({.base = v.base, .bytes = v.bytes, .name = v.name, .device = r->launch.device});
  counts[r->program].resize(r->program->code.size());
  r->live_blocks = r->launch.grid;
  if (races) races->start(*r);
  ++launches;
  ++running;
  runs.push_back(std::move(r));
  admit();
  return runs.back()->id;
}

// In the order of their starts, as one queue of blocks: a grid that does not fit waits for blocks to end.
void MachineImpl::admit() {
  std::vector<bool> full(devices.size());
  for (auto& r : runs) {
    const size_t device = size_t(r->launch.device);
    if (r->done || r->failed || full[device]) continue;
    while (r->next_block < r->launch.grid)
      if (!place(*r)) {
        full[device] = true;
        break;
      }
  }
}
bool MachineImpl::place(Run& r) {
  Device& d = devices[size_t(r.launch.device)];
  const Launch& l = r.launch;
  const Sm need{threads_of(l.block), registers_of(*l.kernel, d.model, l.registers) * threads_of(l.block),
                l.kernel->static_shared + l.dynamic_shared + d.model.shared_reserved, 1};
  u32 best = kNone;
  for (u32 k = 0; k < d.sms.size(); ++k) {
    const Sm& s = d.sms[k];
    if (s.threads + need.threads > d.model.threads_per_sm || s.registers + need.registers > d.model.registers_per_sm ||
        s.shared + need.shared > d.model.shared_per_sm || s.blocks + 1 > d.model.blocks_per_sm)
      continue;
    if (best == kNone || s.blocks < d.sms[best].blocks) best = k;
    if (s.blocks == 0) break;
  }
  if (best == kNone) return false;
  Sm& s = d.sms[best];
  s.threads += need.threads;
  s.registers += need.registers;
  s.shared += need.shared;
  ++s.blocks;
  auto b = std::make_unique<Block>();
  b->run = &r;
  b->index = r.next_block++;
  b->sm = best;
  b->serial = next_serial++;
  b->live = l.block;
  make_warps(*b);
  blocks[b->serial] = b.get();
  r.blocks.push_back(std::move(b));
  return true;
}
void MachineImpl::make_warps(Block& b) {
  const Launch& l = b.run->launch;
  const EntryCode& entry = b.run->program->entries[l.kernel->index];
  const u32 bytes = l.kernel->static_shared + l.dynamic_shared, warps = (l.block + 31) / 32;
  b.shared.bytes.resize(bytes + 16);
  b.shared.bytes.resize(bytes);
  for (size_t k = 0; k < bytes; k += 8) {  // what a block before left there
    const u64 x = random();
    std::copy_n(reinterpret_cast<const u8*>(&x), std::min<size_t>(8, bytes - k), &b.shared.bytes[k]);
  }
  b.shared.written.assign(bytes / 8 + 4, 0);
  b.shared.mbars.assign(bytes / 8 + 2, 0);
  const u32 rows = (entry.row_bytes + 63) / 64 * 64, frame = b.run->program->frame_bytes * kLanes;
  const size_t warp_bytes = rows + (frame + 63) / 64 * 64;
  b.rows = std::make_unique<u8[]>(warp_bytes * warps + 64);
  u8* at = b.rows.get() + (64 - reinterpret_cast<u64>(b.rows.get()) % 64) % 64;
  b.warps.resize(warps);
  for (u32 k = 0; k < warps; ++k, at += warp_bytes) {
    Warp& w = b.warps[k];
    const u32 lanes = std::min(kLanes, l.block - k * kLanes);
    w.block = &b;
    w.index = k;
    w.rows = at;
    w.frame = at + rows;
    w.live = lanes == kLanes ? ~0u : (1u << lanes) - 1;
    w.parts.reserve(2 * kLanes);
    w.parts.push_back({});
    w.parts[0].mask = w.live;
    w.parts[0].pc = entry.pc;
    make_ready(w);
  }
  if (races) races->start(b);
}

void MachineImpl::end_block_if_over(Block& b) {
  if (b.ended || b.live) return;
  if (b.copies_in_flight && !b.run->failed) {
    for (const BulkCopy& k : copies) {
      if (!k.warp || k.dropped || k.warp->block != &b) continue;
      if (k.load || !k.read)
        report("exit", {*k.warp, k.lane}, k.ins, "the block ends while this bulk copy still uses its shared memory");
      else if (!k.load)
        report("exit", {*k.warp, k.lane}, k.ins, "the block ends while this bulk store is not known to be complete");
    }
    return;  // its memory lives until they are done
  }
  for (const Mbar& m : b.mbars)
    if (m.live && m.bytes && !b.run->failed)
      report(
          "exit", {b.warps[0], 0}, nullptr,
          "the block ends with a tx-count of " + std::to_string(m.bytes) + " on the mbarrier at shared " + hex(m.at));
  b.ended = true;
  Run& r = *b.run;
  const Launch& l = r.launch;
  Device& d = devices[size_t(l.device)];
  Sm& s = d.sms[b.sm];
  s.threads -= threads_of(l.block);
  s.registers -= registers_of(*l.kernel, d.model, l.registers) * threads_of(l.block);
  s.shared -= l.kernel->static_shared + l.dynamic_shared + d.model.shared_reserved;
  --s.blocks;
  for (Warp& w : b.warps) make_unready(w);
  blocks.erase(b.serial);
  if (--r.live_blocks == 0) {
    r.done = true;
    --running;
    ended.push_back(r.id);
  }
  std::erase_if(r.blocks, [&](auto& p) { return p.get() == &b; });
  admit();
}

void MachineImpl::kill(Run& r) {
  if (r.done) return;
  r.failed = true;
  for (auto& b : r.blocks)
    for (u32 slot = 0; slot < copies.size(); ++slot)
      if (copies[slot].warp && copies[slot].warp->block == b.get()) copies[slot].dropped = true;
  r.live_blocks -= r.launch.grid - r.next_block;  // those that never came
  r.next_block = r.launch.grid;
  if (r.live_blocks == 0) {
    r.done = true;
    --running;
    ended.push_back(r.id);
    return;
  }
  while (!r.blocks.empty()) {
    Block& b = *r.blocks.back();
    b.live = b.copies_in_flight = 0;
    end_block_if_over(b);
  }
}

}  // namespace hep::ptxm
