// How a lane writes neighbouring elements of an output row: kRun of them at once, or one.
#pragma once
#include "rows.h"
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

// Writes N neighbouring dims of a row from dim `first` on, of which those behind `dims` do not exist.
template <class O, int N>
ATTN_DEVICE void write_dims_as(char* row, int first, int dims, const float (&x)[N]) {
  char* to = row + first * Output<O>::kSize;
  if (N % kRun == 0 && first + N <= dims && reinterpret_cast<uint64_t>(to) % (kRun * Output<O>::kSize) == 0) {
    ATTN_UNROLL
    for (int i = 0; i + kRun <= N; i += kRun) {
      float run[kRun];
      ATTN_UNROLL
      for (int j = 0; j < kRun; j++) run[j] = x[i + j];
      Output<O>::write(to + i * Output<O>::kSize, run);
    }
  } else {
    ATTN_UNROLL
    for (int i = 0; i < N; i++)
      if (first + i < dims) Output<O>::write_one(to + i * Output<O>::kSize, x[i]);
  }
}
template <int N>
ATTN_DEVICE void write_dims(const Sink& sink, int first, int dims, const float (&x)[N]) {
  char* row = static_cast<char*>(sink.out);
  switch (sink.dtype) {
    case kFloat32: write_dims_as<float>(row + sink.offset * 4, first, dims, x); break;
    case kFloat16: write_dims_as<F16>(row + sink.offset * 2, first, dims, x); break;
    default: write_dims_as<B16>(row + sink.offset * 2, first, dims, x);
  }
}

}  // namespace attn
