// What the GPU tile needs of a 32-lane NVIDIA warp: lanes, exchanges, panels in shared memory, and matrix fragments
// c[16][16] += a[16][16] b[16][16] as two m16n8k16 products. The names and meanings are those of fragment_amd.h.
#pragma once
#include "convert.h"

namespace attn {

constexpr int kWave = 32, kFragRows = 2, kFragCols = 4;
constexpr bool kHasAsyncCopy = true, kKeysFromGlobal = false, kLoadsAnywhere = false;
// Whether blocks can join what others wrote: there is one L2 cache.
constexpr bool kJoinsParts = true;
constexpr bool kSoftensPatiently = false;
constexpr bool kTakesTurns = true;
constexpr int kLeastMergeRows = 4;  // of a block of the merge kernel: the fewer, the more waves share a row's partials

struct alignas(16) Line {  // 16 bytes, eight elements
  uint32_t x[4];
};
using Shared = char*;
template <class T>
using SharedOf = T*;

// Parameters lie in memory that every instruction reads at no cost.
ATTN_DEVICE const AttendParams& argument_again(const AttendParams& p) { return p; }
constexpr bool kReadsItemAgain = false;
ATTN_DEVICE WorkItem item_again(const AttendParams&) { return {}; }  // not used
ATTN_DEVICE int thread_index() { return threadIdx.x; }
ATTN_DEVICE int block_index() { return blockIdx.x; }
ATTN_DEVICE int block_count() { return gridDim.x; }
ATTN_DEVICE int lane_index() { return threadIdx.x & 31; }
ATTN_DEVICE int64_t place_in(int64_t page, int64_t by_page, int64_t slot, int64_t by_slot, int size) {
  return (page * by_page + slot * by_slot) * size;
}
ATTN_DEVICE int wave_index() { return threadIdx.x >> 5; }
struct KeptWave {
  ATTN_MEMBER static int kept_wave() { return wave_index(); }
};
ATTN_DEVICE void barrier() { __syncthreads(); }
// A kernel that was launched as this one's follower may start once every block has said start_follower() or ended; all
// of its blocks wait in await_leader() until the leader is done and what it wrote is there.
ATTN_DEVICE void start_follower() { asm volatile("griddepcontrol.launch_dependents;"); }
ATTN_DEVICE void await_leader() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
ATTN_DEVICE void wave_barrier() { __syncwarp(); }
ATTN_DEVICE float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0,%1;" : "=f"(y) : "f"(x));
  return y;
}
ATTN_DEVICE float log2_fast(float x) { return __log2f(x); }
ATTN_DEVICE float greater(float a, float b) { return a > b ? a : b; }
ATTN_DEVICE float multiply_add(float a, float b, float c) { return __fmaf_rn(a, b, c); }
ATTN_DEVICE uint32_t high_product(uint32_t a, uint32_t b) { return __umulhi(a, b); }
template <class T>
ATTN_DEVICE T exchange(T x, int mask) { return __shfl_xor_sync(~0u, x, mask); }
template <class T>
ATTN_DEVICE T from_lane(T x, int lane) { return __shfl_sync(~0u, x, lane); }
ATTN_DEVICE bool any_lane(bool x) { return __any_sync(~0u, x); }
// Over the lanes that share a row of c.
ATTN_DEVICE float row_max(float x) {
  x = fmaxf(x, exchange(x, 1));
  return fmaxf(x, exchange(x, 2));
}
ATTN_DEVICE float row_sum(float x) {
  x += exchange(x, 1);
  return x + exchange(x, 2);
}

// Element types of the matrix unit.
struct F16 {
  static constexpr int kDType = kFloat16;
  ATTN_MEMBER static uint32_t pair(float low, float high) {
    uint32_t x;
    asm("cvt.rn.f16x2.f32 %0,%1,%2;" : "=r"(x) : "f"(high), "f"(low));
    return x;
  }
  ATTN_MEMBER static float widen(uint16_t x) { return half_to_float(x); }
  ATTN_MEMBER static uint32_t from_half_pair(uint32_t x) { return x; }
};
struct B16 {
  static constexpr int kDType = kBFloat16;
  ATTN_MEMBER static uint32_t pair(float low, float high) {
    uint32_t x;
    asm("cvt.rn.bf16x2.f32 %0,%1,%2;" : "=r"(x) : "f"(high), "f"(low));
    return x;
  }
  ATTN_MEMBER static float widen(uint16_t x) { return bf16_to_float(x); }
  ATTN_MEMBER static uint32_t from_half_pair(uint32_t x) {
    float low, high;
    asm("{.reg .f16 a,b; mov.b32 {a,b},%2; cvt.f32.f16 %0,a; cvt.f32.f16 %1,b;}" : "=f"(low), "=f"(high) : "r"(x));
    return pair(low, high);
  }
};

