// Online softmax over a tile of scores in base 2, written for whatever a lane of the target owns:
//   T::Row    one value per row that a lane owns (a float, or a vector with one row in each place)
//   T::Elem   one score (a float, or a vector of neighbours)
// rows() x cols() of them make up a lane's share of the tile.
#pragma once
#include "portability.h"

namespace attn {

template <class T>
struct RowState {
  typename T::Row top[T::kRows];  // largest score so far, -inf before the first visible key
  typename T::Row sum[T::kRows];  // sum of 2^(score - top)
};

template <class T>
ATTN_DEVICE void clear(RowState<T>& state) {
  ATTN_UNROLL
  for (int r = 0; r < T::kRows; r++) {
    state.top[r] = T::row(-kInfinity);
    state.sum[r] = T::row(0.f);
  }
}

// Turns scores into weights 2^(score - top) and returns in `fade` what the sums and outputs so far are worth now.
// A target that folds takes scores before they are scaled; `scale` > 0 then joins them in the exponent.
template <class T>
ATTN_DEVICE void soften(RowState<T>& state, typename T::Scores& s, typename T::Row (&fade)[T::kRows], float scale) {
  const auto weight = [scale](auto score, auto base) {
    if constexpr (T::kFolds) return T::exp2_scaled(score, base, scale);
    else return T::exp2(score - base);
  };
  ATTN_UNROLL
  for (int r = 0; r < T::kRows; r++) {
    typename T::Elem best = T::elem(-kInfinity);
    ATTN_UNROLL_LANE
    for (int c = 0; c < s.cols(); c++) best = T::max(best, s.get(r, c));
    const typename T::Row top = T::max(state.top[r], T::max_across(best));
    // A row that has seen no key has top = -inf, and -inf - -inf would make NaN of nothing.
    const typename T::Row base = T::pick(top == T::row(-kInfinity), T::row(0.f), top);
    fade[r] = weight(state.top[r], base);
    typename T::Elem sum = T::elem(0.f);
    ATTN_UNROLL_LANE
    for (int c = 0; c < s.cols(); c++) {
      const typename T::Elem w = weight(s.get(r, c), base);
      s.set(r, c, w);
      sum += w;
    }
    state.sum[r] = state.sum[r] * fade[r] + T::sum_across(sum);
    state.top[r] = top;
  }
}

// What a row's output is multiplied by at the end; 0 for a row without a key, whose output is 0 already.
template <class T>
ATTN_DEVICE typename T::Row share(const RowState<T>& state, int r, float scale) {
  return T::pick(state.sum[r] == T::row(0.f), T::row(0.f), T::row(scale) / state.sum[r]);
}

// In base 2; -inf without a key, as -inf + -inf.
template <class T>
ATTN_DEVICE typename T::Row log_sum(const RowState<T>& state, int r, float scale = 1.f) {
  if constexpr (T::kFolds) return state.top[r] * scale + T::log2(state.sum[r]);
  else return state.top[r] + T::log2(state.sum[r]);
}

}  // namespace attn
