// The declarations of NVSHMEM's headers that nvshmem_host.cu needs, for tests on machines without it.
#pragma once
#include <climits>
#include <cstddef>

#define NVSHMEM_VENDOR_MAJOR_VERSION 3
#define NVSHMEM_VENDOR_MINOR_VERSION 4
#define NVSHMEM_VENDOR_PATCH_VERSION 5
enum { NVSHMEM_STATUS_NOT_INITIALIZED = 0, NVSHMEM_STATUS_IS_BOOTSTRAPPED, NVSHMEM_STATUS_IS_INITIALIZED };
enum { NVSHMEM_THREAD_SERIALIZED = 2 };
enum { NVSHMEMX_INIT_WITH_UNIQUEID = 1 << 3 };

struct nvshmemi_version_t {
  int major, minor, patch;
};
struct nvshmemx_uniqueid_t {
  int version;
  char internal[124];
};
struct nvshmemx_init_attr_t {
  int version;
  int pe, num_pes;
  nvshmemx_uniqueid_t id;
};
#define NVSHMEMX_UNIQUEID_INITIALIZER {(1 << 16) + 128, {0}}
#define NVSHMEMX_INIT_ATTR_INITIALIZER {(1 << 16) + 144, -1, -1, NVSHMEMX_UNIQUEID_INITIALIZER}

using cudaStream_t = struct CUstream_st*;

int nvshmemi_init_thread(int requested, int* provided, unsigned flags, nvshmemx_init_attr_t* attr,
                         nvshmemi_version_t version);
extern "C" {
void nvshmemi_finalize();
int nvshmemx_get_uniqueid(nvshmemx_uniqueid_t* id);
int nvshmemx_set_attr_uniqueid_args(int pe, int num_pes, const nvshmemx_uniqueid_t* id, nvshmemx_init_attr_t* attr);
int nvshmemx_init_status();
void nvshmemx_vendor_get_version_info(int* major, int* minor, int* patch);
int nvshmem_my_pe();
int nvshmem_n_pes();
void* nvshmem_malloc(size_t bytes);
void nvshmem_free(void* data);
void nvshmemx_quiet_on_stream(cudaStream_t stream);
void* nvshmem_ptr(const void* data, int pe);
}
