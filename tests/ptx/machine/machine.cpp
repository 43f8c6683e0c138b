// The machine's interface: thin.
#include "machine.h"

#include <algorithm>
#include <utility>

#include "impl.h"

namespace hep::ptxm {

Machine::Machine(const Options& options) : impl_(std::make_unique<MachineImpl>(options)) {}
Machine::~Machine() = default;

int Machine::add_device(const DeviceModel& model) {
  impl_->devices.push_back({model, std::vector<Sm>(model.sms)});
  return int(impl_->devices.size()) - 1;
}

void Machine::map(const Range& r) {
  impl_->memory.map(r);
  if (impl_->races) impl_->races->forget(reinterpret_cast<u64>(r.base), r.bytes);
}
void Machine::unmap(const void* base) {
  impl_->memory.unmap(reinterpret_cast<u64>(base));
}
bool Machine::mapped(const void* at, uint64_t bytes) const {
  return impl_->memory.mapped(reinterpret_cast<u64>(at), bytes);
}
void Machine::host_wrote(const void* base, uint64_t bytes) {
  if (impl_->races) impl_->races->forget(reinterpret_cast<u64>(base), bytes);
}

std::string Machine::refusal(const Launch& launch) const {
  return impl_->refusal(launch);
}
uint32_t Machine::blocks_per_sm(const Kernel& kernel, int device, uint32_t block, uint32_t dynamic_shared,
                                uint32_t registers) const {
  return impl_->blocks_per_sm(kernel, device, block, dynamic_shared, registers);
}
LaunchId Machine::start(Launch launch) {
  return impl_->start(std::move(launch));
}
Progress Machine::run(uint32_t quanta) {
  return impl_->run(quanta);
}
std::vector<LaunchId> Machine::take_ended() {
  return std::exchange(impl_->ended, {});
}

namespace {
Run* find(MachineImpl& m, LaunchId id) {
  for (auto& r : m.runs)
    if (r->id == id) return r.get();
  return nullptr;
}
}  // namespace

Order Machine::order_of(LaunchId id) {
  Run* r = find(*impl_, id);
  if (!r || !r->done)
    throw std::invalid_argument("launch " + std::to_string(id) + " has not ended, or was asked for already");
  Order order;
  if (impl_->races) order = impl_->races->order_of(*r);
  std::erase_if(impl_->runs, [&](auto& p) { return p.get() == r; });
  return order;
}
bool Machine::failed(LaunchId id) const {
  const Run* r = find(*impl_, id);
  return r && r->failed;
}
uint64_t Machine::running() const {
  return impl_->running;
}
void Machine::kill(LaunchId id) {
  if (Run* r = find(*impl_, id)) impl_->kill(*r);
}
void Machine::quiesce() {
  if (impl_->running) throw std::logic_error("quiesce: launches are running");
  if (impl_->races) impl_->races->quiesce();
}

uint64_t Machine::now_ns() const {
  return impl_->now();
}
uint64_t Machine::thread_instructions() const {
  return impl_->thread_steps;
}
uint64_t Machine::warp_instructions() const {
  return impl_->warp_steps;
}
uint64_t Machine::longest_warp() const {
  return impl_->longest_warp;
}
uint64_t Machine::told_host() const {
  return impl_->memory.told_host();
}
uint64_t Machine::launches() const {
  return impl_->launches;
}
const std::vector<Report>& Machine::reports() const {
  return impl_->reports;
}
void Machine::clear_reports() {
  impl_->reports.clear();
  impl_->reported.clear();
}
std::vector<LineCount> Machine::line_counts() const {
  return impl_->line_counts();
}
void Machine::reseed(uint64_t seed) {
  impl_->random = Random(seed);
}

}  // namespace hep::ptxm
