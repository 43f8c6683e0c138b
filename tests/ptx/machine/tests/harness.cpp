#include "harness.h"

#include <cstring>

namespace hep::ptxm::test {
namespace {
int failures = 0;
}

std::vector<Case>& cases() {
  static std::vector<Case> all;
  return all;
}
void fail(const char* file, int line, const std::string& what) {
  ++failures;
  std::printf("%s:%d: %s\n", file, line, what.c_str());
}

std::string kernel(const std::string& body, const std::string& more) {
  return ".version 8.8\n.target sm_90a\n.address_size 64\n" + more +
         ".shared .align 128 .b8 sh[1024];\n.extern .shared .align 128 .b8 dyn[];\n"
         ".visible .entry k(.param .u64 k_param_0)\n{\n"
         ".reg .pred %p<16>;\n.reg .b16 %rs<16>;\n.reg .b32 %r<64>;\n.reg .b64 %rd<64>;\n.reg .f32 %f<16>;\n"
         "ld.param.u64 %rd1, [k_param_0];\nmov.u32 %r1, %tid.x;\nmov.u32 %r2, %ctaid.x;\n" +
         body + "\nret;\n}\n";
}

bool Outcome::has(const std::string& kind, const std::string& words) const {
  for (const Report& r : reports)
    if (r.kind == kind && r.what.find(words) != std::string::npos) return true;
  return false;
}
std::string Outcome::all() const {
  std::string s;
  for (const Report& r : reports) s += r.text() + "\n    ";
  for (size_t k = 0; k < 8; ++k) s += std::to_string(out[k]) + " ";
  return s;
}

Outcome run(const std::string& text, const Shape& shape) {
  const auto module = load(text, "test");
  alignas(128) static uint64_t words[64];
  std::memset(words, 0, sizeof words);
  Options options;
  options.seed = shape.seed;
  options.races = shape.races;
  options.split_percent = shape.split_percent;
  options.burst = shape.seed % 3 ? 1 + uint32_t(shape.seed % 7) : 256;
  Machine machine(options);
  for (uint32_t d = 0; d < shape.devices; ++d) machine.add_device(DeviceModel::h100());
  machine.map({.base = words, .bytes = sizeof words - 8, .name = "words"});  // ends inside sixteen bytes
  Launch launch;
  launch.kernel = &module->kernels.at(0);
  launch.grid = shape.grid;
  launch.block = shape.block;
  launch.dynamic_shared = shape.dynamic;
  launch.name = "test";
  launch.params.resize(launch.kernel->param_bytes);
  const uint64_t base = reinterpret_cast<uint64_t>(words);
  std::memcpy(launch.params.data(), &base, 8);
  for (uint32_t n = 0; n < shape.kernels; ++n) {
    launch.device = int(n % shape.devices);
    launch.gpu = shape.apart ? n : 0;
    machine.start(launch);
  }
  Outcome o;
  for (uint32_t rounds = 0; machine.running() && rounds < 20000; ++rounds) {
    o.last = machine.run(100);
    machine.take_ended();
    if (o.last == Progress::kStuck) break;
  }
  o.out.assign(words, words + 64);
  o.reports = machine.reports();
  o.thread_instructions = machine.thread_instructions();
  return o;
}
Outcome run_seeds(const std::string& text, Shape shape, uint32_t seeds) {
  Outcome all;
  for (shape.seed = 1; shape.seed <= seeds; ++shape.seed) {
    Outcome o = run(text, shape);
    o.reports.insert(o.reports.end(), all.reports.begin(), all.reports.end());
    all = std::move(o);
  }
  return all;
}

}  // namespace hep::ptxm::test

int main(int argc, char** argv) {
  using namespace hep::ptxm::test;
  int ran = 0;
  for (const Case& c : cases()) {
    if (argc > 1 && c.name.find(argv[1]) == std::string::npos) continue;
    ++ran;
    const int before = failures;
    try {
      c.run();
    } catch (const std::exception& e) {
      fail(c.name.c_str(), 0, e.what());
    }
    if (failures > before) std::printf("FAILED %s\n", c.name.c_str());
  }
  std::printf("%d cases, %d failures\n", ran, failures);
  return failures != 0 || ran == 0;
}