// Two fp8 values of a word, from its lower or upper half, as a pair of halves. Exact; NaN stays NaN. See fp8_half().
template <int T, bool Upper>
ATTN_DEVICE uint32_t fp8_half_pair(uint32_t word) {
  uint32_t pair;
  if constexpr (T == kFloat8E4M3FN) {
    asm("cvt.rn.f16x2.e4m3x2 %0,%1;" : "=r"(pair) : "h"(uint16_t(Upper ? word >> 16 : word)));
    return pair;
  }
  const uint32_t wide = __byte_perm(word, 0, Upper ? 0x3424 : 0x1404);
  if constexpr (T == kFloat8E5M2) return wide;
  const uint32_t half = (wide & 0x7f007f00) >> 1, sign = wide & 0x80008000;
  if constexpr (T == kFloat8E5M2FNUZ)
    pair = (half + __vmaxu2(half, 0x04000400) - 0x04000400) | sign;
  else
    asm("{.reg .b32 s; mov.b32 s,0x58005800; mul.rn.f16x2 %0,%1,s;}" : "=r"(pair) : "r"(half | sign));
  if ((wide & 0xffff) == 0x8000) pair = (pair & 0xffff0000) | 0x7e00;
  if ((wide >> 16) == 0x8000) pair = (pair & 0xffff) | 0x7e000000;
  return pair;
}

// Eight values (two words) of an fp8 type as a line of E.
template <class E, int T>
ATTN_DEVICE Line widen_line(uint32_t low, uint32_t high) {
  return {{E::from_half_pair(fp8_half_pair<T, false>(low)), E::from_half_pair(fp8_half_pair<T, true>(low)),
           E::from_half_pair(fp8_half_pair<T, false>(high)), E::from_half_pair(fp8_half_pair<T, true>(high))}};
}

struct FragC { float x[8]; };
using FragOut = FragC;
ATTN_DEVICE float* element_of(FragOut& c, int i) { return &c.x[i]; }
struct FragA { uint32_t x[4]; };
using FragB = FragA;

// Row and column of c that a lane's element (r, c) stands for.
ATTN_DEVICE int frag_row(int r) { return (lane_index() >> 2) + 8 * r; }
ATTN_DEVICE int frag_row_again(int r) { return frag_row(r); }
ATTN_DEVICE int frag_col(int c) { return (c >> 1) * 8 + (lane_index() & 3) * 2 + (c & 1); }
constexpr int kRun = 2;  // columns of c next to each other in a lane

template <class E>
ATTN_DEVICE void multiply(FragC& c, const FragA& a, const FragB& b) {
  ATTN_UNROLL
  for (int h = 0; h < 2; h++) {
    if constexpr (E::kDType == kBFloat16)
      asm volatile(
          "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
          : "+f"(c.x[h * 2]), "+f"(c.x[h * 2 + 1]), "+f"(c.x[4 + h * 2]), "+f"(c.x[4 + h * 2 + 1])
          : "r"(a.x[0]), "r"(a.x[1]), "r"(a.x[2]), "r"(a.x[3]), "r"(b.x[h * 2]), "r"(b.x[h * 2 + 1]));
    else
      asm volatile(
          "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
          : "+f"(c.x[h * 2]), "+f"(c.x[h * 2 + 1]), "+f"(c.x[4 + h * 2]), "+f"(c.x[4 + h * 2 + 1])
          : "r"(a.x[0]), "r"(a.x[1]), "r"(a.x[2]), "r"(a.x[3]), "r"(b.x[h * 2]), "r"(b.x[h * 2 + 1]));
  }
}

// A panel of rows of D elements in shared memory, in blocks of 8 rows x 8 lines. Lines of a row of a block are shuffled,
// so that reading a column of lines meets every bank.
template <int D>
struct RowPanel {
  static constexpr int kRowBytes = D * 2;
  ATTN_MEMBER static int at(int row, int line) {
    return (row >> 3) * (D * 16) + (line >> 3) * 1024 + (row & 7) * 128 + ((line ^ row) & 7) * 16;
  }
};

ATTN_DEVICE void read_matrices(uint32_t (&x)[4], Shared at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3},[%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(uint32_t(__cvta_generic_to_shared(at))));
}
ATTN_DEVICE void read_transposed(uint32_t (&x)[4], Shared at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3},[%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(uint32_t(__cvta_generic_to_shared(at))));
}

template <class E, int D, int Keys>
struct Fragments {
  static constexpr int kKeyDepth = 16, kValueDepth = 16;
  using Query = FragA;
  using Key = FragB;
  using Weights = FragA;
  using KeyPanel = RowPanel<D>;
  using ValuePanel = RowPanel<D>;
  static constexpr int kPanelBytes = Keys * KeyPanel::kRowBytes;

  // The line of a row of q that this lane reads for the k-th product, and the fragment that starts there.
  ATTN_MEMBER static int query_line(int k) { return k * 2 + (lane_index() >> 4); }
  ATTN_MEMBER static Query read_query(Shared panel, int row, int line) {
    Query q;
    read_matrices(q.x, panel + RowPanel<D>::at(row + (lane_index() & 15), line));
    return q;
  }

