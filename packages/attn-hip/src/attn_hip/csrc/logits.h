// From raw products q.k to base-2 logits: scale, ALiBi, soft cap, mask.
#pragma once
#include "rows.h"

namespace attn {

// What the rows of a lane may see and where they stand. `query` counts rows of q within the request.
template <class T>
struct RowFacts {
  typename T::RowInt query[T::kRows];
  typename T::RowInt begin[T::kRows], end[T::kRows];  // visible keys of each row, within the item
  typename T::Row slope[T::kRows];                    // ALiBi
  int least_begin, most_begin, least_end, most_end;   // over the rows of the unit
};

template <class T>
ATTN_DEVICE bool sees_any(const RowFacts<T>& facts, int kv, int n) {
  return kv < facts.most_end && kv + n > facts.least_begin;
}

template <class T>
ATTN_DEVICE void finish_logits(const AttendParams& p, const Rows& rows, const RowFacts<T>& facts,
                               typename T::Scores& s, int kv, float scale) {
  const bool alibi = p.position == kPositionAlibi, capped = p.soft_cap > 0.f;
  const float first = alibi || capped ? scale : scale * kLog2e;
  const bool cut = kv < facts.most_begin || kv + s.span() > facts.least_end;
  const uint8_t* bits = p.mask == kMaskCustom ? p.custom_mask + p.mask_indptr[rows.request] : nullptr;
  ATTN_UNROLL
  for (int r = 0; r < T::kRows; r++) {
    ATTN_UNROLL_LANE
    for (int c = 0; c < s.cols(); c++) s.set(r, c, s.get(r, c) * first);
    if (alibi) {
      ATTN_UNROLL_LANE
      for (int c = 0; c < s.cols(); c++)
        s.set(r, c, s.get(r, c) + facts.slope[r] * T::to_float(T::key(kv, c) - facts.query[r]));
    }
    if (capped) {
      const float inverse = 1.f / p.soft_cap;
      ATTN_UNROLL_LANE
      for (int c = 0; c < s.cols(); c++) s.set(r, c, T::tanh(s.get(r, c) * inverse) * p.soft_cap);
    }
    if (alibi || capped) {
      ATTN_UNROLL_LANE
      for (int c = 0; c < s.cols(); c++) s.set(r, c, s.get(r, c) * kLog2e);
    }
    if (cut) {
      ATTN_UNROLL_LANE
      for (int c = 0; c < s.cols(); c++) {
        const auto key = T::key(kv, c);
        s.set(r, c, T::pick(T::within(key, facts.begin[r], facts.end[r]), s.get(r, c), T::elem(-kInfinity)));
      }
    }
    if (bits) {
      ATTN_UNROLL_LANE
      for (int c = 0; c < s.cols(); c++) {
        const auto seen = T::mask_bits(bits, rows, facts.query[r], T::key(kv, c));
        s.set(r, c, T::pick(seen, s.get(r, c), T::elem(-kInfinity)));
      }
    }
  }
}

}  // namespace attn
