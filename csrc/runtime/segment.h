// A rank's registered memory on the host: a POSIX shared-memory segment, or private memory for worlds inside
// one process. Mode 0600; the owner unlinks the name as soon as all peers have mapped it.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace hep {

class Segment {
 public:
  // create: all bytes are reserved at once, so that a full /dev/shm is an error here and not a SIGBUS later.
  static std::shared_ptr<Segment> create(const std::string& name, size_t bytes);
  static std::shared_ptr<Segment> attach(const std::string& name, size_t bytes);
  static std::shared_ptr<Segment> private_memory(size_t bytes);
  // Memory of another kind (a GPU's), which lives as long as its owner.
  static std::shared_ptr<Segment> adopt(unsigned char* data, size_t bytes, std::shared_ptr<void> owner);
  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  bool is_host() const { return !owner_; }

  // The next three are for memory of the host (cuda_copies.h has them for a GPU's). A counter lies at a multiple of 8
  // bytes; ranks that map the segment tell one another things by it: what was stored before `publish` is seen by
  // whoever has `observe`d its value.
  uint64_t observe(size_t offset) const;
  void publish(size_t offset, uint64_t value);

  // Copies pieces of other segments into this one, in their order. std::out_of_range and
  // std::invalid_argument before anything is copied.
  struct Piece {
    size_t source, from, to, bytes;  // source: place in the list of segments
  };
  void pull(const std::vector<std::shared_ptr<Segment>>& sources, const std::vector<Piece>& pieces);

  // The checks of both, for memory of a device, too: std::out_of_range.
  unsigned char* counter(size_t offset) const;
  static void require_inside(const std::vector<std::shared_ptr<Segment>>& sources, const std::vector<Piece>& pieces,
                             size_t bytes);

  void unlink();  // idempotent; the memory lives until the last mapping goes
  unsigned char* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  const std::string& name() const { return name_; }

 private:
  Segment(std::string name, unsigned char* data, size_t bytes, bool owner);
  std::string name_;
  unsigned char* data_;
  size_t bytes_;
  int pid_;  // of the process that mapped it
  bool linked_;
  std::shared_ptr<void> owner_;
};

}  // namespace hep
