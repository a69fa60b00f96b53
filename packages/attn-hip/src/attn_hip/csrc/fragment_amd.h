// Matrix fragments of a 64-lane wave on CDNA3 and CDNA4: c[16][16] += a[16][kStep] b[kStep][16] in bfloat16.
//
// The matrix instruction gets its operands swapped. Each lane then owns one row of c, so a softmax needs two
// exchanges between lanes, and weights become the next product's operand without leaving their registers.
#pragma once
#include "portability.h"

namespace attn {

constexpr int kWave = 64, kFragRows = 1, kFragCols = 4;
#if defined(__gfx950__)
constexpr int kStep = 32;
#else
constexpr int kStep = 16;
#endif

typedef __attribute__((ext_vector_type(4))) short Short4;
typedef __attribute__((ext_vector_type(8))) __bf16 BFloat8;
typedef __attribute__((ext_vector_type(4))) float Float4;
typedef __attribute__((ext_vector_type(4))) uint32_t Line;  // 16 bytes
typedef __attribute__((address_space(3))) uint16_t* Shared;

ATTN_DEVICE int thread_index() { return __builtin_amdgcn_workitem_id_x(); }
ATTN_DEVICE int block_index() { return __builtin_amdgcn_workgroup_id_x(); }
ATTN_DEVICE int lane_index() { return thread_index() & 63; }
ATTN_DEVICE int wave_index() { return __builtin_amdgcn_readfirstlane(thread_index() >> 6); }
ATTN_DEVICE void barrier() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}
ATTN_DEVICE float exp2_fast(float x) { return __builtin_amdgcn_exp2f(x); }
ATTN_DEVICE float log2_fast(float x) { return __builtin_amdgcn_logf(x); }
ATTN_DEVICE float exchange(float x, int mask) {
  return bits_as<float>(__builtin_amdgcn_ds_bpermute((lane_index() ^ mask) << 2, bits_as<int>(x)));
}
ATTN_DEVICE float row_max(float x) {
  x = __builtin_fmaxf(x, exchange(x, 16));
  return __builtin_fmaxf(x, exchange(x, 32));
}
ATTN_DEVICE float row_sum(float x) {
  x += exchange(x, 16);
  return x + exchange(x, 32);
}
ATTN_DEVICE uint16_t round_bf16(float x) { return bits_as<uint16_t>(__bf16(x)); }

struct FragC { float x[4]; };
struct alignas(16) FragA { uint16_t x[kStep / 4]; };
using FragB = FragA;

// Row and column of c that a lane's element (r, c) stands for, and the row of a that it loads.
ATTN_DEVICE int frag_row(int) { return lane_index() & 15; }
ATTN_DEVICE int frag_col(int c) { return (lane_index() >> 4) * 4 + c; }

ATTN_DEVICE void multiply(FragC& c, const FragA& a, const FragB& b) {
  Float4 sum = {c.x[0], c.x[1], c.x[2], c.x[3]};
#if defined(__gfx950__)
  sum = __builtin_amdgcn_mfma_f32_16x16x32_bf16(bits_as<BFloat8>(b), bits_as<BFloat8>(a), sum, 0, 0, 0);
#else
  Short4 left, right;
  __builtin_memcpy(&left, b.x, sizeof(left));
  __builtin_memcpy(&right, a.x, sizeof(right));
  sum = __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(left, right, sum, 0, 0, 0);
#endif
  for (int i = 0; i < 4; i++) c.x[i] = sum[i];
}

// Step k of a, from the global row that frag_row names.
ATTN_DEVICE void load_a(FragA& a, const uint16_t* const (&row)[kFragRows], int k) {
  const uint16_t* at = row[0] + k * kStep + (lane_index() >> 4) * (kStep / 4);
  __builtin_memcpy(a.x, at, sizeof(uint16_t) * (kStep / 4));
}

// b[k][n] = key n, dim k; keys row by row in shared memory, `pitch` apart.
ATTN_DEVICE void load_keys(FragB& b, Shared keys, int pitch, int n, int k) {
  const Shared at = keys + (n * 16 + (lane_index() & 15)) * pitch + k * kStep + (lane_index() >> 4) * (kStep / 4);
  ATTN_UNROLL
  for (int i = 0; i < kStep / 4; i++) b.x[i] = at[i];
}

// b[k][n] = value k, dim n; the order of keys is the one that to_a leaves them in.
ATTN_DEVICE void load_values(FragB& b, Shared values, int pitch, int k, int n) {
  ATTN_UNROLL
  for (int i = 0; i < kStep / 4; i++) {
    const int key = k * kStep + (i >> 2) * 16 + (lane_index() >> 4) * 4 + (i & 3);
    b.x[i] = values[key * pitch + n * 16 + (lane_index() & 15)];
  }
}

ATTN_DEVICE void to_a(FragA& a, const FragC* c) {
  ATTN_UNROLL
  for (int t = 0; t < kStep / 16; t++) {
    ATTN_UNROLL
    for (int i = 0; i < 4; i++) a.x[t * 4 + i] = round_bf16(c[t].x[i]);
  }
}

ATTN_DEVICE void store_line(Shared to, Line line) { *(__attribute__((address_space(3))) Line*)to = line; }
ATTN_DEVICE Line load_line(const uint16_t* from) {
  Line line;  // heads need not start on 16 bytes
  __builtin_memcpy(&line, from, sizeof(line));
  return line;
}
ATTN_DEVICE Line zero_line() { return Line{0, 0, 0, 0}; }

}  // namespace attn
