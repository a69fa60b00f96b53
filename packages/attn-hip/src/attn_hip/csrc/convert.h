// Float formats: one value at a time (every target), and whole rows (CPU).
#pragma once
#include "portability.h"
#if ATTN_CPU && defined(__AVX2__)
#include <immintrin.h>
#endif

namespace attn {

ATTN_DEVICE float bf16_to_float(uint16_t x) { return bits_as<float>(uint32_t(x) << 16); }

ATTN_DEVICE uint16_t float_to_bf16(float x) {  // nearest even; a NaN stays one
  const uint32_t u = bits_as<uint32_t>(x);
  const uint32_t rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
  return uint16_t((u & 0x7fffffff) > 0x7f800000 ? (u >> 16) | 0x40 : rounded);
}

ATTN_DEVICE float half_to_float(uint16_t x) {
  const uint32_t sign = uint32_t(x & 0x8000) << 16, exponent = (x >> 10) & 31, fraction = x & 0x3ff;
  if (exponent == 31) return bits_as<float>(sign | 0x7f800000 | (fraction << 13));
  if (exponent) return bits_as<float>(sign | ((exponent + 112) << 23) | (fraction << 13));
  const float small = float(fraction) * 0x1p-24f;
  return sign ? -small : small;
}

// Round to a small format of `Fraction` fraction bits and exponent bias `Bias`: the code of |x|, without special
// values; what is too large gives a code beyond the largest.
template <int Fraction, int Bias>
ATTN_DEVICE uint32_t round_magnitude(uint32_t magnitude) {
  constexpr int drop = 23 - Fraction;
  const int exponent = int(magnitude >> 23) - 127 + Bias;
  if (exponent >= 1) {
    const uint32_t code = magnitude - (uint32_t(127 - Bias) << 23);
    return (code + (1u << (drop - 1)) - 1 + ((code >> drop) & 1)) >> drop;
  }
  const int shift = drop + 1 - exponent;  // subnormal: shift the full significand
  if (shift > 25) return 0;
  const uint32_t full = (magnitude & 0x7fffff) | 0x800000;
  return (full + (1u << (shift - 1)) - 1 + ((full >> shift) & 1)) >> shift;
}

ATTN_DEVICE uint16_t float_to_half(float x) {
  const uint32_t u = bits_as<uint32_t>(x), magnitude = u & 0x7fffffff, sign = (u >> 16) & 0x8000;
  if (magnitude > 0x7f800000) return uint16_t(sign | 0x7e00);
  const uint32_t code = magnitude == 0x7f800000 ? 0x7c00 : round_magnitude<10, 15>(magnitude);
  return uint16_t(sign | (code > 0x7c00 ? 0x7c00 : code));
}

// Whether an fp8 format has five bits of exponent, and whether it is of the kind without infinities and -0.
ATTN_DEVICE constexpr bool is_e5m2(int dtype) { return dtype == kFloat8E5M2 || dtype == kFloat8E5M2FNUZ; }
ATTN_DEVICE constexpr bool is_fnuz(int dtype) { return dtype == kFloat8E4M3FNUZ || dtype == kFloat8E5M2FNUZ; }

// The bits of a half that is an fp8 value divided by fp8_unit(). A code moved into a half keeps its value but for the
// bias; that of e5m2fnuz is greater by one, so its halves are less by an exponent, or shifted where there is none.
// e4m3fn: NaN 0x7f and 0xff, no infinity. Both fnuz: NaN 0x80.
template <int T>
ATTN_DEVICE uint16_t fp8_half(uint8_t x) {
  if (T == kFloat8E5M2) return uint16_t(x << 8);
  const uint32_t size = x & 0x7f, sign = uint32_t(x & 0x80) << 8, half = size << 7;
  if (is_fnuz(T) ? x == 0x80 : size == 0x7f) return 0x7e00;
  return uint16_t(sign | (is_e5m2(T) && half > 0x400 ? 2 * half - 0x400 : half));
}
ATTN_DEVICE constexpr float fp8_unit(int dtype) { return is_e5m2(dtype) ? 1.f : is_fnuz(dtype) ? 0x1p7f : 0x1p8f; }

template <int T>
ATTN_DEVICE float fp8_to_float(uint8_t x) { return half_to_float(fp8_half<T>(x)) * fp8_unit(T); }

ATTN_DEVICE int element_size(int dtype) { return dtype == kFloat32 ? 4 : dtype <= kBFloat16 ? 2 : 1; }

ATTN_DEVICE float load_element(const void* p, int64_t i, int dtype) {  // no fp8
  switch (dtype) {
    case kFloat32: return static_cast<const float*>(p)[i];
    case kFloat16: return half_to_float(static_cast<const uint16_t*>(p)[i]);
    default: return bf16_to_float(static_cast<const uint16_t*>(p)[i]);
  }
}

#if ATTN_CPU

#if defined(__AVX2__)
ATTN_DEVICE __m256 widen_bf16(const uint16_t* p) {
  const __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16));
}
ATTN_DEVICE __m256 widen_half(const uint16_t* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
template <int T>
ATTN_DEVICE __m256 widen_fp8(const uint8_t* p) {
  const __m128i x = _mm_cvtepu8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  if constexpr (T == kFloat8E5M2) return _mm256_cvtph_ps(_mm_slli_epi16(x, 8));
  const __m128i low = _mm_and_si128(x, _mm_set1_epi16(0x7f));
  const __m128i sign = _mm_slli_epi16(_mm_xor_si128(x, low), 8);
  const __m128i is_nan = _mm_cmpeq_epi16(is_fnuz(T) ? x : low, _mm_set1_epi16(is_fnuz(T) ? 0x80 : 0x7f));
  __m128i half = _mm_slli_epi16(low, 7);
  if constexpr (is_e5m2(T)) half = _mm_add_epi16(half, _mm_subs_epu16(half, _mm_set1_epi16(0x400)));
  const __m128i code = _mm_or_si128(_mm_or_si128(half, sign), _mm_and_si128(is_nan, _mm_set1_epi16(0x7e00)));
  return _mm256_mul_ps(_mm256_cvtph_ps(code), _mm256_set1_ps(fp8_unit(T)));
}
#endif

template <int T>
static inline void load_fp8(float* dst, const uint8_t* src, int n) {
  int i = 0;
#if defined(__AVX2__)
  for (; i + 8 <= n; i += 8) _mm256_storeu_ps(dst + i, widen_fp8<T>(src + i));
#endif
  for (; i < n; i++) dst[i] = fp8_to_float<T>(src[i]);
}
static inline void load_fp8(float* dst, const uint8_t* src, int dtype, int n) {
  switch (dtype) {
    case kFloat8E4M3FN: return load_fp8<kFloat8E4M3FN>(dst, src, n);
    case kFloat8E4M3FNUZ: return load_fp8<kFloat8E4M3FNUZ>(dst, src, n);
    case kFloat8E5M2: return load_fp8<kFloat8E5M2>(dst, src, n);
    default: return load_fp8<kFloat8E5M2FNUZ>(dst, src, n);
  }
}

// dst[0..n) = src[0..n) as float.
static inline void load_row(float* dst, const void* src, int dtype, int n) {
  int i = 0;
  if (dtype == kFloat32) {
    std::memcpy(dst, src, size_t(n) * sizeof(float));
    return;
  }
  if (element_size(dtype) == 1) return load_fp8(dst, static_cast<const uint8_t*>(src), dtype, n);
#if defined(__AVX2__)
  const auto* wide = static_cast<const uint16_t*>(src);
  if (dtype == kFloat16) for (; i + 8 <= n; i += 8) _mm256_storeu_ps(dst + i, widen_half(wide + i));
  else for (; i + 8 <= n; i += 8) _mm256_storeu_ps(dst + i, widen_bf16(wide + i));
#endif
  for (; i < n; i++) dst[i] = load_element(src, i, dtype);
}

// dst[0..n) = src[0..n) rounded to nearest even; no fp8.
static inline void store_row(void* dst, const float* src, int dtype, int n) {
  int i = 0;
  if (dtype == kFloat32) {
    std::memcpy(dst, src, size_t(n) * sizeof(float));
    return;
  }
  if (dtype == kBFloat16) {
    for (; i < n; i++) static_cast<uint16_t*>(dst)[i] = float_to_bf16(src[i]);
    return;
  }
#if defined(__AVX2__)
  if (dtype == kFloat16) {
    for (; i + 8 <= n; i += 8)
      _mm_storeu_si128(reinterpret_cast<__m128i*>(static_cast<uint16_t*>(dst) + i),
                       _mm256_cvtps_ph(_mm256_loadu_ps(src + i), _MM_FROUND_TO_NEAREST_INT));
  }
#endif
  for (; i < n; i++) static_cast<uint16_t*>(dst)[i] = float_to_half(src[i]);
}

#endif  // ATTN_CPU

}  // namespace attn
