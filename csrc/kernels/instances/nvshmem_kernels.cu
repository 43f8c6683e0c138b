// The kernels whose rail is a NIC, for both architectures. Compiled and linked where NVSHMEM's headers are
// (scripts/build_cuda.py --nvshmem); the host's half, which starts NVSHMEM and puts segments into its heap, is missing,
// so that nothing launches them yet.
#include "kernels/instances/cuda_kernels.h"
#include "transport/nvshmem/nvshmem_device.h"

namespace hep {

template __global__ void exchange_entry<NvshmemDevice>(const __grid_constant__ ExchangeParams, NvshmemDevice,
                                                       CudaControl*);
template __global__ void dispatch_entry<NvshmemDevice>(const __grid_constant__ DispatchParams, NvshmemDevice,
                                                       CudaControl*);
template __global__ void deliver_entry<NvshmemDevice>(const __grid_constant__ DispatchParams, NvshmemDevice,
                                                      CudaControl*);
template __global__ void unpermute_entry<NvshmemDevice>(const __grid_constant__ CombineParams, NvshmemDevice,
                                                        CudaControl*);
template __global__ void combine_entry<NvshmemDevice>(const __grid_constant__ CombineParams, NvshmemDevice,
                                                      CudaControl*);

}  // namespace hep
