// What tests ask of the stand-in beyond CUDA's calls: its seed and model, whose memory is a tensor's, what was reported
// and counted, and the PTX itself, to be edited before it is first used.
#include <cstdio>
#include <cstring>

#include "capture.h"
#include "kernels.h"
#include "memory.h"

namespace hep::ptxr {

struct Choices {
  uint64_t seed, copy_delay_ns;
  uint32_t races, burst, split_percent, outsiders, target, num_devices, clock_speed, apart;
};

// Before the first call that needs a device.
HEP_PTXR_API void ptxm_choose(const Choices* c) {
  Settings& s = Devices::settings;
  s.machine = {.seed = c->seed,
               .races = c->races != 0,
               .burst = c->burst,
               .copy_delay_ns = c->copy_delay_ns,
               .split_percent = c->split_percent,
               .outsiders = c->outsiders != 0,
               .clock_speed = c->clock_speed};
  s.target = c->target;
  s.num_devices = int(c->num_devices);
  s.apart = c->apart;
}

HEP_PTXR_API void ptxm_lend(const void* base, uint64_t bytes, const char* name, int device) {
  Devices& d = Devices::get();
  Lock lock(d.mutex);
  Memory::get().lend(base, bytes, name, device);
}
HEP_PTXR_API void ptxm_take_back(const void* base) {
  Devices& d = Devices::get();
  Lock lock(d.mutex);
  Memory::get().take_back(base);
}
// The host wrote into memory that it lent, after it had waited for all that uses it.
HEP_PTXR_API void ptxm_host_wrote(const void* base, uint64_t bytes) {
  Devices& d = Devices::get();
  Lock lock(d.mutex);
  d.machine().host_wrote(base, bytes);
}

// Where all memory of devices lies: [its begin, its end).
HEP_PTXR_API void ptxm_span(uint64_t* two) {
  Devices& d = Devices::get();
  Lock lock(d.mutex);
  two[0] = uint64_t(Memory::get().span());
  two[1] = two[0] + Memory::kSpan;
}

// What an allocator's function gives, as a C++ caller sees it: null when it throws.
HEP_PTXR_API void* ptxm_allocate_by(void* (*function)(ptrdiff_t, int, void*), uint64_t bytes, void* stream) {
  try {
    return function(ptrdiff_t(bytes), 0, stream);
  } catch (...) {
    return nullptr;
  }
}

HEP_PTXR_API int ptxm_num_reports() {
  Devices& d = Devices::get();
  Lock lock(d.mutex);
  return int(d.machine().reports().size());
}
// The text of report i, cut at `size` bytes.
HEP_PTXR_API void ptxm_report(int i, char* text, size_t size) {
  Devices& d = Devices::get();
  Lock lock(d.mutex);
  std::snprintf(text, size, "%s", d.machine().reports().at(size_t(i)).text().c_str());
}
HEP_PTXR_API void ptxm_forget_reports() {
  Devices& d = Devices::get();
  Lock lock(d.mutex);
  d.machine().clear_reports();
  d.reports_seen = 0;
}

// Launches, instructions of threads, of warps; bytes of device memory in use; stores of kernels to the host's memory.
HEP_PTXR_API void ptxm_counts(uint64_t* five) {
  Devices& d = Devices::get();
  Lock lock(d.mutex);
  five[0] = d.machine().launches();
  five[1] = d.machine().thread_instructions();
  five[2] = d.machine().warp_instructions();
  five[3] = Memory::get().used(0);
  five[4] = d.machine().told_host();
}

// Instructions by kernel and line of PTX, one line of text each, into a file.
HEP_PTXR_API int ptxm_write_counts(const char* path) {
  Devices& d = Devices::get();
  Lock lock(d.mutex);
  std::FILE* out = std::fopen(path, "w");
  if (!out) return -1;
  for (const ptxm::LineCount& c : d.machine().line_counts())
    std::fprintf(out, "%s %u %llu %llu\n", c.kernel.c_str(), c.line, (unsigned long long)c.thread_instructions,
                 (unsigned long long)c.warp_instructions);
  return std::fclose(out);
}

// The PTX of fat binary i for the chosen target; null: there is none.
HEP_PTXR_API const char* ptxm_text(int i) {
  if (size_t(i) >= fat_binaries().size()) return nullptr;
  for (const Image& image : fat_binaries()[size_t(i)]->images)
    if (image.target == Devices::settings.image_target()) return image.text.c_str();
  return nullptr;
}
// Another text in its place, before a kernel of it was asked for. 0, or -1 where that is too late.
HEP_PTXR_API int ptxm_edit(int i, const char* text) {
  for (Image& image : fat_binaries().at(size_t(i))->images) {
    if (image.target != Devices::settings.image_target()) continue;
    if (image.module) return -1;
    image.text = text;
    return 0;
  }
  return -1;
}

// While held, no copy begins: the copy engines have others' to do.
HEP_PTXR_API void ptxm_hold_copies(uint32_t hold) {
  Devices& d = Devices::get();
  Lock lock(d.mutex);
  d.hold_copies(hold != 0);
}

// For mutants of the host: the call of this name does nothing, and says that all is well.
HEP_PTXR_API void ptxm_drop(const char* call) {
  Devices& d = Devices::get();
  Lock lock(d.mutex);
  d.dropped = call;
}

}  // namespace hep::ptxr
