// POSIX shared memory with errors a user can act on.
#include "runtime/segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <new>
#include <stdexcept>
#include <system_error>

namespace hep {
namespace {

struct Fd {
  int fd;
  ~Fd() {
    if (fd >= 0) ::close(fd);
  }
};

std::string mib(uint64_t bytes) {
  return std::to_string((bytes + (1 << 20) - 1) >> 20) + " MiB";
}

[[noreturn]] void fail(const std::string& what, const std::string& name) {
  throw std::system_error(errno, std::generic_category(), what + " shared memory '" + name + "'");
}

// std::bad_alloc with words: becomes Python's MemoryError.
struct OutOfSharedMemory : std::bad_alloc {
  std::string text;
  explicit OutOfSharedMemory(std::string t) : text(std::move(t)) {}
  const char* what() const noexcept override { return text.c_str(); }
};

[[noreturn]] void fail_to_map(size_t bytes, const std::string& name) {
  if (errno == ENOMEM)
    throw OutOfSharedMemory("a registered buffer of " + mib(bytes) +
                            " is more memory than this machine gives: give it more");
  fail("cannot map", name);
}

constexpr size_t kHugePage = 2u << 20;

// Shared memory begins where a huge page would: every process that maps it can then use those that it lies in.
unsigned char* map(int fd, size_t bytes, const std::string& name) {
  if (fd < 0) {
    void* p = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) fail_to_map(bytes, name);
    return static_cast<unsigned char*>(p);
  }
  const size_t page = size_t(::sysconf(_SC_PAGESIZE)), room = bytes + kHugePage;
  void* reserved = ::mmap(nullptr, room, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (reserved == MAP_FAILED) fail_to_map(bytes, name);
  const auto begin = reinterpret_cast<uintptr_t>(reserved), at = (begin + kHugePage - 1) / kHugePage * kHugePage,
             end = at + (bytes + page - 1) / page * page;
  void* p = ::mmap(reinterpret_cast<void*>(at), bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0);
  if (p == MAP_FAILED) {
    const int why = errno;
    ::munmap(reserved, room);
    errno = why;
    fail_to_map(bytes, name);
  }
  if (at > begin) ::munmap(reserved, at - begin);
  if (begin + room > end) ::munmap(reinterpret_cast<void*>(end), begin + room - end);
  // A forked child (a data loader's worker) neither keeps the memory after its parent has given it back, nor can it
  // write into it. Where the kernel refuses, the child inherits it, as anything else.
  ::madvise(p, bytes, MADV_DONTFORK);
  return static_cast<unsigned char*>(p);
}

// As posix_fallocate, but goes on behind a signal that was handled, which makes the kernel give up, and take back, what
// the call had reserved: in pieces, so that signals that come again and again do not hold it up for ever.
int reserve(int fd, size_t at, size_t bytes) {
  constexpr size_t kPiece = 64 << 20;
  for (const size_t end = at + bytes; at < end;) {
    const size_t piece = std::min(kPiece, end - at);
    const int err = ::posix_fallocate(fd, off_t(at), off_t(piece));
    if (err == EINTR) continue;
    if (err != 0) return err;
    at += piece;
  }
  return 0;
}

// Fills fresh shared memory with huge pages, as far as there are some: of scattered rows a page long, a core reads a
// seventh more from those than from pages of 4 KiB. It asks by MADV_COLLAPSE (Linux 6.1), which takes no privilege and
// heeds no setting of the system for shared memory, which is "never" by default. It wants something there to collapse,
// hence the byte in each. A hint: what fails here is left to be reserved as it may.
void take_huge_pages(int fd, unsigned char* data, size_t bytes) {
  constexpr int kCollapse = 25;  // MADV_COLLAPSE, which older C libraries do not name
  if (bytes < kHugePage) return;
  for (size_t at = 0; at + kHugePage <= bytes; at += kHugePage)
    if (reserve(fd, at, 1) != 0) return;
  (void)::madvise(data, bytes / kHugePage * kHugePage, kCollapse);
}

}  // namespace

std::shared_ptr<Segment> Segment::create(const std::string& name, size_t bytes) {
  Fd fd{::shm_open(name.c_str(), O_CREAT | O_EXCL | O_RDWR | O_CLOEXEC, 0600)};
  if (fd.fd < 0) fail("cannot create", name);
  try {
    struct statvfs fs{};
    const bool known = ::fstatvfs(fd.fd, &fs) == 0;
    const uint64_t free = uint64_t(fs.f_bavail) * fs.f_frsize;
    if (::ftruncate(fd.fd, off_t(bytes)) != 0) fail("cannot reserve", name);
    std::shared_ptr<Segment> segment(new Segment(name, map(fd.fd, bytes, name), bytes, false));
    if (free >= bytes) take_huge_pages(fd.fd, segment->data_, bytes);
    if (int err = reserve(fd.fd, 0, bytes); err != 0) {
      if (err == ENOSPC || err == ENOMEM)
        throw OutOfSharedMemory("a registered buffer of " + mib(bytes) + " does not fit into /dev/shm (" +
                                (known ? mib(free) + " free" : "size unknown") +
                                "): enlarge it (mount -o remount,size=16g /dev/shm, docker run --shm-size=16g)");
      errno = err;
      fail("cannot reserve", name);
    }
    segment->linked_ = true;
    return segment;
  } catch (...) {
    ::shm_unlink(name.c_str());
    throw;
  }
}

std::shared_ptr<Segment> Segment::attach(const std::string& name, size_t bytes) {
  Fd fd{::shm_open(name.c_str(), O_RDWR | O_CLOEXEC, 0600)};
  if (fd.fd < 0) fail("cannot open", name);
  struct stat st{};
  if (::fstat(fd.fd, &st) != 0) fail("cannot stat", name);
  if (size_t(st.st_size) != bytes)
    throw std::invalid_argument("num_bytes: shared memory '" + name + "' has " + std::to_string(st.st_size) +
                                " bytes, expected " + std::to_string(bytes) +
                                "; all ranks must use the same buffer shape");
  return std::shared_ptr<Segment>(new Segment(name, map(fd.fd, bytes, name), bytes, false));
}

std::shared_ptr<Segment> Segment::private_memory(size_t bytes) {
  return std::shared_ptr<Segment>(new Segment("", map(-1, bytes, "(private)"), bytes, false));
}

std::shared_ptr<Segment> Segment::adopt(unsigned char* data, size_t bytes, std::shared_ptr<void> owner) {
  std::shared_ptr<Segment> s(new Segment("", data, bytes, false));
  s->owner_ = std::move(owner);
  return s;
}

Segment::Segment(std::string name, unsigned char* data, size_t bytes, bool owner)
    : name_(std::move(name)), data_(data), bytes_(bytes), pid_(::getpid()), linked_(owner) {}

Segment::~Segment() {
  if (::getpid() != pid_) return;  // a forked child, in which something else may lie at this address by now
  unlink();
  if (!owner_) ::munmap(data_, bytes_);
}

namespace {

bool inside(size_t first, size_t length, size_t bytes) {
  return first <= bytes && length <= bytes - first;
}

void require_host(bool is_host) {
  if (!is_host) throw std::invalid_argument("the segment is memory of a device: the host neither reads nor writes it");
}

}  // namespace

unsigned char* Segment::counter(size_t offset) const {
  if (offset % sizeof(uint64_t) != 0 || !inside(offset, sizeof(uint64_t), bytes_))
    throw std::out_of_range("offset=" + std::to_string(offset) + " is no counter of a segment of " +
                            std::to_string(bytes_) + " bytes: give a multiple of 8 inside it");
  return data_ + offset;
}

uint64_t Segment::observe(size_t offset) const {
  require_host(is_host());
  return std::atomic_ref(*reinterpret_cast<uint64_t*>(counter(offset))).load(std::memory_order_acquire);
}

void Segment::publish(size_t offset, uint64_t value) {
  require_host(is_host());
  std::atomic_ref(*reinterpret_cast<uint64_t*>(counter(offset))).store(value, std::memory_order_release);
}

void Segment::require_inside(const std::vector<std::shared_ptr<Segment>>& sources, const std::vector<Piece>& pieces,
                             size_t bytes) {
  for (const Piece& p : pieces)
    if (p.source >= sources.size() || !inside(p.from, p.bytes, sources[p.source]->bytes_) ||
        !inside(p.to, p.bytes, bytes))
      throw std::out_of_range("pieces: " + std::to_string(p.bytes) + " bytes from " + std::to_string(p.from) +
                              " of source " + std::to_string(p.source) + " to " + std::to_string(p.to) +
                              " lie outside; give places inside the segments");
}

void Segment::pull(const std::vector<std::shared_ptr<Segment>>& sources, const std::vector<Piece>& pieces) {
  require_inside(sources, pieces, bytes_);
  require_host(is_host());
  for (const auto& source : sources) require_host(source->is_host());
  for (const Piece& p : pieces) std::memcpy(data_ + p.to, sources[p.source]->data_ + p.from, p.bytes);
}

void Segment::unlink() {
  if (linked_) ::shm_unlink(name_.c_str());
  linked_ = false;
}

}  // namespace hep
