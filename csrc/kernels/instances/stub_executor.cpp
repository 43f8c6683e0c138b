// An executor for measuring what the host does in a call, apart from kernels: it launches none, and nobody has computed
// what a dispatch or a combine returns with it. Only who asked for it (add_stub) finds it in the table.
//
// An exchange of a call that it has not met runs on the host executor. A later one whose header is that one's, word for
// word, gets the same counts by notification, without a launch.
#include <algorithm>
#include <atomic>
#include <map>
#include <vector>

#include "kernels/instances/makers.h"
#include "layout/count_notification.h"
#include "layout/headers.h"

namespace hep {
namespace {

class StubExecutor final : public Executor {
 public:
  explicit StubExecutor(std::unique_ptr<Executor> host) : host_(std::move(host)) {}

  void exchange(const ExchangeParams& p, const LaunchSettings& s) override {
    ++launches_;
    if (!p.notification) return;  // nobody waits for counts
    CallHeader::Words header;
    std::ranges::copy(p.header, header.begin());
    uint32_t* words = CountNotification::word(p.notification);
    if (const auto known = counts_.find(header); known != counts_.end()) {
      std::ranges::copy(known->second, words);
      std::atomic_ref<uint64_t>(*CountNotification::ticket(p.notification))
          .store(p.notification_ticket, std::memory_order_release);
      return;
    }
    host_->exchange(p, s);
    if (words[CountNotification::kPlaced])
      counts_[header].assign(words, words + CountNotification::make(p.layout).words());
  }
  void dispatch(DispatchParams&, const LaunchSettings&) override { ++launches_; }
  void unpermute(CombineParams&, const LaunchSettings&) override { ++launches_; }
  void combine(CombineParams&, const LaunchSettings&) override { ++launches_; }

 private:
  std::unique_ptr<Executor> host_;
  std::map<CallHeader::Words, std::vector<uint32_t>> counts_;  // of calls that were placed
};

}  // namespace

void Executor::add_stub() {
  add("host_stub", [](unsigned char* const* rail_segments, uint64_t seed) -> std::unique_ptr<Executor> {
    return std::make_unique<StubExecutor>(make_host_plain(rail_segments, seed));
  });
}

}  // namespace hep
