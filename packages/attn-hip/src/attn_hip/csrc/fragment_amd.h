// What the GPU tile needs of a 64-lane wave on CDNA3 and CDNA4: lanes, exchanges, panels in shared memory, and matrix
// fragments c[16][16] += a[16][depth] b[depth][16].
//
// The matrix instruction gets its operands swapped. Each lane then owns one row of c, so a softmax needs two
// exchanges between lanes, and weights become the next product's operand without leaving their registers.
#pragma once
#include "element_amd.h"

namespace attn {

constexpr int kWave = 64, kFragRows = 1, kFragCols = 4;
constexpr bool kHasAsyncCopy = false, kKeysFromGlobal = true, kLoadsAnywhere = true;
constexpr bool kJoinsParts = false;  // every chiplet has an L2 cache of its own
constexpr bool kSoftensPatiently = true;  // see softmax.h
constexpr bool kTakesTurns = false;
constexpr int kLeastMergeRows = 16;
#if defined(__gfx950__)
constexpr bool kDeep = true;  // products of depth 32
#else
constexpr bool kDeep = false;
#endif

typedef __attribute__((address_space(3))) char* Shared;
template <class T>
using SharedOf = __attribute__((address_space(3))) T*;

// The kernel's argument, of which AttendParams is the front, as the compiler has not seen it yet.
ATTN_DEVICE const AttendParams& argument_again(const AttendParams&) {
  auto* at = (const __attribute__((address_space(4))) AttendParams*)__builtin_amdgcn_kernarg_segment_ptr();
  asm volatile("" : "+s"(at));  // never merged with another
  return *(const AttendParams*)at;
}
ATTN_DEVICE int thread_index() { return __builtin_amdgcn_workitem_id_x(); }
ATTN_DEVICE int block_index() { return __builtin_amdgcn_workgroup_id_x(); }
ATTN_DEVICE int block_count() { return 0; }  // not used
// The block's work item, likewise.
constexpr bool kReadsItemAgain = true;
ATTN_DEVICE WorkItem item_again(const AttendParams& p) {
  int block = block_index();
  asm volatile("" : "+s"(block));
  return reinterpret_cast<const AttendLaunch&>(argument_again(p)).items[block];
}
ATTN_DEVICE int lane_index() { return thread_index() & 63; }
ATTN_DEVICE int wave_index() { return __builtin_amdgcn_readfirstlane(thread_index() >> 6); }
// The wave's index, asked for once: the compiler takes each question for a new one.
struct KeptWave {
  int index = wave_index();
  ATTN_MEMBER int kept_wave() const { return index; }
};
ATTN_DEVICE void barrier() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup", "local");
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup", "local");
}
// Shared memory serves a wave's accesses in order; only the compiler may not move them.
ATTN_DEVICE void wave_barrier() {
  __builtin_amdgcn_fence(__ATOMIC_ACQ_REL, "wavefront");
  __builtin_amdgcn_wave_barrier();
}
ATTN_DEVICE float exp2_fast(float x) { return __builtin_amdgcn_exp2f(x); }
ATTN_DEVICE float log2_fast(float x) { return __builtin_amdgcn_logf(x); }
// The greater of two, in one instruction: a comparison or __builtin_fmaxf would cost two for the sake of NaNs.
ATTN_DEVICE float greater(float a, float b) { return __builtin_amdgcn_fmed3f(a, b, kInfinity); }
ATTN_DEVICE float multiply_add(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
// (page * by_page + slot * by_slot) * size in bytes. Nothing is negative. Two instructions where strides have 32 bits,
// as all lanes know.
ATTN_DEVICE int64_t place_in(int page, int64_t by_page, int slot, int64_t by_slot, int size) {
  by_page *= size, by_slot *= size;
  uint32_t high = uint32_t((by_page | by_slot) >> 32);
  asm volatile("" : "+s"(high));  // a scalar's question
  if (high == 0)
    return int64_t(uint64_t(uint32_t(page)) * uint32_t(by_page) + uint64_t(uint32_t(slot)) * uint32_t(by_slot));
  asm volatile("" : "+v"(page), "+v"(slot));  // else both are worked out
  return page * by_page + slot * by_slot;
}
ATTN_DEVICE uint32_t high_product(uint32_t a, uint32_t b) { return uint32_t((uint64_t(a) * b) >> 32); }
template <class T>
ATTN_DEVICE T from_lane(T x, int lane) {
  if constexpr (sizeof(T) == 4) {
    return bits_as<T>(__builtin_amdgcn_ds_bpermute(lane << 2, bits_as<int>(x)));
  } else {
    const Words2 w = bits_as<Words2>(x);
    const Words2 got = {from_lane(w.x, lane), from_lane(w.y, lane)};
    return bits_as<T>(got);
  }
}
// The lane's index, as the compiler has not seen it yet: what depends on it is computed where it is needed, be it seldom,
// and holds no registers until then.
ATTN_DEVICE int lane_again() {
  int lane = lane_index();
  asm volatile("" : "+v"(lane));
  return lane;
}
template <class T>
ATTN_DEVICE T exchange(T x, int mask) { return from_lane(x, lane_again() ^ mask); }
ATTN_DEVICE bool any_lane(bool x) { return __builtin_amdgcn_ballot_w64(x) != 0; }
// Over the lanes that share a row of c.
ATTN_DEVICE float row_max(float x) {
  x = __builtin_fmaxf(x, exchange(x, 16));
  return __builtin_fmaxf(x, exchange(x, 32));
}
ATTN_DEVICE float row_sum(float x) {
  x += exchange(x, 16);
  return x + exchange(x, 32);
}

struct FragC { float x[4]; };
struct FragOut { Float4 x; };  // the same as one register of four, for what lives from step to step
ATTN_DEVICE float* element_of(FragOut& c, int i) { return reinterpret_cast<float*>(&c) + i; }

// Scores of a row become exponents score * scale - base; returns the greatest of this lane's. A product that was added to
// is no signalling NaN, so that the compiler takes maxima of three without a question.
template <int N>
ATTN_DEVICE float lift_row(FragC (&c)[N], float scale, float base) {
  float best = -kInfinity;
  ATTN_UNROLL
  for (int i = 0; i < N; i++) {
    const Float2 by = {scale, scale}, less = {-base, -base};
    float* x = c[i].x;
    const Float2 low = __builtin_elementwise_fma(Float2{x[0], x[1]}, by, less);
    const Float2 high = __builtin_elementwise_fma(Float2{x[2], x[3]}, by, less);
    x[0] = low.x, x[1] = low.y, x[2] = high.x, x[3] = high.y;
    best = __builtin_fmaxf(__builtin_fmaxf(best, low.x), low.y);
    best = __builtin_fmaxf(__builtin_fmaxf(best, high.x), high.y);
  }
  return best;
}
// Exponents of a row become weights 2^exponent; returns the sum of this lane's. In pairs, as instructions go.
template <int N>
ATTN_DEVICE float weigh_row(FragC (&c)[N]) {
  Float2 sum = {0.f, 0.f};
  ATTN_UNROLL
  for (int i = 0; i < N; i++) {
    float* x = c[i].x;
    const Float2 low = {exp2_fast(x[0]), exp2_fast(x[1])}, high = {exp2_fast(x[2]), exp2_fast(x[3])};
    x[0] = low.x, x[1] = low.y, x[2] = high.x, x[3] = high.y;
    sum += low;
    sum += high;
  }
  return sum.x + sum.y;
}
template <int N>
struct alignas(2 * N) Frag {  // N elements of one row of a, or one column of b
  uint32_t x[N / 2];
};

// Row and column of c that a lane's element (r, c) stands for.
ATTN_DEVICE int frag_row(int) { return lane_index() & 15; }
ATTN_DEVICE int frag_row_again(int) { return lane_again() & 15; }
ATTN_DEVICE int frag_col(int c) { return (lane_index() >> 4) * 4 + c; }
constexpr int kRun = 4;  // columns of c next to each other in a lane

template <class E, class C>
ATTN_DEVICE void multiply(C& c, Words2 a, Words2 b) {
  Float4 sum = bits_as<Float4>(c);
  if constexpr (E::kDType == kBFloat16)
    sum = __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(bits_as<Short4>(b), bits_as<Short4>(a), sum, 0, 0, 0);
  else
    sum = __builtin_amdgcn_mfma_f32_16x16x16f16(bits_as<Half4>(b), bits_as<Half4>(a), sum, 0, 0, 0);
  c = bits_as<C>(sum);
}
template <class E, class C>
ATTN_DEVICE void multiply(C& c, const Frag<4>& a, const Frag<4>& b) {
  multiply<E>(c, Words2{a.x[0], a.x[1]}, Words2{b.x[0], b.x[1]});
}
template <class E, class C>
ATTN_DEVICE void multiply(C& c, const Frag<8>& a, const Frag<8>& b) {
#if defined(__gfx950__)
  Float4 sum = bits_as<Float4>(c);
  if constexpr (E::kDType == kBFloat16)
    sum = __builtin_amdgcn_mfma_f32_16x16x32_bf16(bits_as<BFloat8>(b), bits_as<BFloat8>(a), sum, 0, 0, 0);
  else
    sum = __builtin_amdgcn_mfma_f32_16x16x32_f16(bits_as<Half8>(b), bits_as<Half8>(a), sum, 0, 0, 0);
  c = bits_as<C>(sum);
#else
  multiply<E>(c, Words2{a.x[0], a.x[1]}, Words2{b.x[0], b.x[1]});
  multiply<E>(c, Words2{a.x[2], a.x[3]}, Words2{b.x[2], b.x[3]});
#endif
}

#if defined(__gfx950__)
// Keys and values in shared memory, row by row. There is room for gaps: 32 bytes behind a row let accesses meet every
// bank (64 for reads, 32 for writes) with few registers of addresses. A read takes two lines next to each other of eight
// rows, a write eight lines of a row, or every other of sixteen, for the sake of which lines change places by pairs.
template <int D>
struct RowPanel {
  static constexpr int kRowBytes = D * 2 + 32;
  ATTN_MEMBER static int at(int row, int line) {
    return row * kRowBytes + (line ^ ((D == 64 ? row : line >> 3) & 1)) * 16;
  }
};
#else
// Keys in shared memory, row by row. Lines of a row are shuffled so that accesses meet every bank: a 128-bit read takes
// four rows of one line and four of the next at a time, a write eight lines of a row, or every other of sixteen.
template <int D>
struct RowPanel {
  static constexpr int kRowBytes = D * 2;
  ATTN_MEMBER static int at(int row, int line) {
    const int mix = D == 64 ? row & 7 : (row & 7) * 2 ^ (line >> 3 & 1);
    return (row * (D / 8) + (line ^ mix)) * 16;
  }
};

// Values in shared memory, four keys of a dim side by side: what a product of weights and values reads at once. Sixteen
// dims of four keys are a row of 128 bytes. A read takes such a row; a write dims that are eight or sixteen apart. The shuffle of a row's places lets both meet every bank (but for writes of fp8 values of 256 dims,
// which meet half of them: a fourth bit of `sixteen` would take eight more registers of addresses).
template <int D, int Keys>
struct ColumnPanel {
  // Dim n * 8 + d.
  ATTN_MEMBER static int at(int key, int n, int d) {
    const int sixteen = n >> 1, four = key >> 2;
    const int place = ((n & 1) * 8 + d) ^ (sixteen & 7) ^ (four & 1) * 12;
    return ((sixteen * (Keys / 4) + four) * 16 + place) * 8 + (key & 3) * 2;
  }
};
#endif

template <class E, int D, int Keys>
struct Fragments {
  static constexpr int kKeyDepth = 32, kValueDepth = kDeep && Keys % 32 == 0 ? 32 : 16;
  using Query = Frag<8>;
  using Key = Frag<8>;
  using Weights = Frag<kValueDepth / 4>;
  using KeyPanel = RowPanel<D>;
#if !defined(__gfx950__)
  using Values = ColumnPanel<D, Keys>;
#endif
  static constexpr int kPanelBytes = Keys * KeyPanel::kRowBytes;

  // The line of a row of q that this lane reads for the k-th product, and the fragment that is there.
  ATTN_MEMBER static int query_line(int k) { return k * 4 + (lane_index() >> 4); }
  ATTN_MEMBER static Query read_query(Shared panel, int row, int line) {
    return bits_as<Query>(*(SharedOf<Words4>)(panel + KeyPanel::at(row + (lane_index() & 15), line)));
  }

  // b[dim][key] of keys n * 16.. and dims k * 32.. .
  ATTN_MEMBER static Key read_keys(Shared panel, int n, int k) {
    const int lane = lane_index();
    const auto at = (SharedOf<Words4>)(panel + KeyPanel::at(n * 16 + (lane & 15), k * 4 + (lane >> 4)));
    return bits_as<Key>(*at);
  }
  // b[key][dim] of keys k * depth.. and dims n * 16..; keys in the order that weights() leaves them in.
  ATTN_MEMBER static Weights read_values(Shared panel, int k, int n) {
    Weights b;
    const int lane = lane_index();
    ATTN_UNROLL
    for (int t = 0; t < kValueDepth / 16; t++) {
      const int key = k * kValueDepth + t * 16 + (lane >> 4) * 4;
#if defined(__gfx950__)
      // Sixteen lanes read four keys of sixteen dims: four lanes a key. Each gets four keys of a dim.
      const Shared at = panel + KeyPanel::at(key + (lane >> 2 & 3), n * 2 + (lane >> 1 & 1)) + (lane & 1) * 8;
      const Words2 words = bits_as<Words2>(__builtin_amdgcn_ds_read_tr16_b64_v4i16((SharedOf<Short4>)at));
#else
      const Words2 words = *(SharedOf<Words2>)(panel + Values::at(key, n * 2 + (lane >> 3 & 1), lane & 7));
#endif
      b.x[t * 2] = words.x, b.x[t * 2 + 1] = words.y;
    }
    return b;
  }
  ATTN_MEMBER static Weights weights(const FragC* c) {
    Weights a;
    ATTN_UNROLL
    for (int i = 0; i < kValueDepth / 8; i++) a.x[i] = E::pair(c[i / 2].x[i % 2 * 2], c[i / 2].x[i % 2 * 2 + 1]);
    return a;
  }
  template <class C, class A>
  ATTN_MEMBER static void multiply(C& c, const A& a, const A& b) { attn::multiply<E>(c, a, b); }

  // Puts line `line` of `Rows` neighbouring rows into a panel.
  template <int Rows>
  ATTN_MEMBER static void put_keys(Shared panel, int row, int line, const Line (&x)[Rows]) {
    ATTN_UNROLL
    for (int i = 0; i < Rows; i++) *(SharedOf<Words4>)(panel + KeyPanel::at(row + i, line)) = bits_as<Words4>(x[i]);
  }
  template <int Rows>
  ATTN_MEMBER static void put_values(Shared panel, int row, int line, const Line (&x)[Rows]) {
#if defined(__gfx950__)
    put_keys(panel, row, line, x);
#else
    constexpr int group = Rows < 4 ? Rows : 4;
    ATTN_UNROLL
    for (int g = 0; g < Rows; g += group) {
      int first = Values::at(row + g, line, 0);
      if constexpr (Keys == 16 && D > 64) asm volatile("" : "+v"(first));  // eight places would hold as many registers
      ATTN_UNROLL
      for (int d = 0; d < 8; d++) {
        const Shared at = panel + (first ^ d * 8);
        const uint32_t half = d & 1 ? 0x07060302 : 0x05040100;  // of a word of two rows
        const auto both = [&](int i) { return __builtin_amdgcn_perm(x[i + 1].x[d >> 1], x[i].x[d >> 1], half); };
        if constexpr (group == 4) *(SharedOf<Words2>)at = Words2{both(g), both(g + 2)};
        else if constexpr (group == 2) *(SharedOf<uint32_t>)at = both(g);
        else *(SharedOf<uint16_t>)at = uint16_t(d & 1 ? x[g].x[d >> 1] >> 16 : x[g].x[d >> 1]);
      }
    }
#endif
  }
};

// From any address.
ATTN_DEVICE Line load_line(const void* from) {
  typedef __attribute__((ext_vector_type(4), aligned(1))) uint32_t Anywhere;
  return bits_as<Line>(Words4(*global(static_cast<const Anywhere*>(from))));
}
ATTN_DEVICE void store_line(void* to, const Line& x) { *global(static_cast<Words4*>(to)) = bits_as<Words4>(x); }
ATTN_DEVICE uint32_t load_word(const void* from) {
  typedef __attribute__((aligned(1))) uint32_t Anywhere;
  return *global(static_cast<const Anywhere*>(from));
}
ATTN_DEVICE float load_partial(const float* from) { return *global(from); }
template <int N>
ATTN_DEVICE void load_partials(float (&x)[N], const float* from) {
  ATTN_UNROLL
  for (int i = 0; i < N; i++) x[i] = global(from)[i];
}
template <int N>
ATTN_DEVICE void read_partials(float (&)[N], Shared) {}  // not used
ATTN_DEVICE void start_follower() {}  // a kernel starts when the one before it is done
ATTN_DEVICE void await_leader() {}
ATTN_DEVICE uint32_t count_around(int32_t*, uint32_t) { return 0; }  // neither is used
ATTN_DEVICE uint32_t take_around(int32_t*, uint32_t) { return 0; }
ATTN_DEVICE uint32_t read_word(Shared at) { return *(SharedOf<uint32_t>)at; }
ATTN_DEVICE void write_word(Shared at, uint32_t x) { *(SharedOf<uint32_t>)at = x; }
ATTN_DEVICE uint16_t read_element(Shared at) { return *(SharedOf<uint16_t>)at; }
ATTN_DEVICE void write_element(Shared at, uint16_t x) { *(SharedOf<uint16_t>)at = x; }

// There are no copies that the tile would have to wait for: it keeps lines in registers on their way.
ATTN_DEVICE void copy_line(Shared, const void*, bool) {}
ATTN_DEVICE void close_copies() {}
template <int N>
ATTN_DEVICE void await_copies() {}

}  // namespace attn
