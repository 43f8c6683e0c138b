// Stream capture and graphs: recording, the rules of what is forbidden meanwhile, replay.
#include "capture.h"

struct CUgraph_st {
  std::vector<hep::ptxr::Node> nodes;
  cudaStream_t origin = nullptr;
};
struct CUgraphExec_st {
  CUgraph_st graph;
  std::map<cudaStream_t, cudaStream_t> branches;  // captured stream -> that of the replays
};

namespace hep::ptxr {
namespace {

thread_local cudaStreamCaptureMode thread_mode = cudaStreamCaptureModeGlobal;

// Captures that are open, of all threads.
std::vector<Capture*>& captures() {
  static auto* all = new std::vector<Capture*>;
  return *all;
}

bool is_legacy(cudaStream_t stream) {
  return stream == Devices::get().resolve(nullptr);
}

// Every branch must have come back to the origin by an event.
bool all_joined(const Capture& capture) {
  std::vector<bool> reached(capture.nodes.size());
  std::vector<size_t> open = capture.tails.at(capture.origin);
  while (!open.empty()) {
    const size_t i = open.back();
    open.pop_back();
    if (reached[i]) continue;
    reached[i] = true;
    open.insert(open.end(), capture.nodes[i].after.begin(), capture.nodes[i].after.end());
  }
  for (const auto& [stream, tail] : capture.tails)
    for (const size_t i : tail)
      if (!reached[i]) return false;
  return true;
}

}  // namespace

cudaError_t spoil(Capture* capture, cudaError_t status) {
  if (capture->spoilt == cudaSuccess) capture->spoilt = cudaErrorStreamCaptureInvalidated;
  return status;
}

cudaError_t refuse_while_capturing() {
  if (thread_mode == cudaStreamCaptureModeRelaxed) return cudaSuccess;
  for (Capture* c : captures()) {
    const bool mine = c->thread == std::this_thread::get_id();
    if (c->mode == cudaStreamCaptureModeGlobal || (c->mode == cudaStreamCaptureModeThreadLocal && mine))
      return spoil(c, cudaErrorStreamCaptureUnsupported);
  }
  return cudaSuccess;
}

cudaError_t submit(cudaStream_t stream, Op op) {
  Devices& d = Devices::get();
  cudaStream_t s = d.resolve(stream);
  if (!s) return cudaErrorInvalidResourceHandle;
  if (!s->capture) {
    if (is_legacy(s))  // it would have to wait for a stream that only records
      for (Capture* c : captures())
        if (c->origin->blocking) return spoil(c, cudaErrorStreamCaptureImplicit);
    d.enqueue(s, std::move(op));
    return cudaSuccess;
  }
  Capture& capture = *s->capture;
  if (capture.spoilt != cudaSuccess) return capture.spoilt;
  Node node;
  node.op = std::move(op);
  node.branch = s;
  node.after = capture.tails[s];
  capture.nodes.push_back(std::move(node));
  capture.tails[s] = {capture.nodes.size() - 1};
  return cudaSuccess;
}

HEP_PTXR_API cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  Devices& d = Devices::get();
  Lock lock(d.mutex);
  cudaStream_t s = d.resolve(stream);
  if (!s) return said(cudaErrorInvalidResourceHandle);
  if (is_legacy(s))
    for (Capture* c : captures())
      if (c->origin->blocking) return said(cudaErrorStreamCaptureImplicit);  // which goes on
  *status = !s->capture                         ? cudaStreamCaptureStatusNone
            : s->capture->spoilt == cudaSuccess ? cudaStreamCaptureStatusActive
                                                : cudaStreamCaptureStatusInvalidated;
  return cudaSuccess;
}

HEP_PTXR_API cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  std::swap(*mode, thread_mode);
  return cudaSuccess;
}

