// Kernels that meet: each counts itself and waits for all others.
#include "kernels/instances/cuda_meet.h"

#include "arch/sm90/ptx.h"
#include "kernels/instances/cuda_memory.h"

namespace hep::cuda {
namespace {

// Two meetings: of a stream's second kernel, which waits for the first, others' first ones must not stand behind it in
// a queue.
constexpr int kRounds = 2;
struct Meeting {
  uint64_t come[kRounds];
  uint64_t late;
};

// One that is late lets all go that come later.
__global__ void meet_entry(Meeting* m, int round, uint64_t all, uint64_t patience_ns) {
  ptx::red_add_relaxed_sys(&m->come[round], 1);
  const uint64_t since = ptx::globaltimer();
  while (ptx::ld_relaxed_sys(&m->come[round]) < all && ptx::ld_relaxed_sys(&m->late) == 0) {
    if (ptx::globaltimer() - since > patience_ns) ptx::st_relaxed_sys(&m->late, 1);
  }
}

}  // namespace

bool run_at_once(const std::vector<void*>& streams, double patience_s) {
  if (streams.empty()) return true;
  const auto entry = reinterpret_cast<const void*>(meet_entry);
  cudaFuncAttributes loaded{};  // now: loading a kernel may wait for those that run
  check(cudaFuncGetAttributes(&loaded, entry), "this build has no kernel for this device");
  const auto first = static_cast<cudaStream_t>(streams.front());
  const Block block(sizeof(Meeting), first);
  auto* meeting = static_cast<Meeting*>(block.data);
  check(cudaMemsetAsync(meeting, 0, sizeof *meeting, first), "memset");
  check(cudaStreamSynchronize(first), "memset");
  uint64_t all = streams.size(), patience_ns = uint64_t(patience_s * 1e9);
  for (void* stream : streams)
    for (int round = 0; round < kRounds; ++round) {
      void* args[] = {&meeting, &round, &all, &patience_ns};
      check(cudaLaunchKernel(entry, dim3(1), dim3(1), args, 0, static_cast<cudaStream_t>(stream)), "launch");
    }
  for (void* stream : streams) check(cudaStreamSynchronize(static_cast<cudaStream_t>(stream)), "kernels that meet");
  uint64_t late = 0;
  check(cudaMemcpyAsync(&late, &meeting->late, sizeof late, cudaMemcpyDeviceToHost, first), "download");
  check(cudaStreamSynchronize(first), "download");
  return late == 0;
}

}  // namespace hep::cuda
