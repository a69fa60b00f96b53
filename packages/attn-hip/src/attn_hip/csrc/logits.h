// From raw products q.k to base-2 logits: scale, ALiBi, soft cap, mask.
//
// T::kPlain: none of ALiBi, soft cap and custom mask is compiled in. T::kFolds: where nothing comes between scale and
// exponential, the exponential takes the scale along.
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
ATTN_DEVICE bool is_bent(const AttendParams& p) {  // whether logits are more than scaled products
  return !T::kPlain && (p.position == kPositionAlibi || p.soft_cap > 0.f);
}

// What finish_logits leaves for the exponential to multiply.
template <class T>
ATTN_DEVICE float scale_left(const AttendParams& p, float scale) {
  return T::kFolds && scale > 0.f && !is_bent<T>(p) ? scale * kLog2e : 1.f;
}

template <class T>
ATTN_DEVICE void finish_logits(const AttendParams& p, const Rows& rows, const RowFacts<T>& facts,
                               typename T::Scores& s, int kv, float scale) {
  const bool alibi = !T::kPlain && p.position == kPositionAlibi, capped = !T::kPlain && p.soft_cap > 0.f;
  const bool folded = T::kFolds && scale > 0.f && !is_bent<T>(p);
  const float first = alibi || capped ? scale : scale * kLog2e;
  const bool cut = kv < facts.most_begin || kv + s.span() > facts.least_end;
  const bool masked = !T::kPlain && p.mask == kMaskCustom;
  ATTN_UNROLL
  for (int r = 0; r < T::kRows; r++) {
    if (!folded) {
      ATTN_UNROLL_LANE
      for (int c = 0; c < s.cols(); c++) s.set(r, c, s.get(r, c) * first);
    }
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
    if (masked) {
      const uint8_t* bits = p.custom_mask + global(p.mask_indptr)[rows.request];
      ATTN_UNROLL_LANE
      for (int c = 0; c < s.cols(); c++) {
        const auto seen = T::mask_bits(bits, rows, facts.query[r], T::key(kv, c));
        s.set(r, c, T::pick(seen, s.get(r, c), T::elem(-kInfinity)));
      }
    }
  }
}

}  // namespace attn
