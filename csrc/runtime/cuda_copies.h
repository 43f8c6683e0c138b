// What ranks need that pull one another's bytes on GPUs: copies by copy engines out of registered memory that is mapped
// here, and counters in it. No kernel takes part.
#pragma once
#include <cstddef>
#include <cstdint>
#include <optional>

namespace hep::cuda {

// A stream that only copies, of the device that was current when this was made. It is lent: what is under way on it
// goes on to its end.
class CopyStream {
 public:
  virtual ~CopyStream() = default;
  virtual void* stream() const = 0;  // a cudaStream_t, for events
  // Between devices' memory, behind what the stream holds. Waits for nothing.
  virtual void copy(unsigned char* to, const unsigned char* from, size_t bytes) = 0;
};

// Reads counters for the host, one at a time, whichever thread asks.
class CounterReader {
 public:
  virtual ~CounterReader() = default;
  // The counter at `from`, by a copy of its 8 bytes that is waited for as long as patience_s; nullopt: it was not there
  // by then, for the copy engines have others' to do. Throws std::runtime_error when the device is lost.
  virtual std::optional<uint64_t> read(const unsigned char* from, double patience_s) = 0;
};

// Stores a counter behind all that the stream holds, whose writes are seen by whoever has read the value: CUDA has a
// fence for the whole system before it. Aligned to 8 bytes. Waits for nothing.
void write_counter(unsigned char* to, uint64_t value, void* stream);

}  // namespace hep::cuda
