// Loading NVSHMEM, and its calls with words for their failures.
#include "runtime/nvshmem_world.h"

#include <dlfcn.h>

#include <stdexcept>

namespace hep::nvshmem {
namespace {

std::string text(const Version& v) {
  return std::to_string(v.major) + "." + std::to_string(v.minor) + "." + std::to_string(v.patch);
}

[[noreturn]] void fail(const std::string& what) {
  throw std::runtime_error("NVSHMEM: " + what);
}

void open_host_library(const std::string& path) {
  // First and by its path: our library asks for it by soname, which then means this one, or the one that somebody
  // (torch) has loaded before. A process must not have two; the version check below is of whichever it is.
  if (!::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL))
    fail(std::string("its host library does not load: ") + ::dlerror());
}

// A newer host library serves older device code of the same major version; never the other way round.
bool serves(const Version& host, const Version& device) {
  return host.major == device.major && host.minor >= device.minor;
}

}  // namespace

World::World(const std::string& host_library, const std::string& kernels) {
  open_host_library(host_library);
  void* library = ::dlopen(kernels.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!library) fail(std::string("the kernels over it do not load: ") + ::dlerror());
  using Function = const Entry* (*)();
  const auto function = reinterpret_cast<Function>(::dlsym(library, kEntrySymbol));
  entry_ = function ? function() : nullptr;
  if (!entry_ || entry_->abi != cuda::kAbi) fail(kernels + " is of another build; build hybrid_ep anew");
  if (!serves(running(), built_with()))
    fail("the kernels were built with " + text(built_with()) + " and this process has host library " + text(running()) +
         "; both must have one major version and the host library at least that minor one");
  if (entry_->make) Executor::add(kExecutor, entry_->make);
}

std::string World::unique_id() const {
  std::string id(kUniqueIdBytes, '\0');
  if (const int status = entry_->calls->unique_id(reinterpret_cast<unsigned char*>(id.data())))
    fail("nvshmemx_get_uniqueid failed with status " + std::to_string(status) +
         "; it opens a socket on the first network interface, NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME names another");
  return id;
}

void World::start(const std::string& unique_id, int pe, int num_pes, int device) {
  if (unique_id.size() != kUniqueIdBytes) fail("a unique id has " + std::to_string(kUniqueIdBytes) + " bytes");
  if (started()) fail("it is already started in this process, by other code than hybrid_ep; hybrid_ep needs it first");
  pe_ = pe;
  num_pes_ = num_pes;
  device_ = device;
  enter();
  const Calls& c = *entry_->calls;
  const int status = c.start(reinterpret_cast<const unsigned char*>(unique_id.data()), pe, num_pes);
  if (status == kNoDevice) fail("started on " + who() + ", but finds no CUDA device there");
  if (status)
    fail("starting it (nvshmemx_init_attr) failed with status " + std::to_string(status) + " on " + who() +
         "; NVSHMEM_DEBUG=INFO says more");
  if (c.pe() != pe || c.num_pes() != num_pes)
    fail("started as PE " + std::to_string(c.pe()) + " of " + std::to_string(c.num_pes()) + " and not as " + who());
}

void World::stop() {
  enter();
  entry_->calls->stop();
}

uint64_t World::allocate(size_t bytes) {
  enter();
  void* data = entry_->calls->allocate(bytes);
  if (!data)
    fail("nvshmem_malloc of " + std::to_string(bytes) + " bytes failed on " + who() +
         "; lower max_num_of_tokens_per_rank or capacity_factor (where NVSHMEM_DISABLE_CUDA_VMM is set, the heap "
         "has NVSHMEM_SYMMETRIC_SIZE bytes)");
  entry_->zero(data, bytes);
  return reinterpret_cast<uint64_t>(data);
}

void World::quiet() {
  enter();
  entry_->on_stream(entry_->calls->quiet);
}

void World::free(uint64_t address) {
  enter();
  entry_->calls->free(reinterpret_cast<void*>(address));
}

std::shared_ptr<Segment> World::own(uint64_t address, size_t bytes) const {
  return Segment::adopt(reinterpret_cast<unsigned char*>(address), bytes, std::make_shared<int>(0));
}

std::shared_ptr<Segment> World::peer(uint64_t address, size_t bytes, int pe) const {
  void* there = entry_->calls->peer(reinterpret_cast<const void*>(address), pe);
  return there ? own(reinterpret_cast<uint64_t>(there), bytes) : nullptr;
}

void World::enter() const {
  if (device_ >= 0) entry_->set_device(device_);
}

std::string World::who() const {
  return "PE " + std::to_string(pe_) + " of " + std::to_string(num_pes_);
}

}  // namespace hep::nvshmem
