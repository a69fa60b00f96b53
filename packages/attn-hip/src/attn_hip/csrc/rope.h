// Rotary embedding, llama style: element i of the first half of a head turns with element i of the second.
#pragma once
#include "portability.h"

namespace attn {

// Fraction of a turn in [-1/2, 1/2] by which pair i is rotated at `position`. In double: a float would lose the
// fraction at long positions.
ATTN_DEVICE float turn_of(double turns_per_token, int position) {
  const double turns = turns_per_token * position;
  const double whole = (turns + 0x1.8p52) - 0x1.8p52;
  return float(turns - whole);
}

// sin(2 pi x) for |x| <= 1/4, absolute error below 1e-7.
ATTN_DEVICE float sin_quarter(float x) {
  const float z = x * x;
  float p = -15.0946426f;
  p = p * z + 42.0586939f;
  p = p * z - 76.7058597f;
  p = p * z + 81.6052493f;
  p = p * z - 41.3417022f;
  p = p * z + 6.28318531f;
  return p * x;
}

ATTN_DEVICE float sin_turn(float x) {  // |x| <= 1/2
  const float folded = x > 0.25f ? 0.5f - x : (x < -0.25f ? -0.5f - x : x);
  return sin_quarter(folded);
}
ATTN_DEVICE float cos_turn(float x) { return sin_quarter(0.25f - (x < 0.f ? -x : x)); }

#if ATTN_CPU
// cos and sin of every pair at one position, [half] each.
static inline void rotation(const double* turns, int position, int half, float* cosine, float* sine) {
  for (int i = 0; i < half; i++) {
    const float x = turn_of(turns[i], position);
    cosine[i] = cos_turn(x);
    sine[i] = sin_turn(x);
  }
}

static inline void rotate(float* row, const float* cosine, const float* sine, int half) {
  for (int i = 0; i < half; i++) {
    const float low = row[i], high = row[half + i];
    row[i] = low * cosine[i] - high * sine[i];
    row[half + i] = high * cosine[i] + low * sine[i];
  }
}
#endif

}  // namespace attn