  // b[dim][key] of keys n * 16.. and dims k * 16.. .
  ATTN_MEMBER static FragB read_keys(Shared panel, int n, int k) {
    FragB b;
    const int lane = lane_index(), row = n * 16 + (lane & 7) + (lane >> 4) * 8;
    read_matrices(b.x, panel + KeyPanel::at(row, k * 2 + (lane >> 3 & 1)));
    return b;
  }
  // b[key][dim] of keys k * 16.. and dims n * 16.. .
  ATTN_MEMBER static FragB read_values(Shared panel, int k, int n) {
    FragB b;
    const int lane = lane_index();
    read_transposed(b.x, panel + ValuePanel::at(k * 16 + (lane & 15), n * 2 + (lane >> 4)));
    return b;
  }
  ATTN_MEMBER static Weights weights(const FragC* c) {
    return {{E::pair(c->x[0], c->x[1]), E::pair(c->x[4], c->x[5]), E::pair(c->x[2], c->x[3]),
             E::pair(c->x[6], c->x[7])}};
  }
  ATTN_MEMBER static void multiply(FragC& c, const FragA& a, const FragB& b) { attn::multiply<E>(c, a, b); }

  // Puts line `line` of `Rows` neighbouring rows into a panel.
  template <int Rows>
  ATTN_MEMBER static void put_keys(Shared panel, int row, int line, const Line (&x)[Rows]) {
    ATTN_UNROLL
    for (int i = 0; i < Rows; i++) *reinterpret_cast<Line*>(panel + KeyPanel::at(row + i, line)) = x[i];
  }
  template <int Rows>
  ATTN_MEMBER static void put_values(Shared panel, int row, int line, const Line (&x)[Rows]) {
    put_keys(panel, row, line, x);
  }
};

// From an address on 16 bytes.
ATTN_DEVICE Line load_line(const void* from) { return *static_cast<const Line*>(from); }
ATTN_DEVICE void store_line(void* to, const Line& x) { *static_cast<Line*>(to) = x; }
ATTN_DEVICE uint32_t load_word(const void* from) { return *static_cast<const uint32_t*>(from); }
// What other blocks wrote, and no one reads twice: past the L1 cache.
ATTN_DEVICE float load_partial(const float* from) { return __ldcg(from); }
ATTN_DEVICE void load_partials(float (&x)[1], const float* from) { x[0] = *from; }
ATTN_DEVICE void load_partials(float (&x)[2], const float* from) {
  const float2 y = __ldcg(reinterpret_cast<const float2*>(from));
  x[0] = y.x, x[1] = y.y;
}
ATTN_DEVICE void load_partials(float (&x)[4], const float* from) {
  const float4 y = __ldcg(reinterpret_cast<const float4*>(from));
  x[0] = y.x, x[1] = y.y, x[2] = y.z, x[3] = y.w;
}
template <int N>
ATTN_DEVICE void read_partials(float (&x)[N], Shared from) {
  struct alignas(4 * N) Some {
    float x[N];
  };
  const Some some = *reinterpret_cast<const Some*>(from);
  ATTN_UNROLL
  for (int i = 0; i < N; i++) x[i] = some.x[i];
}
// Counts to `most` and then anew from 0; returns what was counted before. What this thread knows to be written is
// there for who counts later.
ATTN_DEVICE uint32_t count_around(int32_t* at, uint32_t most) {
  uint32_t before;
  asm volatile("atom.acq_rel.gpu.global.inc.u32 %0,[%1],%2;" : "=r"(before) : "l"(at), "r"(most) : "memory");
  return before;
}
// The same, of what tells nothing about other memory.
ATTN_DEVICE uint32_t take_around(int32_t* at, uint32_t most) {
  uint32_t before;
  asm volatile("atom.relaxed.gpu.global.inc.u32 %0,[%1],%2;" : "=r"(before) : "l"(at), "r"(most));
  return before;
}
ATTN_DEVICE uint32_t read_word(Shared at) { return *reinterpret_cast<uint32_t*>(at); }
ATTN_DEVICE void write_word(Shared at, uint32_t x) { *reinterpret_cast<uint32_t*>(at) = x; }
ATTN_DEVICE uint16_t read_element(Shared at) { return *reinterpret_cast<uint16_t*>(at); }
ATTN_DEVICE void write_element(Shared at, uint16_t x) { *reinterpret_cast<uint16_t*>(at) = x; }

// Starts copying a line, or zeros, into shared memory; close_copies() ends a group, await_copies<N> waits until at
// most N groups are under way.
ATTN_DEVICE void copy_line(Shared to, const void* from, bool exists) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0],[%1],16,%2;"
               :
               : "r"(uint32_t(__cvta_generic_to_shared(to))), "l"(from), "r"(exists ? 16 : 0)
               : "memory");
}
ATTN_DEVICE void close_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N>
ATTN_DEVICE void await_copies() { asm volatile("cp.async.wait_group %0;" : : "n"(N) : "memory"); }

}  // namespace attn
