// CPU vectors: W floats or ints side by side, on the compiler's own vector types. Intrinsics appear only where the
// compiler would not find the instruction by itself.
#pragma once
#include "convert.h"

namespace attn {

template <int W>
struct Vec {
  typedef float F __attribute__((vector_size(W * 4)));
  typedef int32_t I __attribute__((vector_size(W * 4)));
};
template <int W>
using vf = typename Vec<W>::F;
template <int W>
using vi = typename Vec<W>::I;

#if defined(__AVX512F__)
constexpr int kWide = 16;
#elif defined(__AVX2__)
constexpr int kWide = 8;
#else
constexpr int kWide = 4;
#endif

template <int W>
ATTN_DEVICE vf<W> load(const float* p) {
  vf<W> x;
  std::memcpy(&x, p, sizeof(x));
  return x;
}
template <int W>
ATTN_DEVICE vi<W> load(const int32_t* p) {
  vi<W> x;
  std::memcpy(&x, p, sizeof(x));
  return x;
}
template <class V, class T>
ATTN_DEVICE void store(T* p, V x) {
  std::memcpy(p, &x, sizeof(x));
}

template <int W>
ATTN_DEVICE vf<W> splat(float x) {
#if defined(__AVX512F__)
  if constexpr (W == 16) return vf<W>(_mm512_set1_ps(x));
#endif
#if defined(__AVX2__)
  if constexpr (W == 8) return vf<W>(_mm256_set1_ps(x));
#endif
  vf<W> v;
  for (int i = 0; i < W; i++) v[i] = x;
  return v;
}
template <int W>
ATTN_DEVICE vi<W> splat_int(int x) {
  vi<W> v = {};
  return v + x;
}
template <int W>
ATTN_DEVICE vi<W> count_up() {  // 0, 1, 2, ...
  vi<W> v;
  for (int i = 0; i < W; i++) v[i] = i;
  return v;
}

// a * b + c. Fused wherever the instruction exists, and then in every kernel of the build.
template <int W>
ATTN_DEVICE vf<W> fma(vf<W> a, vf<W> b, vf<W> c) {
#if defined(__AVX512F__)
  if constexpr (W == 16) return vf<W>(_mm512_fmadd_ps(__m512(a), __m512(b), __m512(c)));
#endif
#if defined(__AVX2__)
  if constexpr (W == 8) return vf<W>(_mm256_fmadd_ps(__m256(a), __m256(b), __m256(c)));
#endif
  return a * b + c;
}

// The greater of a and b; b when either is a NaN.
template <int W>
ATTN_DEVICE vf<W> greater(vf<W> a, vf<W> b) {
#if defined(__AVX512F__)
  if constexpr (W == 16) return vf<W>(_mm512_max_ps(__m512(a), __m512(b)));
#endif
#if defined(__AVX2__)
  if constexpr (W == 8) return vf<W>(_mm256_max_ps(__m256(a), __m256(b)));
#endif
  return a > b ? a : b;
}
ATTN_DEVICE float greater(float a, float b) { return a > b ? a : b; }

template <int W>
ATTN_DEVICE vf<W> select(vi<W> pick, vf<W> yes, vf<W> no) {
  return pick ? yes : no;
}

template <int W>
ATTN_DEVICE vf<W> to_float(vi<W> x) {
#if defined(__AVX512F__)
  if constexpr (W == 16) return vf<W>(_mm512_cvtepi32_ps(__m512i(x)));
#endif
#if defined(__AVX2__)
  if constexpr (W == 8) return vf<W>(_mm256_cvtepi32_ps(__m256i(x)));
#endif
  return __builtin_convertvector(x, vf<W>);
}

// 2^x for x <= 126, relative error below 1e-7, exact for whole x; 0 below -126.5; a NaN stays one.
template <int W>
ATTN_DEVICE vf<W> exp2(vf<W> x) {
  const vf<W> y = greater<W>(splat<W>(-127.f), x);  // keeps a NaN
  const vf<W> shifted = y + splat<W>(0x1.8p23f);    // rounds to an integer, held in the low bits
  const vf<W> f = y - (shifted - splat<W>(0x1.8p23f));
  vf<W> p = splat<W>(0x1.448f98p-13f);  // minimax for (2^f - 1) / f on [-1/2, 1/2]
  p = fma<W>(p, f, splat<W>(0x1.5f47b2p-10f));
  p = fma<W>(p, f, splat<W>(0x1.3b29aap-7f));
  p = fma<W>(p, f, splat<W>(0x1.c6aed0p-5f));
  p = fma<W>(p, f, splat<W>(0x1.ebfbe0p-3f));
  p = fma<W>(p, f, splat<W>(0x1.62e430p-1f));
  p = fma<W>(p, f, splat<W>(1.f));
  vi<W> n;
  std::memcpy(&n, &shifted, sizeof(n));
  const vi<W> exponent = (n - (0x4b400000 - 127)) << 23;  // of 0 for y = -127: the result is 0
  vf<W> scale;
  std::memcpy(&scale, &exponent, sizeof(scale));
  return p * scale;
}

ATTN_DEVICE float exp2(float x) { return exp2<4>(splat<4>(x))[0]; }
ATTN_DEVICE float log2(float x) { return std::log2(x); }
template <int W>
ATTN_DEVICE vf<W> log2(vf<W> x) {
  for (int i = 0; i < W; i++) x[i] = std::log2(x[i]);
  return x;
}

// tanh for soft caps. Near 0 by its series: what a difference of numbers near 1 loses there, a large cap would magnify.
template <int W>
ATTN_DEVICE vf<W> tanh(vf<W> x) {
  const vf<W> bound = splat<W>(10.f);
  const vf<W> y = x > bound ? bound : (x < -bound ? -bound : x);
  const vf<W> e = exp2<W>(y * splat<W>(2 * kLog2e));
  const vf<W> far = (e - splat<W>(1.f)) / (e + splat<W>(1.f)), z = x * x;
  const vf<W> high = splat<W>(-17.f / 315) + z * splat<W>(62.f / 2835);
  const vf<W> near = x + x * z * (splat<W>(-1.f / 3) + z * (splat<W>(2.f / 15) + z * high));
  return z < splat<W>(0.0625f) ? near : far;
}

template <int W>
ATTN_DEVICE float sum_of(vf<W> x) {
  if constexpr (W == 1) return x[0];
  else if constexpr (W == 4) return (x[0] + x[2]) + (x[1] + x[3]);
  else {
    vf<W / 2> low, high;
    std::memcpy(&low, &x, sizeof(low));
    std::memcpy(&high, reinterpret_cast<const char*>(&x) + sizeof(low), sizeof(high));
    return sum_of<W / 2>(low + high);
  }
}
template <int W>
ATTN_DEVICE float max_of(vf<W> x) {
  float m = x[0];
  for (int i = 1; i < W; i++) m = greater(m, x[i]);
  return m;
}

#if defined(__AVX2__)
ATTN_DEVICE __m256 fold(__m256 x) { return x; }
#if defined(__AVX512F__)
ATTN_DEVICE __m256 fold(__m512 x) {
  return _mm512_castps512_ps256(x) + _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(x), 1));
}
#endif
#endif

