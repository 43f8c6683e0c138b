// Registered memory on a GPU: one allocation that ranks of a node can map. Three kinds, best first; which one a group
// uses is agreed by all ranks after each has really made and mapped one (a driver's flag says too little).
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

namespace hep::cuda {

enum class Share {
  kNone,    // this process only: cudaMalloc
  kFabric,  // handles of 64 bytes that work between hosts of one NVLink domain
  kFile,    // a POSIX file descriptor; between processes of one host
  kIpc,     // cudaMalloc and its IPC handle; between processes of one host
};

// What a peer needs to map the memory. For kFile `fd` is open in this process and must reach the peer by a socket.
struct ShareHandle {
  std::string bytes;
  int fd = -1;
};

class DeviceMemory {
 public:
  virtual ~DeviceMemory() = default;  // unmaps, and frees when this is the last mapping of all ranks
  virtual ShareHandle share() const = 0;
  unsigned char* data() const { return data_; }
  size_t bytes() const { return bytes_; }

  // Zeroed, on the calling thread's current device. Throws std::runtime_error when this kind does not work here,
  // std::bad_alloc when there is no room.
  static std::shared_ptr<DeviceMemory> create(Share kind, size_t bytes);
  static std::shared_ptr<DeviceMemory> attach(Share kind, size_t bytes, const ShareHandle& handle);

 protected:
  unsigned char* data_ = nullptr;
  size_t bytes_ = 0;
};

}  // namespace hep::cuda
