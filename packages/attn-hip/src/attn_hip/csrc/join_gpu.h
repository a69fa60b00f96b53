// Joins what the key groups of a block found for the same rows. Every group puts its share into shared memory; then a
// wave takes a row of all groups, its lanes side by side along the dims.
#pragma once
#include "stage_gpu.h"

namespace attn {

template <int D, int Rows, int Groups>
class RowJoin {
 public:
  static constexpr int kBytes = Groups * Rows * (D + 2) * 4;
  static constexpr int kEach = D < kWave ? 1 : D / kWave;  // neighbouring dims of a lane

  ATTN_MEMBER explicit RowJoin(Shared memory) : memory_(memory) {}

  ATTN_MEMBER void put(int group, int row, int dim, const float* x) const {
    Some<kRun> some;
    ATTN_UNROLL
    for (int i = 0; i < kRun; i++) some.x[i] = x[i];
    *(SharedOf<Some<kRun>>)dims_at(group, row, dim) = some;
  }
  ATTN_MEMBER void put_state(int group, int row, float top, float sum) const {
    *(SharedOf<Some<2>>)state_at(group, row) = {{top, sum}};
  }

  // The row over all groups: `out` of this lane's dims. `scale` joins the exponent.
  template <class T>
  ATTN_MEMBER void take(int row, float scale, float& top, float& sum, float (&out)[kEach]) const {
    float tops[Groups], sums[Groups];
    top = -kInfinity, sum = 0.f;
    ATTN_UNROLL
    for (int g = 0; g < Groups; g++) {
      const Some<2> state = *(SharedOf<Some<2>>)state_at(g, row);
      tops[g] = state.x[0], sums[g] = state.x[1];
      top = T::max(top, tops[g]);
    }
    const float base = top == -kInfinity ? 0.f : top;
    ATTN_UNROLL
    for (int i = 0; i < kEach; i++) out[i] = 0.f;
    ATTN_UNROLL
    for (int g = 0; g < Groups; g++) {
      const float by = T::exp2_scaled(tops[g], base, scale);
      sum += sums[g] * by;
      ATTN_UNROLL
      for (int i = 0; i < kEach; i += kSome) {
        const Some<kSome> x = *(SharedOf<Some<kSome>>)dims_at(g, row, lane_index() * kEach + i);
        ATTN_UNROLL
        for (int j = 0; j < kSome; j++) out[i + j] = multiply_add(x.x[j], by, out[i + j]);
      }
    }
  }

 private:
  static constexpr int kSome = kEach < 4 ? kEach : 4;
  template <int N>
  struct alignas(4 * N) Some {
    float x[N];
  };
  // Rows next to each other are shuffled in eights, so that lanes of a fragment meet every bank.
  ATTN_MEMBER Shared dims_at(int group, int row, int dim) const {
    return memory_ + ((group * Rows + row) * D + (dim ^ (row & 3) * 8)) * 4;
  }
  ATTN_MEMBER Shared state_at(int group, int row) const {
    return memory_ + (Groups * Rows * D + (group * Rows + row) * 2) * 4;
  }
  Shared memory_;
};

}  // namespace attn
