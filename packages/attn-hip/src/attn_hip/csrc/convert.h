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

// e4m3fn: bias 7, no infinity, NaN 0x7f. e4m3fnuz: bias 8, no infinity, no -0, NaN 0x80.
template <bool Fnuz>
ATTN_DEVICE float fp8_to_float(uint8_t x) {
  constexpr int bias = Fnuz ? 8 : 7;
  if (Fnuz ? x == 0x80 : (x & 0x7f) == 0x7f) return bits_as<float>(0x7fc00000u);
  const uint32_t exponent = (x >> 3) & 15, fraction = x & 7;
  const float size = exponent ? bits_as<float>(((exponent + 127 - bias) << 23) | (fraction << 20))
                              : float(fraction) * (Fnuz ? 0x1p-10f : 0x1p-9f);
  return x & 0x80 ? -size : size;
}

template <bool Fnuz>
ATTN_DEVICE uint8_t float_to_fp8(float x) {
  const uint32_t u = bits_as<uint32_t>(x), magnitude = u & 0x7fffffff, sign = (u >> 24) & 0x80;
  uint32_t code = magnitude >= 0x7f800000 ? 0xff : round_magnitude<3, Fnuz ? 8 : 7>(magnitude);
  if (Fnuz) return uint8_t(code > 0x7f ? 0x80 : code ? sign | code : 0);
  return uint8_t(sign | (code > 0x7e ? 0x7f : code));
}

ATTN_DEVICE int element_size(int dtype) { return dtype == kFloat32 ? 4 : dtype <= kBFloat16 ? 2 : 1; }

ATTN_DEVICE float load_element(const void* p, int64_t i, int dtype) {
  switch (dtype) {
    case kFloat32: return static_cast<const float*>(p)[i];
    case kFloat16: return half_to_float(static_cast<const uint16_t*>(p)[i]);
    case kBFloat16: return bf16_to_float(static_cast<const uint16_t*>(p)[i]);
    case kFloat8E4M3FN: return fp8_to_float<false>(static_cast<const uint8_t*>(p)[i]);
    default: return fp8_to_float<true>(static_cast<const uint8_t*>(p)[i]);
  }
}

ATTN_DEVICE void store_element(void* p, int64_t i, int dtype, float x) {
  switch (dtype) {
    case kFloat32: static_cast<float*>(p)[i] = x; break;
    case kFloat16: static_cast<uint16_t*>(p)[i] = float_to_half(x); break;
    case kBFloat16: static_cast<uint16_t*>(p)[i] = float_to_bf16(x); break;
    case kFloat8E4M3FN: static_cast<uint8_t*>(p)[i] = float_to_fp8<false>(x); break;
    default: static_cast<uint8_t*>(p)[i] = float_to_fp8<true>(x);
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
// The bits of an fp8 value, moved into a half, are the value times 2^-8 (2^-7 for fnuz), subnormals included.
template <bool Fnuz>
ATTN_DEVICE __m256 widen_fp8(const uint8_t* p) {
  const __m128i x = _mm_cvtepu8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  const __m128i low = _mm_and_si128(x, _mm_set1_epi16(0x7f));
  const __m128i sign = _mm_slli_epi16(_mm_xor_si128(x, low), 8);
  const __m128i is_nan = Fnuz ? _mm_cmpeq_epi16(x, _mm_set1_epi16(0x80)) : _mm_cmpeq_epi16(low, _mm_set1_epi16(0x7f));
  const __m128i value = _mm_or_si128(_mm_slli_epi16(low, 7), sign);
  const __m128i code = _mm_or_si128(value, _mm_and_si128(is_nan, _mm_set1_epi16(0x7e00)));
  return _mm256_mul_ps(_mm256_cvtph_ps(code), _mm256_set1_ps(Fnuz ? 0x1p7f : 0x1p8f));
}
#endif

// dst[0..n) = src[0..n) as float.
static inline void load_row(float* dst, const void* src, int dtype, int n) {
  int i = 0;
  if (dtype == kFloat32) {
    std::memcpy(dst, src, size_t(n) * sizeof(float));
    return;
  }
#if defined(__AVX2__)
  const auto* wide = static_cast<const uint16_t*>(src);
  const auto* narrow = static_cast<const uint8_t*>(src);
  switch (dtype) {
    case kFloat16: for (; i + 8 <= n; i += 8) _mm256_storeu_ps(dst + i, widen_half(wide + i)); break;
    case kBFloat16: for (; i + 8 <= n; i += 8) _mm256_storeu_ps(dst + i, widen_bf16(wide + i)); break;
    case kFloat8E4M3FN: for (; i + 8 <= n; i += 8) _mm256_storeu_ps(dst + i, widen_fp8<false>(narrow + i)); break;
    default: for (; i + 8 <= n; i += 8) _mm256_storeu_ps(dst + i, widen_fp8<true>(narrow + i));
  }
#endif
  for (; i < n; i++) dst[i] = load_element(src, i, dtype);
}

// dst[0..n) = src[0..n) rounded to nearest even.
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
  for (; i < n; i++) store_element(dst, i, dtype, src[i]);
}

#endif  // ATTN_CPU

}  // namespace attn
