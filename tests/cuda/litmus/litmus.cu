// The patterns of docs/memory_model.md as kernels of a pair of devices, and the host that runs one. scripts/
// gpu_litmus.py builds and drives it; tests/ptx runs the same kernels on the PTX machine.
#include <chrono>
#include <cstdio>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels/instances/cuda_memory.h"
#include "litmus.h"
#include "patterns.h"

namespace hep::litmus {
namespace {

constexpr uint32_t kSlots = 4;  // rounds of a pair under way at once

template <class Body>
HEP_DEVICE void in_block(CudaControl* control, Body&& body) {
  extern __shared__ __align__(128) unsigned char shared[];
  auto& s = *reinterpret_cast<Shared*>(shared);
  CudaArch a(control);
  if (threadIdx.x == 0) {
    a.mbar_init(s.full, 1, false);
    a.mbar_init(s.empty, 1, true);
  }
  a.block_sync();
  a.set_role(Role::kTest);
  body(a, s);
}
template <Send kSend>
__global__ void __launch_bounds__(32) write_rows(const __grid_constant__ Params p, CudaControl* control) {
  in_block(control, [&](CudaArch& a, Shared& s) { Writer<kSend>{a, p, s}.run(); });
}
template <Receive kReceive>
__global__ void __launch_bounds__(32) read_rows(const __grid_constant__ Params p, CudaControl* control) {
  in_block(control, [&](CudaArch& a, Shared& s) { Reader<kReceive>(a, p, s).run(); });
}
template <Pass kPass>
__global__ void __launch_bounds__(64) refill(const __grid_constant__ Params p, CudaControl* control) {
  in_block(control, [&](CudaArch& a, Shared& s) { Refill<kPass>{a, p, s}.run(); });
}
// Every place of a pair with the row of its round, 1 to `places`.
__global__ void fill_rows(const __grid_constant__ Params p, CudaControl*) {
  for (uint32_t r = 1; r <= p.places; ++r)
    for (uint32_t i = threadIdx.x; i < kRowWords; i += blockDim.x)
      p.row(blockIdx.x, r)[i] = Params::value(blockIdx.x, r, i);
}

struct Pattern {
  const char* name;  // its number in docs/memory_model.md, and what it is
  bool clean;        // keeps the contract: a word of another round is a finding. Else it lacks a piece, and may show it
  const void *writer, *reader;
  uint32_t writers, threads;  // blocks of a pair that write; threads of a reader's block
  uint32_t slots = kSlots;
  bool tight = false;  // as many places as rounds under way: a row is written over as soon as its credit came
};
template <Send kSend, Receive kReceive>
Pattern pair_of(const char* name, bool clean, bool tight = false) {
  const uint32_t writers = two_blocks(kSend) ? 2 : 1;
  return {name,
          clean,
          reinterpret_cast<const void*>(write_rows<kSend>),
          reinterpret_cast<const void*>(read_rows<kReceive>),
          writers,
          32,
          two_blocks(kSend) ? 1 : kSlots,  // the chain counts the blocks of one round
          tight};
}
template <Pass kPass>
Pattern of_a_block(const char* name, bool clean) {
  return {name, clean, nullptr, reinterpret_cast<const void*>(refill<kPass>), 0, 64};
}
const std::vector<Pattern>& patterns() {
  static const std::vector<Pattern> all = {
      pair_of<Send::kGeneric, Receive::kGeneric>("1 generic stores, release; acquire, generic loads", true),
      pair_of<Send::kGenericRelaxed, Receive::kGeneric>("1 with a relaxed flag", false),
      pair_of<Send::kBulk, Receive::kGeneric>("2 bulk stores, wait, release; acquire, generic loads", true),
      pair_of<Send::kBulkUnwaited, Receive::kGeneric>("2 without the wait", false),
      pair_of<Send::kBulk, Receive::kBulk>("3 bulk stores, wait, release; acquire, fence, bulk load", true),
      pair_of<Send::kGeneric, Receive::kBulk>("3 after generic stores", true),
      pair_of<Send::kBulk, Receive::kBulkNoFence>("4 as 3 without the reader's fence", false),
      pair_of<Send::kGeneric, Receive::kBulkNoFence>("4 after generic stores", false),
      pair_of<Send::kTwoBlocks, Receive::kBulk>("5 two blocks, the last of their chain releases", true),
      pair_of<Send::kTwoBlocksNoChain, Receive::kBulk>("5 with relaxed atomics", false),
      of_a_block<Pass::kPublished>("6 a stage is refilled", true),
      of_a_block<Pass::kEarly>("6 with the arrival before the stage is read", false),
      of_a_block<Pass::kUnpublished>("7 as 6 without publish_shared", false),
      pair_of<Send::kBulk, Receive::kBulk>("8 a row is written over behind its credit", true, true),
      pair_of<Send::kGeneric, Receive::kGeneric>("8 by generic stores and loads", true, true),
      pair_of<Send::kGeneric, Receive::kEarlyCredit>("8 with the credit before the row is read", false, true),
      pair_of<Send::kLines, Receive::kLines>("11 lines of 128 bytes", true),
      pair_of<Send::kTornLines, Receive::kLines>("11 with a line's flag before its payload", false),
  };
  return all;
}

using cuda::check;

// Memory of one device; freed with the current device whatever it is, which CUDA allows.
template <class T>
struct On {
  On(int device, size_t n) {
    check(cudaSetDevice(device), "choosing the device");
    check(cudaMalloc(reinterpret_cast<void**>(&data), n * sizeof(T)), "device memory");
    check(cudaMemset(data, 0, n * sizeof(T)), "zeroes");
  }
  ~On() { (void)cudaFree(data); }
  On(const On&) = delete;
  On& operator=(const On&) = delete;
  T* data = nullptr;
};

// A device's side of a run: its stream, its waits' deadline and where they report.
struct Side {
  Side(int d, uint64_t timeout_ns) : device(d), control(d, 1) {
    check(cudaHostAlloc(reinterpret_cast<void**>(&report), sizeof(DeviceTimeoutReport), cudaHostAllocMapped),
          "memory of the host");
    *report = {};
    CudaControl c{timeout_ns, nullptr, 0, 0};
    check(cudaHostGetDevicePointer(reinterpret_cast<void**>(&c.timeout_report), report, 0), "mapped memory");
    check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
    check(cudaMemcpyAsync(control.data, &c, sizeof c, cudaMemcpyHostToDevice, stream), "upload");
    check(cudaStreamSynchronize(stream), "upload");
  }
  ~Side() {
    (void)cudaStreamDestroy(stream);
    (void)cudaFreeHost(report);
  }
  Side(const Side&) = delete;
  Side& operator=(const Side&) = delete;

