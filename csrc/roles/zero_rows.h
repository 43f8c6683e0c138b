// Zero rows: what nobody sends. Beside the stores of those who send, for no row is both.
#pragma once
#include "common/bugs.h"
#include "roles/params.h"

namespace hep {

// Permuted rows that hold no token (padding of an expert's group, the tail of a static budget) become zero.
template <Arch A>
struct ZeroRowsRole {
  // By all lanes of a warp, of `workers` that share the rows.
  template <class P>
  HEP_DEVICE static void run(A& a, const P& p, uint32_t worker, uint32_t workers) {
    a.set_role(Role::kZeroRows);
    if (!p.permute || injected(Bug::kPaddingNotCleared)) return;
    for (uint32_t r = 0; r <= p.plan.num_local_experts; ++r) {
      const bool tail = r == p.plan.num_local_experts;  // behind the last group, up to the result's end
      const uint64_t begin = tail ? p.plan.numbers->permuted_rows : p.plan.zero_ranges[2 * r];
      const uint64_t end = tail ? p.out_rows : p.plan.zero_ranges[2 * r + 1];
      for (uint64_t row = begin + worker; row < end; row += workers) {
        zero(a, p.out_x + row * p.message.row_bytes, p.message.row_bytes);
        if (p.message.scale_bytes) zero(a, p.out_scales + row * p.message.scale_bytes, p.message.scale_bytes);
        if (p.out_weights && a.lane() == 0) a.st_global(p.out_weights + row, 0.f);
      }
    }
  }

 private:
  HEP_DEVICE static void zero(A& a, unsigned char* dst, uint32_t bytes) {
    auto* v = reinterpret_cast<Vec16*>(dst);
    for (uint32_t i = a.lane(); i < bytes / sizeof(Vec16); i += A::kLanes) a.st_global(v + i, Vec16{});
  }
};

}  // namespace hep
