// What was found wrong, said once for every instruction.
#include <cstdio>
#include <map>

#include "impl.h"

namespace hep::ptxm {
namespace {

std::string place_of(const Program& p, const Ins& i) {
  if (!i.source_line) return "";
  return (i.file < p.files.size() ? p.files[i.file] : "?") + ":" + std::to_string(i.source_line);
}

}  // namespace

std::string hex(u64 x) {
  char text[24];
  std::snprintf(text, sizeof text, "0x%llx", static_cast<unsigned long long>(x));
  return text;
}

std::string Report::text() const {
  std::string s = kind + ": " + what;
  if (launch.empty()) return s;
  s += " [" + launch;
  if (!located) return s + "]";
  s += ", block " + std::to_string(block) + ", thread " + std::to_string(thread);
  if (!instruction.empty()) s += ", " + instruction + " at PTX line " + std::to_string(ptx_line);
  if (!source.empty()) s += ", " + source;
  return s + "]";
}

void MachineImpl::report(const char* kind, const Who& who, const Ins* i, const std::string& what) {
  const Run& run = *who.block().run;
  const std::string key =
      std::string(kind) + "/" + run.launch.kernel->name + "/" + (i ? std::to_string(i->line) : what);
  if (reported[key]++) return;
  Report r;
  r.kind = kind;
  r.what = what;
  r.launch = run.launch.name;
  r.located = true;
  r.block = who.block().index;
  r.thread = who.thread();
  if (i) {
    r.instruction = i->name;
    r.ptx_line = i->line;
    r.source = place_of(*run.program, *i);
  }
  reports.push_back(std::move(r));
}
void MachineImpl::report(const char* kind, const Run* run, const std::string& what) {
  if (reported[std::string(kind) + "/" + what]++) return;
  Report r;
  r.kind = kind;
  r.what = what;
  if (run) r.launch = run->launch.name;
  reports.push_back(std::move(r));
}
Flow MachineImpl::fault(Context& c, const Ins& i, u32 lane, const std::string& what) {
  report("fault", {*c.warp, lane}, &i, what);
  c.warp->block->run->failed = run_failed = true;
  return Flow::kStop;
}

void MachineImpl::report_deadlock() {
  std::string all;
  u32 more = 0, said = 0;
  for (const auto& r : runs) {
    if (r->done) continue;
    if (r->next_block < r->launch.grid)
      all += "\n  " + r->launch.name + ": blocks " + std::to_string(r->next_block) + " to " +
             std::to_string(r->launch.grid - 1) + " have no SM to run on";
    for (const auto& b : r->blocks)
      for (const Warp& w : b->warps)
        for (const Fragment& f : w.parts) {
          if (++said > 64) {
            ++more;
            continue;
          }
          const Ins& i = f.at ? *f.at : r->program->code[f.pc];
          all += "\n  " + r->launch.name + " block " + std::to_string(b->index) + " warp " + std::to_string(w.index) +
                 " lanes " + hex(f.mask) + " wait in " + i.name + " at PTX line " + std::to_string(i.line) + ", " +
                 place_of(*r->program, i);
          if (f.state == Fragment::kBarrier)
            all += ": barrier " + std::to_string(f.barrier) + ", " + std::to_string(b->barriers[f.barrier].arrived) +
                   " of " + std::to_string(b->live) + " threads are there";
          if (f.state == Fragment::kMeeting) all += ": members " + hex(f.members) + ", of the warp live " + hex(w.live);
          if (f.state == Fragment::kBulk) all += ": bulk stores are pending";
        }
  }
  if (more) all += "\n  and " + std::to_string(more) + " more";
  report("deadlock", nullptr, "nobody can run:" + all);
}

std::vector<LineCount> MachineImpl::line_counts() const {
  std::map<std::pair<std::string, u32>, LineCount> lines;
  for (const auto& [program, all] : counts)
    for (const Function& f : program->functions)
      for (u32 pc = f.begin; pc < f.end; ++pc) {
        if (!all[pc].warps) continue;
        const u32 line = program->code[pc].line;
        LineCount& l = lines[{f.name, line}];
        l.kernel = f.name;
        l.line = line;
        l.thread_instructions += all[pc].threads;
        l.warp_instructions += all[pc].warps;
      }
  std::vector<LineCount> out;
  for (auto& [key, line] : lines) out.push_back(std::move(line));
  return out;
}

}  // namespace hep::ptxm