  void launch(const void* kernel, uint32_t blocks, uint32_t threads, Params& p) {
    check(cudaSetDevice(device), "choosing the device");
    void* args[] = {&p, &control.data};
    check(cudaLaunchKernel(kernel, dim3(blocks), dim3(threads), args, sizeof(Shared), stream), "launch");
  }
  void wait(const char* who) {
    check(cudaStreamSynchronize(stream), who);
    if (report->written)
      throw std::runtime_error(std::string(who) + " waited until its deadline, block " + std::to_string(report->block) +
                               ", round " + std::to_string(report->chunk) + ", for " +
                               std::to_string(report->expected) + ", and saw " + std::to_string(report->seen));
  }

  int device;
  On<CudaControl> control;
  DeviceTimeoutReport* report = nullptr;
  cudaStream_t stream = nullptr;
};

// Copies from one device to the other and back while `under_way` says so: load on the link.
struct Load {
  static constexpr size_t kBytes = size_t(64) << 20;
  On<std::byte> there, here;
  Side &a, &b;
  Load(Side& one, Side& other) : there(one.device, kBytes), here(other.device, kBytes), a(one), b(other) {
    for (auto* s : {&to, &from}) check(cudaStreamCreateWithFlags(s, cudaStreamNonBlocking), "stream");
  }
  ~Load() {
    for (auto s : {to, from}) (void)cudaStreamSynchronize(s), (void)cudaStreamDestroy(s);
  }
  void run(const std::function<bool()>& under_way) {
    while (under_way()) {
      check(cudaMemcpyAsync(here.data, there.data, kBytes / 2, cudaMemcpyDefault, to), "load");
      check(cudaMemcpyAsync(there.data + kBytes / 2, here.data + kBytes / 2, kBytes / 2, cudaMemcpyDefault, from),
            "load");
      check(cudaStreamSynchronize(to), "load");
      check(cudaStreamSynchronize(from), "load");
    }
  }
  cudaStream_t to = nullptr, from = nullptr;
};

void reach(int from, int to) {
  if (from == to) return;
  int can = 0;
  check(cudaDeviceCanAccessPeer(&can, from, to), "peer access");
  if (!can)
    throw std::runtime_error("device " + std::to_string(from) + " cannot map memory of device " + std::to_string(to));
  check(cudaSetDevice(from), "choosing the device");
  if (const auto status = cudaDeviceEnablePeerAccess(to, 0); status != cudaErrorPeerAccessAlreadyEnabled)
    check(status, "peer access");
  (void)cudaGetLastError();
}

Result run(const Request& q) {
  const Pattern& pattern = patterns().at(size_t(q.pattern));
  reach(q.writer_device, q.reader_device);
  reach(q.reader_device, q.writer_device);
  Side writer(q.writer_device, q.timeout_ns), reader(q.reader_device, q.timeout_ns);
  const uint32_t places = pattern.tight ? pattern.slots : q.places;
  const size_t words = size_t(q.blocks) * kFlagWords;
  On<uint64_t> rows(q.rows_at_writer ? q.writer_device : q.reader_device, size_t(q.blocks) * places * kRowWords),
      flags(q.reader_device, words), credits(q.writer_device, words), met(q.writer_device, words);
  On<Count> counts(q.reader_device, q.blocks);
  for (const int device : {q.writer_device, q.reader_device}) {  // zeroes are there before anybody looks
    check(cudaSetDevice(device), "choosing the device");
    check(cudaDeviceSynchronize(), "zeroes");
  }
  Params p{rows.data,   flags.data, credits.data,  met.data,
           counts.data, q.rounds,   pattern.slots, uint32_t(q.seed * 2654435761u) | 1,
           places};
  const auto began = std::chrono::steady_clock::now();
  if (!pattern.writer) {
    const auto fill = reinterpret_cast<const void*>(fill_rows);
    writer.launch(fill, q.blocks, 64, p);
    writer.wait("the rows' writer");
  }
  reader.launch(pattern.reader, q.blocks, pattern.threads, p);
  if (pattern.writer) writer.launch(pattern.writer, q.blocks * pattern.writers, 32, p);
  if (q.load) Load(writer, reader).run([&] { return cudaStreamQuery(reader.stream) == cudaErrorNotReady; });
  reader.wait("the reader");
  writer.wait("the writer");
  Result r{};
  r.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
  r.rounds = q.rounds * q.blocks;
  std::vector<Count> found(q.blocks);
  check(cudaMemcpyAsync(found.data(), counts.data, q.blocks * sizeof(Count), cudaMemcpyDeviceToHost, reader.stream),
        "counts");
  check(cudaStreamSynchronize(reader.stream), "counts");
  for (const Count& c : found) {
    if (r.old_words + r.others == 0) {
      r.first_round = c.first_round;
      r.first_word = c.first_word;
      r.first_seen = c.first_seen;
    }
    r.old_words += c.old_words;
    r.others += c.others;
  }
  return r;
}

}  // namespace
}  // namespace hep::litmus

#define HEP_LITMUS_API extern "C" __attribute__((visibility("default")))

// The name of a pattern, or null behind the last; *clean: whether it keeps the contract.
HEP_LITMUS_API const char* hep_litmus_pattern(int i, int* clean) {
  const auto& all = hep::litmus::patterns();
  if (i < 0 || size_t(i) >= all.size()) return nullptr;
  *clean = all[size_t(i)].clean;
  return all[size_t(i)].name;
}
// What the caller's structures must measure.
HEP_LITMUS_API int hep_litmus_sizes() {
  return int(sizeof(hep::litmus::Request) << 16 | sizeof(hep::litmus::Result));
}
HEP_LITMUS_API int hep_litmus_devices() {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess ? count : 0;
}
HEP_LITMUS_API void hep_litmus_run(const hep::litmus::Request* request, hep::litmus::Result* result) {
  try {
    *result = hep::litmus::run(*request);
  } catch (const std::exception& error) {
    *result = {};
    std::snprintf(result->error, sizeof result->error, "%s", error.what());
  }
}