HEP_PTXR_API cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
  return on_stream(stream, [&](Devices&, Lock&, cudaStream_t s) {
    if (s->capture) return cudaErrorIllegalState;
    if (is_legacy(s)) return cudaErrorStreamCaptureUnsupported;
    auto* capture = new Capture;
    capture->mode = mode;
    capture->thread = std::this_thread::get_id();
    capture->origin = s;
    capture->tails[s];
    s->capture = capture;
    captures().push_back(capture);
    return cudaSuccess;
  });
}

HEP_PTXR_API cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  Devices& d = Devices::get();
  Lock lock(d.mutex);
  *graph = nullptr;
  cudaStream_t s = d.resolve(stream);
  if (!s || !s->capture) return said(cudaErrorIllegalState);
  Capture* capture = s->capture;
  if (capture->origin != s) return said(spoil(capture, cudaErrorStreamCaptureUnmatched));
  if (capture->mode != cudaStreamCaptureModeRelaxed && capture->thread != std::this_thread::get_id())
    return said(cudaErrorStreamCaptureWrongThread);
  for (cudaStream_t other : d.streams())
    if (other->capture == capture) other->capture = nullptr;
  std::erase(captures(), capture);  // the object stays: events name it
  if (capture->spoilt != cudaSuccess) return said(capture->spoilt);
  if (!all_joined(*capture)) return said(cudaErrorStreamCaptureUnjoined);
  *graph = new CUgraph_st{capture->nodes, s};
  return cudaSuccess;
}

HEP_PTXR_API cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* exec, cudaGraph_t graph, unsigned long long) {
  Devices& d = Devices::get();
  Lock lock(d.mutex);
  if (!graph) return said(cudaErrorInvalidValue);
  auto* made = new CUgraphExec_st{*graph, {}};
  for (const Node& node : graph->nodes)
    if (cudaStream_t& s = made->branches[node.branch]; !s) s = d.make_stream(node.branch->device, false);
  *exec = made;
  return cudaSuccess;
}

// Every branch runs on a stream of its own, after what the launching stream holds; that one goes on after all of them.
HEP_PTXR_API cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream) {
  if (!exec) return said(cudaErrorInvalidResourceHandle);
  return outside_capture(stream, [&](Devices& d, Lock&, cudaStream_t s) {
    for (const auto& [captured, branch] : exec->branches) {
      Op wait;
      wait.after = {d.tail(s)};
      cudaStream_t to = branch;
      wait.act = [s, to] { return to->order.join(s->order), cudaSuccess; };
      d.enqueue(branch, std::move(wait));
    }
    std::vector<Mark> marks;
    for (const Node& node : exec->graph.nodes) {
      Op op = node.op;
      cudaStream_t branch = exec->branches.at(node.branch);
      Op meet;  // with other branches: after these, and behind all that they have seen
      for (const size_t i : node.after)
        if (exec->graph.nodes[i].branch != node.branch) meet.after.push_back(marks[i]);
      if (!meet.after.empty()) {
        std::vector<cudaStream_t> from;
        for (const Mark& m : meet.after) from.push_back(m.stream);
        meet.act = [from, branch] {
          for (cudaStream_t f : from) branch->order.join(f->order);
          return cudaSuccess;
        };
        d.enqueue(branch, std::move(meet));
      }
      if (!op.launch && !op.act && !op.host) op.act = [] { return cudaSuccess; };  // an event
      d.enqueue(branch, std::move(op));
      marks.push_back(d.tail(branch));
    }
    Op end;
    for (const auto& [captured, branch] : exec->branches) end.after.push_back(d.tail(branch));
    end.act = [s, exec] {
      for (const auto& [captured, branch] : exec->branches) s->order.join(branch->order);
      return cudaSuccess;
    };
    d.enqueue(s, std::move(end));
    return cudaSuccess;
  });
}

HEP_PTXR_API cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete graph;
  return cudaSuccess;
}

// Replays that are under way keep what they need; the object stays, it is small.
HEP_PTXR_API cudaError_t cudaGraphExecDestroy(cudaGraphExec_t) {
  return cudaSuccess;
}

}  // namespace hep::ptxr
