// Loading the CUDA library at run time.
#include <dlfcn.h>

#include <mutex>
#include <stdexcept>

#include "runtime/cuda_entry.h"

namespace hep::cuda {

const Entry& load(const std::string& path) {
  static std::mutex mutex;
  static const Entry* loaded = nullptr;
  std::lock_guard lock(mutex);
  if (loaded) return *loaded;
  void* library = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);  // for the life of the process: it runs our objects
  if (!library) throw std::runtime_error(std::string("the CUDA library does not load: ") + ::dlerror());
  using Function = const Entry* (*)();
  const auto function = reinterpret_cast<Function>(::dlsym(library, kEntrySymbol));
  const Entry* entry = function ? function() : nullptr;
  if (!entry || entry->abi != kAbi)
    throw std::runtime_error("the CUDA library " + path + " is of another build; build hybrid_ep anew");
  Executor::add("cuda", entry->make_p2p);
  Executor::add("cuda_loopback", entry->make_loopback);
  loaded = entry;
  return *loaded;
}

}  // namespace hep::cuda
