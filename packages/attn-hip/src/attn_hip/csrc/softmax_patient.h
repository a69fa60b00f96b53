// A softmax that rescales only where a row's largest score grows by much: for GPUs whose vector unit is what limits.
#pragma once
#include "softmax.h"
#include "stage_gpu.h"

namespace attn {

// soften() for a target that is patient: a row's top may lag behind its largest score, by kPatience in the
// exponent, so that most steps rescale nothing. Then a lane asks its neighbours nothing either: `sum` is what it found
// by itself until settle(). `fade_out(fade)` is called where the outputs so far lose worth.
template <class T, class FadeOut>
ATTN_DEVICE void soften_patiently(RowState<T>& state, typename T::Scores& s, float scale, FadeOut fade_out) {
  constexpr float kPatience = 8.f;  // a weight is at most 2^8: no type of weights minds
  // A row that has seen no key has top = -inf; the least number stands in, as -inf - -inf would make NaN of nothing.
  const auto exponent = [scale](float top) { return T::max(top * scale, -kGreatest); };
  const auto best_of = [&](int r) {
    float best = s.get(r, 0);
    ATTN_UNROLL
    for (int c = 1; c < s.cols(); c++) best = T::max(best, s.get(r, c));
    return best;
  };
  // Exponents tell in fewer instructions whether a row grows; then scores are wanted again, which takes registers.
  constexpr bool ahead = T::kPlain;
  const typename T::Scores scores = s;
  float base[T::kRows];
  bool grows = false;
  ATTN_UNROLL
  for (int r = 0; r < T::kRows; r++) {
    base[r] = exponent(state.top[r]);
    grows |= (ahead ? s.lift(r, scale, base[r]) : multiply_add(best_of(r), scale, -base[r])) > kPatience;
  }
  if (any_lane(grows)) {
    float fade[T::kRows];
    s = scores;
    ATTN_UNROLL
    for (int r = 0; r < T::kRows; r++) {
      const float best = T::max_across(best_of(r));
      // Row by row, whatever its neighbours do: the bits of a row are its own.
      if (multiply_add(best, scale, -base[r]) > kPatience) state.top[r] = best;
      const float now = exponent(state.top[r]);
      fade[r] = T::exp2(base[r] - now);
      base[r] = now;
      if (ahead) s.lift(r, scale, now);
      state.sum[r] *= fade[r];
    }
    fade_out(fade);
  }
  ATTN_UNROLL
  for (int r = 0; r < T::kRows; r++) {
    if (!ahead) s.lift(r, scale, base[r]);
    state.sum[r] += s.weigh(r);
  }
}

// Sums of rows out of sums of lanes, once all steps are done.
template <class T>
ATTN_DEVICE void settle(RowState<T>& state) {
  ATTN_UNROLL
  for (int r = 0; r < T::kRows; r++) state.sum[r] = T::sum_across(state.sum[r]);
}

}  // namespace attn
