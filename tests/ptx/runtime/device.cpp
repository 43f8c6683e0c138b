// The device's thread: it begins what is at the heads of the streams, in an order that a seed chooses, and runs the
// machine in between.
#include "device.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>

namespace hep::ptxr {

thread_local int current_device = 0;
thread_local cudaError_t last_error = cudaSuccess;
Settings Devices::settings;

namespace {
constexpr uint32_t kTurns = 300;  // of warps, between two looks at the streams
constexpr int kMostHeld = 6;

// CUDA_DEVICE_MAX_CONNECTIONS, when CUDA starts: 1 to 32, and 8 where it is not set.
size_t num_queues() {
  const char* said = std::getenv("CUDA_DEVICE_MAX_CONNECTIONS");
  const int n = said ? std::atoi(said) : 0;
  return n < 1 ? 8 : size_t(std::min(n, 32));
}
}  // namespace

Devices& Devices::get() {
  static Devices* devices = new Devices;  // for ever: library code runs until the very end of the process
  return *devices;
}

Devices::Devices()
    : random(settings.machine.seed),
      model_(settings.image_target() == 100 ? ptxm::DeviceModel::b200() : ptxm::DeviceModel::h100()) {
  machine_ = std::make_unique<ptxm::Machine>(settings.machine);
  for (int i = 0; i < settings.num_devices; ++i) {
    machine_devices_.push_back(machine_->add_device(model_));
    queues_.emplace_back(num_queues());
    streams_used_.push_back(0);
    legacy_.push_back(make_stream(i, true));
  }
  std::thread([this] { loop(); }).detach();
}

cudaStream_t Devices::make_stream(int device, bool blocking) {
  auto* s = new CUstream_st;
  s->device = device;
  s->blocking = blocking;
  streams_.push_back(s);
  return s;
}

bool Devices::is_stream(cudaStream_t stream) const {
  for (cudaStream_t s : streams_)
    if (s == stream) return !s->destroyed;
  return false;
}

cudaStream_t Devices::resolve(cudaStream_t stream) {
  if (stream == nullptr || stream == cudaStreamLegacy) return legacy_[size_t(current_device)];
  return is_stream(stream) ? stream : nullptr;
}

void Devices::enqueue(cudaStream_t stream, Op op) {
  cudaStream_t legacy = legacy_[size_t(stream->device)];
  if (stream == legacy) {
    for (cudaStream_t s : streams_)
      if (s->blocking && s->device == stream->device && s != legacy && s->issued > s->ended)
        op.after.push_back(tail(s));
  } else if (stream->blocking && legacy->issued > legacy->ended) {
    op.after.push_back(tail(legacy));
  }
  if (op.launch) op.launch->after.join(host);
  op.number = ++stream->issued;
  if (op.launch) {
    const size_t device = size_t(stream->device);
    if (stream->queue < 0) stream->queue = int(streams_used_[device]++ % queues_[device].size());
    queue_of(stream).emplace_back(stream, op.number);
  }
  stream->ops.push_back(std::move(op));
  work_.notify_all();
}

bool Devices::idle(int device) const {
  for (cudaStream_t s : streams_)
    if (s->device == device && s->issued > s->ended) return false;
  return true;
}

cudaError_t Devices::wait(std::unique_lock<FairMutex>& lock, cudaStream_t stream) {
  const cudaError_t status = wait_mark(lock, tail(stream));
  host_knows(stream);
  return status;
}

cudaError_t Devices::wait_device(std::unique_lock<FairMutex>& lock, int device) {
  ended.wait(lock, [&] { return lost != cudaSuccess || idle(device); });
  for (size_t i = 0; i < streams_.size(); ++i)
    if (streams_[i]->device == device) host_knows(streams_[i]);
  return lost;
}

cudaError_t Devices::wait_mark(std::unique_lock<FairMutex>& lock, const Mark& mark) {
  ended.wait(lock, [&] { return lost != cudaSuccess || mark.passed(); });
  return lost;
}

void Devices::host_knows(cudaStream_t stream) {
  stream->known = stream->ended;
  host.join(stream->order);
  forget_if_all_known();
}

// Nothing runs, and the host has waited for all that ran: whatever it launches comes after, so the past is no use.
void Devices::forget_if_all_known() {
  for (cudaStream_t s : streams_)
    if (s->issued > s->known) return;
  machine_->quiesce();
  host = {};
  for (cudaStream_t s : streams_) s->order = {};
}

void Devices::lose(cudaError_t why) {
  if (lost != cudaSuccess) return;
  lost = why;
  for (const auto& [id, stream] : running_) machine_->kill(id);
  (void)machine_->take_ended();
  running_.clear();
  for (cudaStream_t s : streams_) {
    s->ops.clear();
    s->ended = s->issued;
  }
  for (auto& queues : queues_)
    for (Queue& queue : queues) queue.clear();
  ended.notify_all();
}

bool Devices::ready(const Op& op) const {
  if (op.copy && copies_held_) return false;
  for (const Mark& mark : op.after)
    if (!mark.passed()) return false;
  return true;
}

void Devices::hold_copies(bool hold) {
  copies_held_ = hold;
  work_.notify_all();
}

void Devices::finish(cudaStream_t stream) {
  stream->ended = stream->ops.front().number;
  stream->ops.pop_front();
  ended.notify_all();
}

void Devices::begin(std::unique_lock<FairMutex>& lock, cudaStream_t stream) {
  Op& op = stream->ops.front();
  op.begun = true;
  if (op.launch) queue_of(stream).pop_front();
  if (op.host) {
    const auto host = op.host;
    lock.unlock();
    host();
    lock.lock();
    if (lost == cudaSuccess) finish(stream);
    return;
  }
  if (!op.launch) {
    const cudaError_t status = op.act ? op.act() : cudaSuccess;
    if (status != cudaSuccess)
      lose(status);
    else
      finish(stream);
    return;
  }
  ptxm::Launch launch = *op.launch;
  launch.after.join(stream->order);
  op.id = machine_->start(std::move(launch));
  running_[op.id] = stream;
}

bool Devices::turn(std::unique_lock<FairMutex>& lock) {
  std::vector<cudaStream_t> can;
  bool held = false;
  for (cudaStream_t s : streams_) {
    if (s->ops.empty() || s->ops.front().begun || !ready(s->ops.front())) continue;
    Op& op = s->ops.front();
    if (op.launch && queue_of(s).front() != std::pair(s, op.number))
      continue;  // behind another stream's that cannot begin
    if (op.held < 0) op.held = int(random() % kMostHeld);
    if (op.held > 0 && machine_->running()) {
      --op.held;
      held = true;
      continue;
    }
    can.push_back(s);
  }
  if (can.empty()) return held;
  begin(lock, can[random() % can.size()]);
  return true;
}

void Devices::take_ended() {
  for (const ptxm::LaunchId id : machine_->take_ended()) {
    const auto found = running_.find(id);
    if (found == running_.end()) continue;
    cudaStream_t stream = found->second;
    running_.erase(found);
    const bool failed = machine_->failed(id);
    stream->order = machine_->order_of(id);
    finish(stream);
    if (failed) return lose(cudaErrorLaunchFailure);
  }
}

void Devices::say_reports() {
  const auto& reports = machine_->reports();
  for (; reports_seen < reports.size(); ++reports_seen)
    if (reports_seen < 20) std::fprintf(stderr, "ptx machine: %s\n", reports[reports_seen].text().c_str());
}

void Devices::loop() {
  std::unique_lock lock(mutex);
  for (;;) {
    const bool some = turn(lock);
    if (machine_->running()) {
      const ptxm::Progress progress = machine_->run(kTurns);
      take_ended();
      say_reports();
      if (progress == ptxm::Progress::kStuck) lose(cudaErrorLaunchFailure);
    } else if (!some) {
      work_.wait(lock);
      continue;
    }
    lock.unlock();  // whoever waits for it comes first
    lock.lock();
  }
}

}  // namespace hep::ptxr
