// Compiler shims that let one source serve g++ and nvcc. The only macros of the project, all HEP_*.
#pragma once

#if defined(__CUDACC__)
#define HEP_DEVICE __device__ __forceinline__
#define HEP_HOST_DEVICE __host__ __device__ __forceinline__
#define HEP_RESTRICT __restrict__
#define HEP_UNROLL _Pragma("unroll")
#define HEP_NO_UNROLL _Pragma("unroll 1")
#else
#define HEP_DEVICE inline
#define HEP_HOST_DEVICE inline __attribute__((always_inline))
#define HEP_RESTRICT __restrict__
#define HEP_UNROLL
#define HEP_NO_UNROLL
#endif
