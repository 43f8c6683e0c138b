// A stand-in for libnvshmem_host.so.3: the symmetric heap over POSIX shared memory, collectives over a counter in it.
// Like NVSHMEM it has no deadlines, minds sizes that differ between PEs, and gives memory that is not zero.
// STAND_IN_NVSHMEM="other build", "fail:CALL:PE" (* for all), "hang:CALL:PE" or "version:MAJOR.MINOR" misleads it;
// STAND_IN_NVSHMEM_LOG names a file for a line per call.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "nvshmem_host.h"

namespace {

constexpr int kMaxPes = 16;

struct Control {
  std::atomic<uint32_t> arrived, round;
  uint64_t wish[kMaxPes];
};
struct Block {
  size_t bytes;
  std::vector<void*> at;  // by PE
};

Control* control = nullptr;
std::string world;
int my_pe = -1, num_pes = 0, num_blocks = 0;
std::map<const void*, Block> blocks;

bool told(const char* kind, const char* call) {
  const char* text = std::getenv("STAND_IN_NVSHMEM");
  const std::string about = std::string(kind) + ":" + call + ":";
  return text && (text == about + "*" || text == about + std::to_string(my_pe));
}
void note(const char* call, unsigned long long value = 0) {
  if (const char* path = std::getenv("STAND_IN_NVSHMEM_LOG"))
    if (std::FILE* f = std::fopen(path, "a")) std::fprintf(f, "%d %s %llu\n", my_pe, call, value), std::fclose(f);
}
void misbehave(const char* call) {
  while (told("hang", call)) ::usleep(10000);
}
void* map(const std::string& name, size_t bytes, bool create) {
  const int fd = ::shm_open(name.c_str(), O_RDWR | (create ? O_CREAT : 0), 0600);
  if (fd < 0) return nullptr;
  if (create && ::ftruncate(fd, off_t(bytes))) return nullptr;
  void* at = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  ::close(fd);
  return at == MAP_FAILED ? nullptr : at;
}
void barrier() {
  const uint32_t round = control->round;
  if (++control->arrived == uint32_t(num_pes)) {
    control->arrived = 0;
    ++control->round;
  }
  while (control->round == round) ::usleep(100);
}
std::string name_of(const nvshmemx_uniqueid_t& id) {
  return std::string("/stand_in.") + std::string(id.internal, 16);
}

}  // namespace

extern "C" {

void nvshmemx_vendor_get_version_info(int* major, int* minor, int* patch) {
  *major = NVSHMEM_VENDOR_MAJOR_VERSION, *minor = NVSHMEM_VENDOR_MINOR_VERSION, *patch = 9;
  if (const char* text = std::getenv("STAND_IN_NVSHMEM")) std::sscanf(text, "version:%d.%d", major, minor);
}
int nvshmemx_init_status() {
  if (!control) return NVSHMEM_STATUS_NOT_INITIALIZED;
  return told("fail", "context") ? NVSHMEM_STATUS_IS_BOOTSTRAPPED : NVSHMEM_STATUS_IS_INITIALIZED;
}
int nvshmemx_get_uniqueid(nvshmemx_uniqueid_t* id) {
  note("unique_id");
  if (told("fail", "unique_id")) return 7;
  uint64_t random = 0;
  std::FILE* f = std::fopen("/dev/urandom", "rb");
  if (!f || std::fread(&random, 8, 1, f) != 1) return 1;
  std::fclose(f);
  std::snprintf(id->internal, sizeof id->internal, "%016llx", static_cast<unsigned long long>(random));
  return map(name_of(*id), sizeof(Control), true) ? 0 : 1;
}
int nvshmemx_set_attr_uniqueid_args(int pe, int n, const nvshmemx_uniqueid_t* id, nvshmemx_init_attr_t* attr) {
  attr->pe = pe, attr->num_pes = n, attr->id = *id;
  return 0;
}
int stand_in_init(const nvshmemx_init_attr_t* attr) {
  my_pe = attr->pe, num_pes = attr->num_pes, world = name_of(attr->id);
  note("init", unsigned(num_pes));
  misbehave("init");
  if (told("fail", "init")) return 7;
  control = static_cast<Control*>(map(world, sizeof(Control), false));
  if (!control) return 3;
  barrier();
  return 0;
}
int nvshmem_my_pe() {
  return my_pe;
}
int nvshmem_n_pes() {
  return num_pes;
}

void* nvshmem_malloc(size_t bytes) {
  note("malloc", bytes);
  misbehave("malloc");
  control->wish[my_pe] = told("fail", "malloc") ? 0 : bytes;
  barrier();
  bool same = true;
  for (int pe = 0; pe < num_pes; ++pe) same &= control->wish[pe] == bytes;
  barrier();
  if (!same) return nullptr;
  Block block{bytes, {}};
  const auto name = [&](int pe) { return world + "." + std::to_string(num_blocks) + "." + std::to_string(pe); };
  void* own = map(name(my_pe), bytes, true);
  std::memset(own, 0xFF, bytes);
  barrier();
  for (int pe = 0; pe < num_pes; ++pe) block.at.push_back(pe == my_pe ? own : map(name(pe), bytes, false));
  barrier();
  ::shm_unlink(name(my_pe).c_str());
  ++num_blocks;
  blocks[own] = block;
  return own;
}
void nvshmemx_quiet_on_stream(cudaStream_t) {
  note("quiet");
  misbehave("quiet");
}
void nvshmem_free(void* data) {
  const Block block = blocks.at(data);
  note("free", block.bytes);
  misbehave("free");
  barrier();
  for (void* at : block.at) ::munmap(at, block.bytes);
  blocks.erase(data);
}
void* nvshmem_ptr(const void* data, int pe) {
  return told("fail", "ptr") && pe != my_pe ? nullptr : blocks.at(data).at[size_t(pe)];
}
void stand_in_finalize() {
  note("finalize", blocks.size());
  barrier();
  ::munmap(control, sizeof(Control));
  ::shm_unlink(world.c_str());
  control = nullptr, my_pe = -1;
}
}
