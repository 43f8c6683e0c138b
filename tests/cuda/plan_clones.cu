// The planner's kernel for a GPU, with eight warps and with three: compiled by tests/ptx/test_plan_clones.py, which
// runs its PTX. The balance kernel of the CUDA library plans by the same function.
#include "arch/sm90/cuda_arch.h"
#include "kernels/plan_clones.h"

namespace hep {

template <int kWarps>
__global__ void __launch_bounds__(kWarps* CudaArch::kLanes, 1)
    plan_clones_entry(const __grid_constant__ ClonePlanParams p, CudaControl* control) {
  extern __shared__ __align__(128) unsigned char shared[];
  CudaArch a(control);
  plan_clones_kernel(a, p, reinterpret_cast<std::byte*>(shared));
}

template __global__ void plan_clones_entry<kPlanWarps>(const __grid_constant__ ClonePlanParams, CudaControl*);
template __global__ void plan_clones_entry<3>(const __grid_constant__ ClonePlanParams, CudaControl*);

}  // namespace hep