// Sums of eight vectors at once: out[i] = sum of x[i].
template <int W>
ATTN_DEVICE void sum_each(const vf<W> (&x)[8], float* out) {
#if defined(__AVX2__)
  if constexpr (W >= 8) {
    const __m256 a = _mm256_hadd_ps(_mm256_hadd_ps(fold(x[0]), fold(x[1])), _mm256_hadd_ps(fold(x[2]), fold(x[3])));
    const __m256 b = _mm256_hadd_ps(_mm256_hadd_ps(fold(x[4]), fold(x[5])), _mm256_hadd_ps(fold(x[6]), fold(x[7])));
    _mm256_storeu_ps(out, _mm256_permute2f128_ps(a, b, 0x20) + _mm256_permute2f128_ps(a, b, 0x31));
    return;
  }
#endif
  ATTN_UNROLL
  for (int i = 0; i < 8; i++) out[i] = sum_of<W>(x[i]);
}

// W values of a row, widened. T is float or one of these: how the bytes of a smaller cache are read.
struct Half { uint16_t bits; };
struct BFloat { uint16_t bits; };
template <int DType>
struct Fp8 { uint8_t bits; };

#if defined(__AVX512F__)
template <int T>
ATTN_DEVICE __m512 widen_fp8_16(const uint8_t* p) {  // as widen_fp8
  const __m256i x = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  if constexpr (T == kFloat8E5M2) return _mm512_cvtph_ps(_mm256_slli_epi16(x, 8));
  const __m256i low = _mm256_and_si256(x, _mm256_set1_epi16(0x7f));
  __m256i half = _mm256_slli_epi16(low, 7);
  if constexpr (is_e5m2(T)) half = _mm256_add_epi16(half, _mm256_subs_epu16(half, _mm256_set1_epi16(0x400)));
  const __m256i value = _mm256_or_si256(half, _mm256_slli_epi16(_mm256_xor_si256(x, low), 8));
  const __mmask16 is_nan =
      _mm256_cmpeq_epi16_mask(is_fnuz(T) ? x : low, _mm256_set1_epi16(is_fnuz(T) ? 0x80 : 0x7f));
  const __m256i code = _mm256_mask_mov_epi16(value, is_nan, _mm256_set1_epi16(0x7e00));
  return _mm512_mul_ps(_mm512_cvtph_ps(code), _mm512_set1_ps(fp8_unit(T)));
}
#endif

template <int W, int T>
ATTN_DEVICE vf<W> widen(const Fp8<T>* p) {
  const auto* bits = reinterpret_cast<const uint8_t*>(p);
#if defined(__AVX512F__)
  if constexpr (W == 16) return vf<W>(widen_fp8_16<T>(bits));
#endif
#if defined(__AVX2__)
  if constexpr (W == 8) return vf<W>(widen_fp8<T>(bits));
#endif
  vf<W> x;
  for (int i = 0; i < W; i++) x[i] = fp8_to_float<T>(bits[i]);
  return x;
}

template <int W, class T>
ATTN_DEVICE vf<W> widen(const T* p) {
  if constexpr (sizeof(T) == 4) {
    return load<W>(p);
  } else {
    const auto* bits = reinterpret_cast<const uint16_t*>(p);
    constexpr bool bf16 = __is_same(T, BFloat);
#if defined(__AVX512F__)
    if constexpr (W == 16) {
      const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(bits));
      if constexpr (bf16) return vf<W>(_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16)));
      else return vf<W>(_mm512_cvtph_ps(x));
    }
#endif
#if defined(__AVX2__)
    if constexpr (W == 8) {
      if constexpr (bf16) return vf<W>(widen_bf16(bits));
      else return vf<W>(widen_half(bits));
    }
#endif
    vf<W> x;
    for (int i = 0; i < W; i++) x[i] = bf16 ? bf16_to_float(bits[i]) : half_to_float(bits[i]);
    return x;
  }
}

ATTN_DEVICE void prefetch(const void* p) { __builtin_prefetch(p, 0, 3); }

}  // namespace attn
