// The arithmetic of a reduce warp: its slice of a tile, summed in FP32 registers. Every lane owns fixed vec8s of the
// slice, so a sum never crosses lanes.
#pragma once
#include "common/bugs.h"
#include "layout/smem.h"
#include "roles/vec8.h"

namespace hep {

template <Arch A, int kWarps>
struct SliceSum {
  static constexpr uint32_t kMostElems = kSumTileElems / kWarps;
  static constexpr int kMaxVec8s = int(kMostElems) / kVec8 / A::kLanes;

  // What a warp has of a tile, in elements: vec8s, split evenly between the warps, the last of them perhaps half.
  struct Slice {
    uint32_t begin, elems;

    HEP_DEVICE bool is_whole() const { return elems == kMostElems; }  // every lane has all its vec8s
  };

  const int warp, lane;
  float sums[kMaxVec8s][kVec8];

  HEP_DEVICE SliceSum(int warp_of_group, int lane_) : warp(warp_of_group), lane(lane_) {}

  HEP_DEVICE Slice slice_of(uint32_t elems) const {
    const uint32_t each = share_of(elems), begin = uint32_t(warp) * each;
    return {begin, begin >= elems ? 0 : elems - begin < each ? elems - begin : each};
  }
  // The most that one warp has of a tile.
  HEP_HOST_DEVICE static constexpr uint32_t share_of(uint32_t elems) {
    const uint32_t vec8s = (elems + kVec8 - 1) / kVec8;
    return (vec8s + kWarps - 1) / kWarps * kVec8;
  }
  // -0 changes nothing that it is added to; 0 would make a sum of -0 alone 0.
  HEP_DEVICE void begin(bool empty) {
    HEP_UNROLL  // on a GPU the sums live in registers, which have no index
    for (int i = 0; i < kMaxVec8s; ++i)
      for (float& x : sums[i]) x = empty || injected(Bug::kSumFromPositiveZero) ? 0.f : -0.f;
  }
  // This lane's part of a row, as it was staged.
  template <class T, bool kWhole>
  HEP_DEVICE void load(A& a, Vec8<T> (&words)[kMaxVec8s], const unsigned char* tile, const Slice& s) const {
    const T* row = reinterpret_cast<const T*>(tile) + s.begin;
    HEP_UNROLL
    for (int i = 0; i < kMaxVec8s; ++i) words[i].template load<kWhole>(a, row + vec8_at(i), int(s.elems) - vec8_at(i));
  }
  template <class T, bool kScaled>
  HEP_DEVICE void add(const Vec8<T> (&words)[kMaxVec8s], float scale) {
    HEP_UNROLL
    for (int i = 0; i < kMaxVec8s; ++i) {
      float v[kVec8];
      words[i].template widen<A>(v);
      HEP_UNROLL
      for (int e = 0; e < kVec8; ++e) sums[i][e] += kScaled ? v[e] * scale : v[e];
    }
  }
  template <class T>
  HEP_DEVICE void round_into(A& a, unsigned char* out, const Slice& s) const {
    HEP_UNROLL
    for (int i = 0; i < kMaxVec8s; ++i) {
      Vec8<T> words;
      words.template round<A>(sums[i]);
      words.store(a, reinterpret_cast<T*>(out) + vec8_at(i), int(s.elems) - vec8_at(i));
    }
  }

 private:
  // Of the i-th vec8 of this lane: where it begins in the slice.
  HEP_DEVICE int vec8_at(int i) const { return (i * A::kLanes + lane) * kVec8; }
};

}  // namespace hep
