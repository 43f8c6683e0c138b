// The part of DLPack's C interface that torch offers as torch.Tensor.__dlpack_c_exchange_api__: layouts of version 1,
// whose field order is fixed (github.com/dmlc/dlpack, include/dlpack/dlpack.h).
#pragma once
#include <cstdint>

namespace hep::dlpack {

inline constexpr uint32_t kMajor = 1, kMinor = 0;
inline constexpr int32_t kCpu = 1, kCuda = 2;  // device types

struct Version {
  uint32_t major, minor;
};
struct Device {
  int32_t type, index;
};
struct DataType {
  uint8_t code, bits;
  uint16_t lanes;
};
struct DLTensor {
  void* data;
  Device device;
  int32_t ndim;
  DataType dtype;
  int64_t *shape, *strides;  // of elements
  uint64_t byte_offset;
};
struct Managed {
  Version version;
  void* context;
  void (*deleter)(Managed*);
  uint64_t flags;
  DLTensor tensor;
};

struct ExchangeApi {
  Version version;
  ExchangeApi* previous;  // of a lower major version
  int (*allocate)(DLTensor*, Managed**, void*, void (*)(void*, const char*, const char*));
  int (*managed_of)(void* object, Managed**);
  int (*object_of)(Managed*, void** object);  // takes the tensor over
  int (*tensor_of)(void* object, DLTensor*);  // lends; may be null
  int (*stream_of)(int32_t device_type, int32_t index, void** stream);
};

}  // namespace hep::dlpack
