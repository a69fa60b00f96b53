// Matrix fragments of a 32-lane warp: c[16][16] += a[16][16] b[16][16] in bfloat16, as two m16n8k16 products. The
// names and meanings are those of fragment_amd.h.
#pragma once
#include <cuda_bf16.h>

#include "portability.h"

namespace attn {

constexpr int kWave = 32, kFragRows = 2, kFragCols = 4, kStep = 16;

using Line = uint4;  // 16 bytes
using Shared = uint16_t*;

ATTN_DEVICE int thread_index() { return threadIdx.x; }
ATTN_DEVICE int block_index() { return blockIdx.x; }
ATTN_DEVICE int lane_index() { return threadIdx.x & 31; }
ATTN_DEVICE int wave_index() { return threadIdx.x >> 5; }
ATTN_DEVICE void barrier() { __syncthreads(); }
ATTN_DEVICE float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0,%1;" : "=f"(y) : "f"(x));
  return y;
}
ATTN_DEVICE float log2_fast(float x) { return __log2f(x); }
ATTN_DEVICE float exchange(float x, int mask) { return __shfl_xor_sync(~0u, x, mask); }
ATTN_DEVICE float row_max(float x) {
  x = fmaxf(x, exchange(x, 1));
  return fmaxf(x, exchange(x, 2));
}
ATTN_DEVICE float row_sum(float x) {
  x += exchange(x, 1);
  return x + exchange(x, 2);
}
ATTN_DEVICE uint32_t round_pair(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0,%1,%2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

struct FragC { float x[8]; };
struct FragA { uint32_t x[4]; };
using FragB = FragA;

ATTN_DEVICE int frag_row(int r) { return (lane_index() >> 2) + 8 * r; }
ATTN_DEVICE int frag_col(int c) { return (c >> 1) * 8 + (lane_index() & 3) * 2 + (c & 1); }

ATTN_DEVICE void multiply(FragC& c, const FragA& a, const FragB& b) {
  ATTN_UNROLL
  for (int h = 0; h < 2; h++)
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
        : "+f"(c.x[h * 2]), "+f"(c.x[h * 2 + 1]), "+f"(c.x[4 + h * 2]), "+f"(c.x[4 + h * 2 + 1])
        : "r"(a.x[0]), "r"(a.x[1]), "r"(a.x[2]), "r"(a.x[3]), "r"(b.x[h * 2]), "r"(b.x[h * 2 + 1]));
}

ATTN_DEVICE void load_a(FragA& a, const uint16_t* const (&row)[kFragRows], int k) {
  const int at = k * kStep + 2 * (lane_index() & 3);
  ATTN_UNROLL
  for (int i = 0; i < 4; i++) __builtin_memcpy(&a.x[i], row[i & 1] + at + (i >> 1) * 8, 4);
}

ATTN_DEVICE void load_keys(FragB& b, Shared keys, int pitch, int n, int k) {
  ATTN_UNROLL
  for (int h = 0; h < 2; h++) {
    const uint16_t* at = keys + (n * 16 + h * 8 + (lane_index() >> 2)) * pitch + k * kStep + 2 * (lane_index() & 3);
    b.x[h * 2] = *reinterpret_cast<const uint32_t*>(at);
    b.x[h * 2 + 1] = *reinterpret_cast<const uint32_t*>(at + 8);
  }
}

ATTN_DEVICE void load_values(FragB& b, Shared values, int pitch, int k, int n) {
  const uint16_t* at = values + (k * kStep + (lane_index() & 15)) * pitch + n * 16 + (lane_index() >> 4) * 8;
  const uint32_t address = uint32_t(__cvta_generic_to_shared(at));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3},[%4];"
               : "=r"(b.x[0]), "=r"(b.x[1]), "=r"(b.x[2]), "=r"(b.x[3])
               : "r"(address));
}

ATTN_DEVICE void to_a(FragA& a, const FragC* c) {
  a.x[0] = round_pair(c->x[0], c->x[1]);
  a.x[1] = round_pair(c->x[4], c->x[5]);
  a.x[2] = round_pair(c->x[2], c->x[3]);
  a.x[3] = round_pair(c->x[6], c->x[7]);
}

ATTN_DEVICE void store_line(Shared to, Line line) { *reinterpret_cast<Line*>(to) = line; }
ATTN_DEVICE Line load_line(const uint16_t* from) { return *reinterpret_cast<const Line*>(from); }
ATTN_DEVICE Line zero_line() { return make_uint4(0, 0, 0, 0); }

}  // namespace attn
