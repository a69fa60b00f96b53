// Joins the partial results of a split-KV tile, in the order of its chunks.
#pragma once
#include "rows.h"

namespace attn {

// What one chunk found for one packed row.
struct Partial {
  const float* out;  // [head_dim_vo]
  float lse;
};

ATTN_DEVICE Partial partial_of(const AttendParams& p, const MergeItem& item, int i, int row) {
  const int64_t at = (int64_t(item.first_slot) + int64_t(i) * item.slot_stride) * p.tile_q + row;
  return {p.partial_out + at * p.head_dim_vo, p.partial_lse[at]};
}

// Largest lse of the chunks; 0 where no chunk has a visible key. M brings the target's max and exp2.
template <class M>
ATTN_DEVICE float merged_top(const AttendParams& p, const MergeItem& item, int row) {
  float top = -kInfinity;
  for (int i = 0; i < item.num_slots; i++) top = M::max(top, partial_of(p, item, i, row).lse);
  return top == -kInfinity ? 0.f : top;
}

// Calls to.add(weight, out) for each chunk in order and returns the sum of the weights. A chunk without a visible key
// (lse -inf) is passed over; a NaN goes on into every sum.
template <class M>
ATTN_DEVICE float merge_row(const AttendParams& p, const MergeItem& item, int row, float top, M& to) {
  float sum = 0.f;
  for (int i = 0; i < item.num_slots; i++) {
    const Partial partial = partial_of(p, item, i, row);
    if (partial.lse == -kInfinity) continue;
    const float weight = M::exp2(partial.lse - top);
    sum += weight;
    to.add(weight, partial.out);
  }
  return sum;
}

}  // namespace attn
