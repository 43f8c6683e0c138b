// Streams and events.
#include "capture.h"

namespace hep::ptxr {
namespace {

// Of a capture, an event is a node: nobody outside can wait for it or ask whether it has passed.
cudaError_t record_in_capture(cudaEvent_t event, cudaStream_t s) {
  Capture& capture = *s->capture;
  Node node;
  node.branch = s;
  node.after = capture.tails[s];
  capture.nodes.push_back(std::move(node));
  capture.tails[s] = {capture.nodes.size() - 1};
  event->capture = &capture;
  event->node = capture.nodes.size() - 1;
  return cudaSuccess;
}

// What the calls that ask an event begin with.
template <class F>
cudaError_t on_event(cudaEvent_t event, F&& f) {
  return on_device([&](Devices& d, Lock& lock) {
    if (!event) return cudaErrorInvalidResourceHandle;
    return event->capture ? cudaErrorCapturedEvent : f(d, lock);
  });
}

}  // namespace

HEP_PTXR_API cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  return on_device([&](Devices& d, Lock&) {
    if (flags & ~unsigned(cudaStreamNonBlocking)) return cudaErrorInvalidValue;
    *stream = d.make_stream(current_device, !(flags & cudaStreamNonBlocking));
    return cudaSuccess;
  });
}

// Its work goes on to its end; the object stays, since marks name it.
HEP_PTXR_API cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  Devices& d = Devices::get();
  Lock lock(d.mutex);
  if (!d.is_stream(stream)) return said(cudaErrorInvalidResourceHandle);
  stream->destroyed = true;
  return cudaSuccess;
}

HEP_PTXR_API cudaError_t cudaStreamQuery(cudaStream_t stream) {
  return outside_capture(stream, [](Devices& d, Lock&, cudaStream_t s) {
    if (const cudaError_t refused = refuse_while_capturing(); refused != cudaSuccess) return refused;
    if (s->issued > s->ended) return cudaErrorNotReady;
    d.host_knows(s);
    return cudaSuccess;
  });
}

HEP_PTXR_API cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  return outside_capture(stream, [](Devices& d, Lock& lock, cudaStream_t s) {
    return d.dropped == "cudaStreamSynchronize" ? cudaSuccess : d.wait(lock, s);
  });
}

HEP_PTXR_API cudaError_t cudaDeviceSynchronize() {
  return on_device([](Devices& d, Lock& lock) {
    for (cudaStream_t s : d.streams())
      if (s->capture && s->device == current_device) return spoil(s->capture, cudaErrorStreamCaptureUnsupported);
    return d.wait_device(lock, current_device);
  });
}

HEP_PTXR_API cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
  return on_device([&](Devices&, Lock&) {
    if (!function) return cudaErrorInvalidValue;
    Op op;
    op.host = [=] { function(data); };
    return submit(stream, std::move(op));
  });
}

HEP_PTXR_API cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  return on_device([&](Devices&, Lock&) {
    *event = new CUevent_st;
    (*event)->timing = !(flags & cudaEventDisableTiming), (*event)->device = current_device;
    return cudaSuccess;
  });
}

HEP_PTXR_API cudaError_t cudaEventDestroy(cudaEvent_t event) {
  Devices& d = Devices::get();
  Lock lock(d.mutex);
  if (!event) return said(cudaErrorInvalidResourceHandle);
  delete event;
  return cudaSuccess;
}

HEP_PTXR_API cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return on_stream(stream, [&](Devices& d, Lock&, cudaStream_t s) {
    if (!event || s->device != event->device) return cudaErrorInvalidResourceHandle;
    if (s->capture) return record_in_capture(event, s);
    event->capture = nullptr;
    const auto order = std::make_shared<ptxm::Order>();
    Op op;
    op.act = [s, order] {
      *order = s->order;
      return cudaSuccess;
    };
    if (const cudaError_t status = submit(stream, std::move(op)); status != cudaSuccess) return status;
    event->order = order;
    event->mark = d.tail(s);
    return cudaSuccess;
  });
}

HEP_PTXR_API cudaError_t cudaEventQuery(cudaEvent_t event) {
  return on_event(event, [&](Devices& d, Lock&) {
    if (!event->mark.passed()) return cudaErrorNotReady;
    if (event->order) d.host.join(*event->order);
    return cudaSuccess;
  });
}

HEP_PTXR_API cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  return on_event(event, [&](Devices& d, Lock& lock) {
    const auto order = event->order;
    const cudaError_t status = d.wait_mark(lock, event->mark);
    if (order) d.host.join(*order);
    return status;
  });
}

HEP_PTXR_API cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  return on_stream(stream, [&](Devices& d, Lock&, cudaStream_t s) {
    if (!event) return cudaErrorInvalidResourceHandle;
    if (event->capture) {  // the waiting stream joins that capture
      Capture& capture = *event->capture;
      if (s->capture && s->capture != &capture) return spoil(s->capture, cudaErrorStreamCaptureMerge);
      s->capture = &capture;
      capture.tails[s].push_back(event->node);
      return cudaSuccess;
    }
    // Of a capture, nothing may depend on what is outside it.
    if (s->capture) return spoil(s->capture, cudaErrorStreamCaptureIsolation);
    if (d.dropped == "cudaStreamWaitEvent") return cudaSuccess;
    if (!event->order) return cudaSuccess;  // never recorded: nothing to wait for
    const auto order = event->order;
    Op op;
    op.after = {event->mark};
    op.act = [s, order] {
      s->order.join(*order);
      return cudaSuccess;
    };
    return submit(stream, std::move(op));
  });
}

}  // namespace hep::ptxr
