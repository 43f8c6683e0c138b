// A plan's copy in device memory, made once and kept with the plan: dispatches and combines of a cached handle upload
// nothing of it. What the first dispatch learns is brought back to the host's plan, which is what handles show.
#pragma once
#include "kernels/instances/cuda_memory.h"
#include "roles/params.h"

namespace hep::cuda {

class PlanCopy {
 public:
  PlanCopy(const PlanView& host, const World& world, uint32_t record_bytes, cudaStream_t stream) : device_(host) {
    cudaGetDevice(&ordinal_);
    const uint32_t nodes = uint32_t(world.num_nodes);
    std::vector<uint64_t> tokens, records, rail_records(nodes);
    for (uint32_t n = 0; n < nodes; ++n) {
      tokens.push_back(image_.add(host.node_tokens[n], 4ull * host.node_count[n]));
      records.push_back(image_.add(host.records[n], uint64_t(host.node_count[n]) * record_bytes));
    }
    const uint64_t node_count = image_.add(host.node_count, 4ull * nodes);
    const uint64_t rail_count = image_.add(host.rail_count, 4ull * nodes);
    const uint64_t node_pos = image_.add(host.node_pos, 4ull * nodes * host.num_tokens);
    const uint64_t numbers = image_.add(host.numbers, sizeof(PlanNumbers));
    const uint64_t zero_ranges = image_.add(host.zero_ranges, 8ull * host.num_local_experts);
    const uint64_t token_table = image_.add_table(tokens), record_table = image_.add_table(records);
    const uint64_t rail_table = image_.add(rail_records);  // filled in below, when the facts have their places
    for (uint32_t n = 0; n < nodes; ++n)
      rail_records[n] = learn(host.rail_records[n], uint64_t(host.rail_count[n]) * record_bytes);
    const uint64_t row_records = learn(host.row_records, uint64_t(host.numbers->recv_rows) * record_bytes);
    const uint64_t row_weights = learn(host.row_weights, 4ull * host.numbers->recv_rows * host.weight_stride);
    image_.set_table(rail_table, rail_records);
    image_.upload(stream);
    if (!host.fresh)  // learned on another device or by another buffer
      for (const Learned& l : learned_)
        check(cudaMemcpyAsync(image_.at<void>(l.at), l.host, l.bytes, cudaMemcpyHostToDevice, stream), "upload");
    device_.node_tokens = image_.at<const uint32_t* const>(token_table);
    device_.records = image_.at<const unsigned char* const>(record_table);
    device_.rail_records = image_.at<unsigned char* const>(rail_table);
    device_.node_count = image_.at<const uint32_t>(node_count);
    device_.rail_count = image_.at<const uint32_t>(rail_count);
    device_.numbers = image_.at<const PlanNumbers>(numbers);
    device_.zero_ranges = image_.at<const uint32_t>(zero_ranges);
    device_.node_pos = image_.at<const int32_t>(node_pos);
    device_.row_records = image_.at<unsigned char>(row_records);
    device_.row_weights = image_.at<float>(row_weights);
  }

  int ordinal() const { return ordinal_; }
  // The call's own view: whether it is the first is the caller's.
  PlanView view(const PlanView& call, cudaStream_t stream) {
    image_.used_on(stream);
    PlanView v = device_;
    v.fresh = call.fresh;
    return v;
  }
  // Asynchronous; the host's arrays are the plan's, which outlives the wait that follows.
  void bring_back(cudaStream_t stream) const {
    for (const Learned& l : learned_)
      check(cudaMemcpyAsync(l.host, image_.at<unsigned char>(l.at), l.bytes, cudaMemcpyDeviceToHost, stream),
            "reading back what a dispatch learned");
  }

 private:
  struct Learned {
    void* host;
    uint64_t at, bytes;
  };
  uint64_t learn(void* host, uint64_t bytes) {
    const uint64_t at = image_.reserve(bytes);
    if (bytes) learned_.push_back({host, at, bytes});
    return at;
  }

  PlanView device_;
  Image image_;
  std::vector<Learned> learned_;
  int ordinal_ = 0;
};

}  // namespace hep::cuda
