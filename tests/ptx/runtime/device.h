// The stand-in's devices: streams of operations in order, marks by which they wait for one another, and the one thread
// that carries them out on the machine.
#pragma once
#include <cuda_runtime_api.h>

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "../machine/machine.h"

namespace hep::ptxr {

// First come, first served: the device's thread takes the lock again at once, and would starve everybody else.
class FairMutex {
 public:
  void lock() {
    std::unique_lock l(m_);
    const uint64_t mine = next_++;
    turn_.wait(l, [&] { return serving_ == mine; });
  }
  void unlock() {
    {
      std::lock_guard l(m_);
      ++serving_;
    }
    turn_.notify_all();
  }

 private:
  std::mutex m_;
  std::condition_variable turn_;
  uint64_t next_ = 0, serving_ = 0;
};

struct Capture;

// An operation of a stream and everything before it.
struct Mark {
  cudaStream_t stream = nullptr;  // null: nothing
  uint64_t number = 0;
  bool passed() const;
};

// One operation. A graph keeps them to enqueue them again and again, so it is a value.
struct Op {
  std::vector<Mark> after;             // of other streams
  std::optional<ptxm::Launch> launch;  // a kernel
  std::function<cudaError_t()> act;    // anything else: done at once, under the lock
  std::function<void()> host;          // the caller's function: without the lock
  uint64_t number = 0;
  ptxm::LaunchId id = 0;
  bool begun = false;
  bool copy = false;  // by a copy engine
  int held = -1;      // turns for which it is held back though it could begin; -1: not drawn yet
};

}  // namespace hep::ptxr

struct CUstream_st {
  int device = 0;
  bool blocking = false;  // ordered with the legacy stream
  int queue = -1;         // the hardware queue that it shares, of its device; -1: it has had no kernel
  std::deque<hep::ptxr::Op> ops;
  uint64_t issued = 0, ended = 0, known = 0;  // known: how far the host has waited for it
  hep::ptxm::Order order;
  hep::ptxr::Capture* capture = nullptr;
  bool destroyed = false;
};

struct CUevent_st {
  hep::ptxr::Mark mark;
  std::shared_ptr<hep::ptxm::Order> order;
  hep::ptxr::Capture* capture = nullptr;  // recorded while this one was open
  size_t node = 0;                        // there
  bool timing = true;
  int device = 0;
};

namespace hep::ptxr {

inline bool Mark::passed() const {
  return !stream || stream->ended >= number;
}

struct Settings {
  ptxm::Options machine;
  int num_devices = 1;
  bool apart = false;    // each stream's kernels count as another GPU's where scopes are judged
  uint32_t target = 90;  // 90, 100 or 103: compute capability of the devices

  // Whose PTX they run: a device of 10.3 takes that of 10.0, as a driver does.
  uint32_t image_target() const { return target / 10 * 10; }
};

// All calls under lock(), except where they say otherwise.
class Devices {
 public:
  static Devices& get();
  static Settings settings;  // read when the first device is needed

  FairMutex mutex;
  std::condition_variable_any ended;  // some operation has

  ptxm::Machine& machine() { return *machine_; }
  int count() const { return settings.num_devices; }
  const ptxm::DeviceModel& model() const { return model_; }
  int machine_device(int ordinal) const { return machine_devices_[size_t(ordinal)]; }

  cudaStream_t make_stream(int device, bool blocking);
  // The stream that an API's argument names; null: the current device's legacy stream.
  cudaStream_t resolve(cudaStream_t stream);
  bool is_stream(cudaStream_t stream) const;
  void enqueue(cudaStream_t stream, Op op);
  Mark tail(cudaStream_t stream) const { return {stream, stream->issued}; }
  bool idle(int device) const;  // nothing is queued or runs there
  const std::vector<cudaStream_t>& streams() const { return streams_; }

  // Waits, with the lock given up meanwhile; the error of the device, if it has one.
  cudaError_t wait(std::unique_lock<FairMutex>& lock, cudaStream_t stream);
  cudaError_t wait_device(std::unique_lock<FairMutex>& lock, int device);
  cudaError_t wait_mark(std::unique_lock<FairMutex>& lock, const Mark& mark);
  void host_knows(cudaStream_t stream);

  void hold_copies(bool hold);  // others' copies keep the copy engines busy

  std::set<int> contexts;          // devices that a thread chose or worked on
  std::string dropped;             // a mutant: this call does nothing
  cudaError_t lost = cudaSuccess;  // what every call says from then on
  void lose(cudaError_t why);
  ptxm::Order host;  // what the host knows of
  uint64_t reports_seen = 0;
  std::mt19937_64 random;

 private:
  // Kernels that have not begun, of all streams of a hardware queue, in the order of their calls.
  using Queue = std::deque<std::pair<cudaStream_t, uint64_t>>;

  Devices();
  void loop();
  bool turn(std::unique_lock<FairMutex>& lock);  // begins or does what can be; whether anything was
  void begin(std::unique_lock<FairMutex>& lock, cudaStream_t stream);
  bool ready(const Op& op) const;
  Queue& queue_of(cudaStream_t stream) { return queues_[size_t(stream->device)][size_t(stream->queue)]; }
  void finish(cudaStream_t stream);
  void take_ended();
  void say_reports();
  void forget_if_all_known();

  std::unique_ptr<ptxm::Machine> machine_;
  ptxm::DeviceModel model_;
  std::vector<int> machine_devices_;
  std::vector<cudaStream_t> streams_, legacy_;
  std::vector<std::vector<Queue>> queues_;  // of each device
  std::vector<size_t> streams_used_;        // for kernels, of each device
  std::map<ptxm::LaunchId, cudaStream_t> running_;
  bool copies_held_ = false;
  std::condition_variable_any work_;
};

// The calling thread's device, and the error that its last call left.
extern thread_local int current_device;
extern thread_local cudaError_t last_error;
inline cudaError_t said(cudaError_t status) {
  if (status != cudaSuccess && status != cudaErrorNotReady) last_error = status;
  return status;
}

}  // namespace hep::ptxr

#define HEP_PTXR_API extern "C" __attribute__((visibility("default")))
