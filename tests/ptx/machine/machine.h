// A machine that executes PTX on a CPU: what whoever drives it sees.
//
//     std::shared_ptr<const Module> module = load(text, "p2p");       // LoadError names instruction and line
//     Machine machine({.seed = 7});
//     const int device = machine.add_device(DeviceModel::h100());
//     machine.map({.base = p, .bytes = n, .name = "segment of rank 0", .device = device});
//     LaunchId id = machine.start({.kernel = module->find("exchange"), .device = device, .grid = 8, .block = 640,
//                                  .dynamic_shared = 200'000, .params = bytes});
//     while (machine.run(1000) == Progress::kSome) {}
//     for (LaunchId ended : machine.take_ended()) ...
//
// Memory is the process's own: a device address is a host address, and only what was mapped may be touched. The caller
// keeps stream order: it starts a launch when everything before it in its stream has ended, and hands over what
// happened before it (Launch::after). One thread at a time may call into a Machine; another may write mapped memory
// meanwhile with atomics, as a host or another process does.
#pragma once
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace hep::ptxm {

// ---- Programs
struct LoadError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Param {
  std::string name;
  uint32_t offset = 0, bytes = 0;  // in the launch's parameter bytes
};

struct Program;  // the decoded instructions, internal

struct Kernel {
  std::string name;  // as the PTX has it, mangled
  std::vector<Param> params;
  uint32_t param_bytes = 0;
  uint32_t max_threads = 1024;  // .maxntid
  uint32_t min_blocks = 0;      // .minnctapersm, 0: not said
  uint32_t static_shared = 0;   // bytes, where dynamic shared memory begins
  std::shared_ptr<const Program> program;
  uint32_t index = 0;  // in its module
};

// A variable of .global or .const space; its memory is the module's and is mapped when a kernel of it is started.
struct Variable {
  std::string name;
  void* base = nullptr;
  uint64_t bytes = 0;
};

struct Module {
  std::string name;
  uint32_t target = 0;  // 90 for sm_90a, 100 for sm_100
  std::vector<Kernel> kernels;
  std::vector<Variable> variables;
  std::shared_ptr<void> storage;                      // of the variables
  std::vector<std::string> files;                     // by number, of .loc
  const Kernel* find(std::string_view kernel) const;  // null: there is none
};

// Throws LoadError for what the machine does not know: a new instruction in our PTX is a decision, not a surprise.
std::shared_ptr<const Module> load(std::string_view text, std::string name);

// ---- Devices
struct DeviceModel {
  const char* name;
  uint32_t sms, threads_per_block, threads_per_sm, blocks_per_sm, registers_per_sm;
  uint32_t shared_per_sm, shared_per_block;  // bytes; per_block: static and dynamic together, opted in
  uint32_t shared_reserved;                  // bytes that the system keeps of each block's
  static DeviceModel h100();
  static DeviceModel b200();
};

// ---- What happened before: knowledge of the happens-before mode, empty in plain mode. A value; joining is cheap.
struct Knowledge;
class Order {
 public:
  void join(const Order& other);
  std::shared_ptr<const Knowledge> known;
};

// ---- Memory
enum class Space : uint8_t { kDevice, kHost, kConstant };  // kConstant: may not be written
struct Range {
  const void* base = nullptr;
  uint64_t bytes = 0;  // exact: one byte further is a fault
  std::string name;    // for reports: "segment of rank 1", "x of dispatch"
  Space space = Space::kDevice;
  int device = 0;  // whose memory it is
};

// ---- Launches
using LaunchId = uint64_t;
struct Launch {
  const Kernel* kernel = nullptr;
  int device = 0;
  uint64_t gpu = 0;              // for scopes alone: launches of a device with other numbers count as another GPU's
  uint32_t grid = 1, block = 1;  // .x; the other two are 1
  uint32_t dynamic_shared = 0;   // bytes
  std::vector<uint8_t> params;   // exactly kernel->param_bytes
  uint32_t registers = 0;        // per thread, where the cubin's number is known; 0: as many as max_threads leaves
  Order after;
  std::string name;  // for reports: "rank 1 dispatch"; empty: the kernel's
};

// ---- Reports
struct Report {
  std::string kind;  // fault, race, proxy, scope, mbarrier, bulk, barrier, convergence, uninitialised, exit, deadlock
  std::string what;
  std::string launch;    // its name
  bool located = false;  // block and thread are known
  uint32_t block = 0, thread = 0;
  std::string instruction;  // as PTX names it
  uint32_t ptx_line = 0;
  std::string source;  // file:line
  std::string text() const;
};

// ---- The machine
struct Options {
  uint64_t seed = 0;
  bool races = false;             // happens-before: slower
  uint32_t burst = 256;           // instructions of a warp at once, at most
  uint64_t copy_delay_ns = 3000;  // that a bulk copy may take, at most
  uint32_t split_percent = 2;     // how often lanes that run together are parted for a while
  // Others write mapped memory too: time does not run ahead of a clock, the CPU time of the one thread that then calls
  // run(), and its naps, times clock_speed. globaltimer is not behind it.
  bool outsiders = false;
  uint32_t clock_speed = 1;
};

enum class Progress {
  kSome,   // instructions were executed, or time went on to a wake-up
  kIdle,   // nothing is started
  kEnded,  // a launch ended: take_ended()
  kStuck,  // deadlock, reported; or a fault after which nothing can go on
};

struct LineCount {  // of a line of PTX
  std::string kernel;
  uint32_t line = 0;
  uint64_t thread_instructions = 0, warp_instructions = 0;
};

class Machine {
 public:
  explicit Machine(const Options& options);
  ~Machine();
  Machine(const Machine&) = delete;
  Machine& operator=(const Machine&) = delete;

  int add_device(const DeviceModel& model);

  // What a new range covers of an older one is the new one's: its older owner is gone.
  void map(const Range& range);
  void unmap(const void* base);                       // the range that begins there; nothing where none does
  bool mapped(const void* at, uint64_t bytes) const;  // in one range
  // Memory was written by a copy, a memset or the host, in stream order: what kernels did there before is forgotten.
  void host_wrote(const void* base, uint64_t bytes);

  // Why a launch would be refused as cudaErrorInvalidConfiguration or InvalidValue refuses it; empty: it would not.
  std::string refusal(const Launch& launch) const;
  // Blocks of `launch` that fit on one SM; 0: none does.
  uint32_t blocks_per_sm(const Kernel& kernel, int device, uint32_t block, uint32_t dynamic_shared,
                         uint32_t registers = 0) const;
  // Its blocks become resident as SMs have room, in order; throws std::invalid_argument where refusal() is not empty.
  LaunchId start(Launch launch);
  // Up to `quanta` turns of a warp.
  Progress run(uint32_t quanta);
  std::vector<LaunchId> take_ended();  // since the last call
  Order order_of(LaunchId ended);      // what happened before its end; forgets the launch
  bool failed(LaunchId id) const;      // whether one of its threads met a fault
  uint64_t running() const;            // launches started and not ended
  // Ends everything that runs, without a report: after kStuck, or when a rank is given up.
  void kill(LaunchId id);
  // Nothing runs and everybody knows it (device and host synchronised): happens-before begins anew. Orders are void.
  void quiesce();

  uint64_t now_ns() const;  // virtual globaltimer
  uint64_t thread_instructions() const;
  uint64_t warp_instructions() const;
  uint64_t longest_warp() const;  // the most instructions of one warp, of all that ran
  uint64_t launches() const;
  uint64_t told_host() const;  // stores and atomics of kernels to memory of the host
  const std::vector<Report>& reports() const;
  void clear_reports();
  std::vector<LineCount> line_counts() const;  // of all that was executed, by kernel and line of PTX
  void reseed(uint64_t seed);

 private:
  std::unique_ptr<class MachineImpl> impl_;
};

}  // namespace hep::ptxm
