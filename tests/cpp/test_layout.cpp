// Layouts: regions that never overlap, offsets that every rank computes alike, sections where bulk copies can
// reach them.
#include <algorithm>
#include <array>
#include <set>
#include <string>
#include <utility>

#include "arch/host/host_arch.h"
#include "check.h"
#include "common/reciprocal.h"
#include "kernels/combine.h"
#include "kernels/dispatch.h"
#include "layout/buffer.h"
#include "layout/message.h"
#include "layout/smem.h"
#include "pipeline/rail_tokens.h"
#include "pipeline/side_by_side.h"
#include "world_case.h"

HEP_TEST_MAIN

namespace hep {
namespace {

using test::Random;

BufferShape random_shape(Random& r) {
  BufferShape s;
  s.num_nodes = r.between(1, 5);
  s.num_local_ranks = r.between(1, 8);
  s.num_experts = s.num_nodes * s.num_local_ranks * r.between(1, 9);
  s.max_topk = r.between(1, 40);
  s.row_bytes = 16 * r.between(1, 3000);
  s.scale_bytes = 16 * r.between(0, 40);
  s.partial_row_bytes = 16 * r.between(1, 5000);
  s.recv_rows = r.between(1, 5000);
  s.chunk_tokens = r.between(1, 64);
  s.rail_slots = r.between(1, 9);
  return s;
}

// Pieces of one region: each aligned, inside, and disjoint from the others.
struct Pieces {
  Region region;
  std::set<std::pair<uint64_t, uint64_t>> taken;
  void add(uint64_t at, uint64_t bytes, uint64_t alignment) {
    CHECK_EQ(at % alignment, 0u);
    CHECK(at >= region.offset && at + bytes <= region.offset + region.bytes);
    CHECK(taken.emplace(at, at + bytes).second);
  }
  void check_disjoint() const {
    uint64_t end = 0;
    for (const auto& [from, to] : taken) {
      CHECK(from >= end);
      end = to;
    }
  }
};

Pieces pieces_of(const BufferLayout& b, const std::string& name) {
  for (const Region& region : b.regions)
    if (region.name == name) return {region, {}};
  throw check::Failure("no region " + name);
}

}  // namespace

TEST(regions_are_aligned_disjoint_and_inside) {
  Random r(1);
  for (int i = 0; i < 500; ++i) {
    const BufferLayout b(random_shape(r));
    uint64_t end = 0;
    for (const Region& region : b.regions) {
      CHECK_EQ(region.offset % 128, 0u);
      CHECK(region.offset >= end);
      end = region.offset + region.bytes;
    }
    CHECK(end <= b.total);
    CHECK_EQ(b.total % 4096, 0u);
  }
}

TEST(every_flag_slot_and_vector_has_a_place_of_its_own) {
  Random r(2);
  for (int i = 0; i < 200; ++i) {
    const BufferShape s = random_shape(r);
    const BufferLayout b(s);
    const int nodes = int(s.num_nodes), own = int(r.below(s.num_nodes));
    Pieces ready = pieces_of(b, "ready_flags"), done = pieces_of(b, "done_flags");
    Pieces counts_rail = pieces_of(b, "counts_rail_flags"), counts_node = pieces_of(b, "counts_node_flags");
    Pieces full = pieces_of(b, "rail_full_flags"), free = pieces_of(b, "rail_free_flags");
    Pieces send = pieces_of(b, "rail_send_ring"), recv = pieces_of(b, "rail_receive_ring"),
           counts = pieces_of(b, "counts");
    for (int l = 0; l < int(s.num_local_ranks); ++l) {
      ready.add(b.ready_flag(l), 64, 64);
      done.add(b.done_flag(l), 64, 64);
    }
    for (int n = 0; n < 2 * nodes; ++n) counts_rail.add(b.counts_rail_flag(n / nodes, n % nodes), 64, 64);
    for (int rank = 0; rank < int(b.num_ranks); ++rank) {
      counts_node.add(b.counts_node_flag(rank), 64, 64);
      for (int parity = 0; parity < 2; ++parity) counts.add(b.counts_vector(parity, rank), b.counts.vector_bytes(), 64);
    }
    for (int n = 0; n < nodes; ++n)
      for (uint32_t slot = 0; n != own && slot < s.rail_slots; ++slot) {
        full.add(b.rail_full_flag(own, n, slot), 64, 64);
        free.add(b.rail_free_flag(own, n, slot), 64, 64);
        send.add(b.rail_send_slot(own, n, slot), b.slot_bytes, 128);
        recv.add(b.rail_recv_slot(own, n, slot), b.slot_bytes, 128);
      }
    for (const Pieces* p : {&ready, &done, &counts_rail, &counts_node, &full, &free, &send, &recv, &counts}) {
      CHECK(p->taken.empty() || p->taken.size() >= 1);
      p->check_disjoint();
    }
    CHECK_EQ(recv.taken.size(), size_t(nodes - 1) * s.rail_slots);
  }
}

TEST(buffer_holds_the_largest_rows_of_its_shape) {
  Random r(3);
  for (int i = 0; i < 300; ++i) {
    const BufferShape s = random_shape(r);
    const BufferLayout b(s);
    const World w{int32_t(s.num_nodes), int32_t(s.num_local_ranks), 0};
    const uint32_t topk = r.between(1, s.max_topk);
    const uint64_t message = MessageLayout::make(w, topk, true, s.scale_bytes, s.row_bytes).token_bytes();
    const uint64_t partial = PartialLayout{s.partial_row_bytes, MessageLayout::weight_section_bytes(topk)}.row_bytes();
    CHECK(std::max(message, partial) <= b.token_stride);
    CHECK(std::max(message, partial) * s.chunk_tokens <= b.slot_bytes);
    CHECK(std::max(message, partial) * s.recv_rows + 2 * BufferLayout::kLine <= b.recv_bytes);
  }
}

TEST(count_vector_sections_follow_each_other) {
  for (const CountsLayout c : {CountsLayout{1, 1, 1}, CountsLayout{6, 3, 24}, CountsLayout{64, 8, 256}}) {
    CHECK_EQ(c.rows_at(), uint32_t(kCountHeaderWords));
    CHECK_EQ(c.node_tokens_at(), c.rows_at() + c.num_ranks);
    CHECK_EQ(c.experts_at(), c.node_tokens_at() + c.num_nodes);
    CHECK_EQ(c.words(), c.experts_at() + c.num_experts);
    CHECK(c.vector_bytes() >= 4 * c.words() && c.vector_bytes() % 64 == 0);
    std::vector<uint32_t> words(c.num_ranks * c.vector_bytes() / 4);
    for (size_t i = 0; i < words.size(); ++i) words[i] = uint32_t(i);
    const CountsView view{c, reinterpret_cast<const unsigned char*>(words.data())};
    const int last = int(c.num_ranks) - 1;
    const uint32_t base = uint32_t(last * c.vector_bytes() / 4);
    CHECK_EQ(view.header(last, 3), base + 3);
    CHECK_EQ(view.rows(last, last), base + c.rows_at() + uint32_t(last));
    CHECK_EQ(view.node_tokens(last, 0), base + c.node_tokens_at());
    CHECK_EQ(view.pairs(last, int(c.num_experts) - 1), base + c.words() - 1);
  }
}

TEST(message_sections_are_where_bulk_copies_reach) {
  Random r(4);
  for (int i = 0; i < 500; ++i) {
    const World w{int32_t(r.between(1, 5)), int32_t(r.between(1, 72)), 0};
    const uint32_t topk = r.between(1, 200), scales = 16 * r.between(0, 9), row = 16 * r.between(1, 999);
    const bool weights = r.one_in(2);
    const MessageLayout m = MessageLayout::make(w, topk, weights, scales, row);
    CHECK_EQ(m.max_dsts, std::min(topk, uint32_t(w.num_local_ranks)));
    CHECK(MessageLayout::dsts_at() == sizeof(RecordHeader) &&
          m.pairs_at() == MessageLayout::dsts_at() + 8 * m.max_dsts);
    CHECK(m.pairs_at() + 8 * topk <= m.record_bytes);
    CHECK_EQ(m.weights_at(), m.record_bytes);
    CHECK(weights ? m.weight_bytes >= 4 * topk : m.weight_bytes == 0);
    CHECK_EQ(m.scales_at(), m.weights_at() + m.weight_bytes);
    CHECK_EQ(m.payload_at(), m.scales_at() + scales);
    CHECK_EQ(m.token_bytes(), m.payload_at() + row);
    for (const uint32_t at : {m.weights_at(), m.scales_at(), m.payload_at(), m.token_bytes()}) CHECK_EQ(at % 16, 0u);
  }
}

TEST(fifo_sections_are_disjoint) {
  Random r(5);
  for (int i = 0; i < 500; ++i) {
    const uint64_t start = r.below(100000), stage = r.between(1, 40000), head = 16 * r.between(1, 4);
    const uint32_t stages = r.between(1, 12);
    const FifoLayout f = FifoLayout::make(start, stages, stage, head, 8);
    CHECK(f.data_at >= start && f.data_at % 128 == 0 && f.stage_bytes >= stage && f.stage_bytes % 128 == 0);
    CHECK(f.heads_at >= f.data_at + uint64_t(stages) * f.stage_bytes && f.heads_at % 16 == 0);
    CHECK(f.full_at >= f.heads_at + stages * head && f.full_at % 8 == 0);
    CHECK(f.empty_at >= f.full_at + stages * 8 && f.empty_at % 8 == 0);
    CHECK(f.end >= f.empty_at + stages * 8 && f.end % 128 == 0);
  }
}

TEST(stages_fit_the_budget_unless_too_few_would) {
  CHECK_EQ(stages_that_fit(1000, 100, 2, 20), 10u);
  CHECK_EQ(stages_that_fit(1000, 100, 2, 6), 6u);
  CHECK_EQ(stages_that_fit(1000, 900, 2, 6), 2u);
}

// What a block of an H100 may use is kept to the byte, for rows of any width, one node and more peers than anybody has.
TEST(plans_of_shared_memory_keep_the_budget) {
  using A = host::PlainFibers;
  constexpr uint64_t kBudget = 232448;
  for (const uint32_t nodes : {1u, 2u, 16u, 72u, 256u})
    for (const bool weights : {false, true})
      for (uint32_t row_bytes = 16; row_bytes <= 40 * 1024; row_bytes += 16 * (row_bytes < 1024 ? 1 : 13))
        for (const bool apart : {false, true}) {
          DispatchParams d{};
          d.world = {int32_t(nodes), nodes > 16 ? 1 : 8, 0};
          d.message = MessageLayout::make(d.world, nodes > 16 ? 1 : 8, weights, apart ? 256 : 0, row_bytes);
          d.rail.num_peers = nodes - 1;
          d.blocks = {8, apart ? 8u : 0u};
          d.landing.in = weights ? LandIn::kFirstPair : LandIn::kReceiveRow;
          CHECK(plan_dispatch_smem<A>(d, kBudget) <= kBudget);
          CHECK(d.scatter.num_stages >= 4 && d.scatter.num_stages % 2 == 0);
          CombineParams c{};
          c.world = d.world;
          c.permuted = true;
          c.plan.topk = nodes > 16 ? 1 : 8;
          c.plan.num_local_experts = 4000;  // of which a token has few
          c.blocks = d.blocks;
          c.rail.num_peers = nodes - 1;
          c.hidden = row_bytes / 2;
          c.dtype = DType::kBf16;
          c.partial_dtype = apart ? DType::kFp32 : DType::kBf16;
          c.partial.weight_bytes = weights ? 32 : 0;
          CHECK(plan_combine_smem<A>(c, kBudget) <= kBudget);
          CHECK(c.rail_tally_at % 16 == 0 && c.node_sum.data_at >= c.rail_tally_at + 16ull * c.rail.num_peers);
        }
}

// Of routing maps with many experts a token, weighted sums among them: what could be dispatched can be combined, and
// records of a group of rows lie where the record window's blocks do, no further.
TEST(a_token_of_many_experts_that_was_dispatched_can_be_combined) {
  using A = host::CheckedFibers<32>;  // with stages that hold rows, as a GPU's
  constexpr uint64_t kBudget = 232448;
  constexpr uint32_t kHidden = 7168;
  int fitting = 0;
  for (const int32_t ranks : {8, 72})
    for (const uint32_t topk : {8u, 96u, 160u, 192u, 256u})
      for (const DType type : {DType::kBf16, DType::kFp32})
        for (const bool apart : {false, true})
          for (const bool multiply : {false, true}) {
            if (ranks == 72 && topk == 256) continue;  // too many for fp32 with blocks apart
            DispatchParams d{};
            d.world = {1, ranks, 0};
            d.message = MessageLayout::make(d.world, topk, true, 0, kHidden * dtype_bytes(type));
            d.blocks = {8, apart ? 8u : 0u};
            d.landing.in = LandIn::kFirstPair;
            CombineParams c{};
            c.world = d.world;
            c.permuted = true;
            c.multiply = multiply;
            c.plan.topk = topk;
            c.plan.weight_stride = d.message.weight_bytes / 4;
            c.plan.num_local_experts = 4000;
            c.record_bytes = d.message.record_bytes;
            c.pairs_at = d.message.pairs_at();
            c.blocks = d.blocks;
            c.hidden = kHidden;
            c.dtype = c.partial_dtype = type;
            c.partial.weight_bytes = d.message.weight_bytes;
            const bool dispatched = plan_dispatch_smem<A>(d, kBudget) <= kBudget,
                       combined = plan_combine_smem<A>(c, kBudget) <= kBudget;
            fitting += dispatched;
            CHECK(combined || !dispatched);
            const uint32_t rows = multiply ? 8 : 16, row = c.record_bytes + (multiply ? 4 * c.plan.weight_stride : 0);
            for (const FifoLayout& window : c.records) CHECK(window.data_at + rows * row <= window.heads_at);
          }
  CHECK(fitting == 72);
}

// Rows of half the bytes must not mean half the bytes in flight: fp8 with its scales against bf16, in what a block of
// an H100 may use.
TEST(small_rows_get_the_stages_that_their_size_leaves_room_for) {
  using A = host::PlainFibers;
  constexpr uint64_t kBudget = 232448;
  const auto stages = [&](uint32_t num_nodes, bool apart, uint32_t row_bytes, uint32_t scale_bytes) {
    DispatchParams p{};
    p.world = {int32_t(num_nodes), 8, 0};
    p.message = MessageLayout::make(p.world, 8, true, scale_bytes, row_bytes);
    p.rail.num_peers = num_nodes - 1;
    p.blocks = {8, apart ? 8u : 0u};
    CHECK(plan_dispatch_smem<A>(p, kBudget) <= kBudget);
    return std::array{p.scatter.num_stages, num_nodes > 1 ? p.rail_stage.num_stages : 0, p.deliver.num_stages};
  };
  for (const uint32_t nodes : {1u, 4u})
    for (const bool apart : {false, true}) {
      const auto bf16 = stages(nodes, apart, 2 * 7168, 0), fp8 = stages(nodes, apart, 7168, 4 * 7168 / 128);
      for (const size_t fifo : {0, 2}) CHECK(fp8[fifo] * 10 >= bf16[fifo] * 18);
      // N2N has what scatter leaves of their common memory, which is more of it where stages are large.
      if (nodes > 1) CHECK((fp8[0] + fp8[1]) * 10 >= (bf16[0] + bf16[1]) * 18 && fp8[1] > bf16[1]);
      CHECK(stages(nodes, apart, 16, 0)[0] == kMostStages && fp8[0] < kMostStages);
    }
}

TEST(reciprocals_divide_every_number_below_two_to_the_31) {
  Random r(5);
  for (int i = 0; i < 20000; ++i) {
    const uint32_t divisor = i < 300 ? uint32_t(i + 1) : 1 + r.below(r.of({7u, 1000u, 1u << 20, 1u << 31}));
    const Reciprocal by = Reciprocal::of(divisor);
    const uint32_t below = r.below(1u << 31), last = (1u << 31) - 1, multiple = below / divisor * divisor;
    for (const uint32_t n :
         {0u, divisor - 1, multiple, multiple - (multiple > 0), below, last, last / divisor * divisor})
      CHECK_EQ(by.quotient(n), n / divisor);
  }
}

TEST(rows_side_by_side_are_every_row_once_and_near_their_pieces) {
  Random r(11);
  for (int world = 0; world < 300; ++world) {
    const uint32_t rows = world < 3 ? uint32_t(world) : uint32_t(r.between(0, 3000)),
                   pieces = uint32_t(r.between(1, 80));
    const auto order = SideBySide::of(rows, pieces);
    std::set<uint32_t> seen;
    for (uint32_t i = 0; i < order.count(); ++i)
      if (const uint32_t row = order.row(i); row < rows) {
        CHECK(seen.insert(row).second);
        CHECK_EQ(row / order.each, i % pieces);  // neighbours are of different pieces
      }
    CHECK_EQ(seen.size(), rows);
    CHECK(order.count() < rows + pieces);
  }
}

TEST(tokens_of_rail_peers_are_every_token_once_and_the_first_of_all_before_the_second_of_any) {
  Random r(12);
  for (int i = 0; i < 300; ++i) {
    const int nodes = int(r.between(1, 6));
    const World w{nodes, 2, int(r.below(uint32_t(2 * nodes)))};
    std::vector<uint32_t> counts;
    uint32_t all = 0, before = 0;
    for (int n = 0; n < nodes; ++n) {
      counts.push_back(r.one_in(3) ? 0 : uint32_t(r.below(20)));
      all += n == w.node() ? 0 : counts.back();  // its own are no peer's
    }
    const auto tokens = RailTokens::of(w, counts.data());
    std::set<std::pair<int, uint32_t>> seen;
    for (uint32_t at = 0; at < tokens.count(); ++at) {
      CHECK(tokens.node(at) != w.node() && tokens.index(at) >= before);
      before = tokens.index(at);
      if (tokens.has(at)) CHECK(seen.insert({tokens.node(at), tokens.index(at)}).second);
    }
    CHECK_EQ(seen.size(), all);
  }
}

// What lines of a slot admit, a place of the rail holds too.
TEST(places_of_the_latency_rail_hold_what_slots_do) {
  const CountsLayout counts{16, 2, 64};
  for (uint64_t bytes = 16; bytes < 20000; bytes += 16) {
    const auto rail = LatencyRail::make(counts, 3, bytes);
    const auto slabs = LatencySlabs::make(counts, 3, bytes);
    CHECK(rail.token_bytes >= uint64_t(slabs.token_lines) * Line::kPayloadBytes && rail.token_bytes % 128 == 0);
    CHECK_EQ(rail.token(0, 0, 1, 2) + rail.token_bytes, rail.bytes() / 2);
  }
}

TEST(bad_shapes_are_refused) {
  auto with = [](auto&& change) {
    BufferShape s;
    change(s);
    s.validate();
  };
  with([](BufferShape&) {});
  CHECK_THROWS(std::invalid_argument, with([](BufferShape& s) { s.num_nodes = 0; }));
  CHECK_THROWS(std::invalid_argument, with([](BufferShape& s) { s.num_nodes = 2; }));  // one expert on two ranks
  CHECK_THROWS(std::invalid_argument, with([](BufferShape& s) { s.row_bytes = 24; }));
  CHECK_THROWS(std::invalid_argument, with([](BufferShape& s) { s.row_bytes = 0; }));
  CHECK_THROWS(std::invalid_argument, with([](BufferShape& s) { s.scale_bytes = 8; }));
  CHECK_THROWS(std::invalid_argument, with([](BufferShape& s) { s.partial_row_bytes = 4; }));
  CHECK_THROWS(std::invalid_argument, with([](BufferShape& s) { s.chunk_tokens = 0; }));
  CHECK_THROWS(std::invalid_argument, with([](BufferShape& s) { s.rail_slots = 0; }));
  CHECK_THROWS(std::invalid_argument, with([](BufferShape& s) { s.max_topk = 0; }));
}

}  // namespace hep
