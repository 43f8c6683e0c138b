// Compiler shims that let one source serve g++ and nvcc. The only macros of the project, all HEP_*.
#pragma once

#if defined(__CUDACC__)
#define HEP_DEVICE __device__ __forceinline__
#define HEP_HOST_DEVICE __host__ __device__ __forceinline__
#define HEP_RESTRICT __restrict__
#else
#define HEP_DEVICE inline
#define HEP_HOST_DEVICE inline
#define HEP_RESTRICT __restrict__
#endif

// HEP_MUTANT selects one injected bug in a test build (tests/cpp/mutants); 0 is the real code.
// `if (kMutant == n)` folds away, so the product carries none of it.
#ifndef HEP_MUTANT
#define HEP_MUTANT 0
#endif
namespace hep {
inline constexpr int kMutant = HEP_MUTANT;
}
