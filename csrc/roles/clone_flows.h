// The state of a search for clones: what ranks lack, which clones are chosen, and what has flowed for each choice. A
// clone on rank r lets what r lacks flow to the expert's owner, as much of it as the expert has tokens; there it
// cancels overload, or the owner lacks it now, and it flows on along the owner's clone.
//
// No recursion: choices under way lie in shared memory, and what flowed for them in a log in the rank's memory, to be
// taken back. Lane 0 alone writes, so the log needs no ordering.
#pragma once
#include "roles/clone_tables.h"

namespace hep {

// Tokens that flowed from a rank to the owner of its clone.
struct alignas(16) CloneFlow {
  int64_t tokens, rank;
};

template <Lanes A>
class CloneFlows {
 public:
  // log: CloneLayout::flow_bytes of the rank's memory.
  HEP_DEVICE CloneFlows(const CloneTables<A>& tables, CloneFlow* log) : a(tables.a), t(tables), log_(log) {}

  HEP_DEVICE int64_t* deficit() const { return at<int64_t>(0); }                    // below 0: overload
  HEP_DEVICE int64_t* moved() const { return at<int64_t>(t.layout.search_moved); }  // tokens of a rank's clone
  HEP_DEVICE int64_t* left() const { return at<int64_t>(t.layout.search_left); }    // of an expert, at its owner
  HEP_DEVICE int32_t* clone() const { return at<int32_t>(t.layout.search_clone); }  // expert on a rank, -1: none yet
  HEP_DEVICE int32_t* depth() const { return at<int32_t>(t.layout.search_depth); }  // choices, -1: none is left

  // By all lanes of the warp, which meet.
  HEP_DEVICE void begin(int64_t target) {
    for (int r = a.lane(); r < t.shape.num_ranks; r += A::kLanes) {
      a.st_shared(deficit() + r, target - a.ld_shared(t.load() + r));
      a.st_shared(moved() + r, int64_t(0));
      a.st_shared(clone() + r, int32_t(-1));
    }
    for (int e = a.lane(); e < t.shape.num_experts; e += A::kLanes) a.st_shared(left() + e, a.ld_shared(t.total() + e));
    if (a.lane() == 0) a.st_shared(depth(), 0);
    a.warp_sync();
  }
  // By lane 0: another choice, of the expert that `rank` clones and of the next one to try (-1: none).
  HEP_DEVICE void choose(int rank, int expert, int next) {
    const int d = a.ld_shared(depth());
    a.st_shared(rank_of() + d, rank);
    a.st_shared(next_of() + d, next);
    a.st_shared(mark_of() + d, num_flows_);
    let_flow(rank, expert);
    a.st_shared(depth(), d + 1);
  }
  // By lane 0: the latest choice that has a next one takes that; later ones are forgotten. Without any the depth is -1.
  HEP_DEVICE void turn_back() {
    for (int d = a.ld_shared(depth()) - 1; d >= 0; --d) {
      const int rank = a.ld_shared(rank_of() + d), next = a.ld_shared(next_of() + d);
      take_back(a.ld_shared(mark_of() + d));
      if (next >= 0) {
        a.st_shared(next_of() + d, -1);
        let_flow(rank, next);
        a.st_shared(depth(), d + 1);
        return;
      }
      a.st_shared(clone() + rank, -1);
    }
    a.st_shared(depth(), -1);
  }

 private:
  template <class T>
  HEP_DEVICE T* at(uint32_t byte) const {
    return t.template at<T>(t.layout.search_at + byte);
  }
  HEP_DEVICE int32_t* rank_of() const { return at<int32_t>(t.layout.search_rank); }
  HEP_DEVICE int32_t* next_of() const { return at<int32_t>(t.layout.search_next); }
  HEP_DEVICE int32_t* mark_of() const { return at<int32_t>(t.layout.search_mark); }  // flows before the choice

  template <class T>
  HEP_DEVICE void add(T* word, int64_t tokens) const {
    a.st_shared(word, a.ld_shared(word) + tokens);
  }
  // What a rank lacks moves along clones until it cancels overload, waits at a rank without a clone, or sticks. Around
  // a cycle of clones nothing leaves, so one turn is enough.
  HEP_DEVICE void let_flow(int rank, int expert) {
    a.st_shared(clone() + rank, expert);
    for (int hop = 0; hop < t.shape.num_ranks && expert >= 0; ++hop) {
      const int64_t lacks = a.ld_shared(deficit() + rank), has = a.ld_shared(left() + expert);
      if (lacks <= 0) break;
      const int64_t tokens = lacks < has ? lacks : has;
      a.st_global(log_ + num_flows_++, CloneFlow{tokens, rank});
      move(rank, expert, tokens);
      rank = a.ld_shared(t.owner() + expert);
      expert = a.ld_shared(clone() + rank);
    }
  }
  HEP_DEVICE void take_back(int mark) {
    if (injected(Bug::kFlowNotTakenBack)) ++mark;
    while (num_flows_ > mark) {
      const CloneFlow flow = a.ld_global(log_ + --num_flows_);
      move(int(flow.rank), a.ld_shared(clone() + flow.rank), -flow.tokens);
    }
  }
  HEP_DEVICE void move(int rank, int expert, int64_t tokens) const {
    add(left() + expert, -tokens);
    add(moved() + rank, tokens);
    add(deficit() + rank, -tokens);
    add(deficit() + a.ld_shared(t.owner() + expert), tokens);
  }

  A& a;
  const CloneTables<A>& t;
  CloneFlow* const log_;
  int32_t num_flows_ = 0;
};

}  // namespace hep
