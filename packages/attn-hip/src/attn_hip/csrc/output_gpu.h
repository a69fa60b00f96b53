// How a lane writes neighbouring elements of an output row: kRun of them at once, or one.
#pragma once
#if ATTN_AMD
#include "fragment_amd.h"
#else
#include "fragment_nvidia.h"
#endif

namespace attn {

template <class O>
struct Output {  // O: F16 or B16
  static constexpr int kSize = 2;
  ATTN_MEMBER static void write(char* to, const float (&x)[kRun]) {
    ATTN_UNROLL
    for (int i = 0; i < kRun; i += 2) write_pair(to + 2 * i, O::pair(x[i], x[i + 1]));
  }
  ATTN_MEMBER static void write_one(char* to, float x) {
    *global(reinterpret_cast<uint16_t*>(to)) = uint16_t(O::pair(x, 0.f));
  }

 private:
  ATTN_MEMBER static void write_pair(char* to, uint32_t x) { *global(reinterpret_cast<uint32_t*>(to)) = x; }
};

template <>
struct Output<float> {
  static constexpr int kSize = 4;
  ATTN_MEMBER static void write(char* to, const float (&x)[kRun]) {
    struct alignas(4 * kRun) Run {
      float x[kRun];
    } run;
    ATTN_UNROLL
    for (int i = 0; i < kRun; i++) run.x[i] = x[i];
    *reinterpret_cast<Run*>(to) = run;
  }
  ATTN_MEMBER static void write_one(char* to, float x) { *global(reinterpret_cast<float*>(to)) = x; }
};

}  // namespace attn
