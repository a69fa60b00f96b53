// Elements of CDNA3 and CDNA4: vectors of them, what the matrix unit multiplies, and the way to it from fp8.
#pragma once
#include "convert.h"

namespace attn {

typedef __attribute__((ext_vector_type(2))) float Float2;
typedef __attribute__((ext_vector_type(4))) float Float4;
typedef __attribute__((ext_vector_type(4))) short Short4;
typedef __attribute__((ext_vector_type(2))) _Float16 Half2;
typedef __attribute__((ext_vector_type(4))) _Float16 Half4;
typedef __attribute__((ext_vector_type(8))) _Float16 Half8;
typedef __attribute__((ext_vector_type(8))) __bf16 BFloat8;
typedef __attribute__((ext_vector_type(2))) uint32_t Words2;
typedef __attribute__((ext_vector_type(4))) uint32_t Words4;
struct alignas(16) Line {  // 16 bytes, eight elements
  uint32_t x[4];
};

// Element types of the matrix unit.
struct F16 {
  static constexpr int kDType = kFloat16;
  ATTN_MEMBER static uint32_t pair(float low, float high) {
    const Half2 x = {_Float16(low), _Float16(high)};
    return bits_as<uint32_t>(x);
  }
  ATTN_MEMBER static uint32_t exact_pair(float low, float high) {
    return bits_as<uint32_t>(__builtin_amdgcn_cvt_pkrtz(low, high));
  }
  ATTN_MEMBER static float widen(uint16_t x) { return float(bits_as<_Float16>(x)); }
  ATTN_MEMBER static uint32_t from_half_pair(uint32_t x) { return x; }
#if defined(__gfx950__)
  template <bool Upper>
  ATTN_MEMBER static uint32_t from_e4m3(uint32_t word) {
    return bits_as<uint32_t>(__builtin_amdgcn_cvt_scalef32_pk_f16_fp8(word, 1.f, Upper));
  }
  template <bool Upper>
  ATTN_MEMBER static uint32_t from_e5m2(uint32_t word) {
    return bits_as<uint32_t>(__builtin_amdgcn_cvt_scalef32_pk_f16_bf8(word, 1.f, Upper));
  }
#endif
};
struct B16 {
  static constexpr int kDType = kBFloat16;
  ATTN_MEMBER static uint32_t upper_halves(uint32_t low, uint32_t high) {
    return __builtin_amdgcn_perm(high, low, 0x07060302);
  }
  ATTN_MEMBER static uint32_t exact_pair(float low, float high) {
    return upper_halves(bits_as<uint32_t>(low), bits_as<uint32_t>(high));
  }
  // To nearest; a tie goes up, which only the conversion of gfx950 spares its even half of.
  ATTN_MEMBER static uint32_t pair(float low, float high) {
#if defined(__gfx950__)
    typedef __attribute__((ext_vector_type(2))) __bf16 BFloat2;
    const BFloat2 x = {__bf16(low), __bf16(high)};
    return bits_as<uint32_t>(x);
#else
    return upper_halves(bits_as<uint32_t>(low) + 0x8000, bits_as<uint32_t>(high) + 0x8000);
#endif
  }
  ATTN_MEMBER static float widen(uint16_t x) { return bf16_to_float(x); }
  ATTN_MEMBER static uint32_t from_half_pair(uint32_t x) {
    const Half2 h = bits_as<Half2>(x);
    return exact_pair(float(h.x), float(h.y));
  }
#if defined(__gfx950__)
  template <bool Upper>
  ATTN_MEMBER static uint32_t from_e4m3(uint32_t word) {
    return bits_as<uint32_t>(__builtin_amdgcn_cvt_scalef32_pk_bf16_fp8(word, 1.f, Upper));
  }
  template <bool Upper>
  ATTN_MEMBER static uint32_t from_e5m2(uint32_t word) {
    return bits_as<uint32_t>(__builtin_amdgcn_cvt_scalef32_pk_bf16_bf8(word, 1.f, Upper));
  }
#endif
};

// Two fp8 values of a word, from its lower or upper half, as a pair of E. Exact; NaN stays NaN. In the processor's own
// encodings: those of fnuz on gfx942.
template <class E, bool E5M2, bool Upper>
ATTN_DEVICE uint32_t own_fp8_pair(uint32_t word) {
#if defined(__gfx950__)
  if constexpr (E5M2) return E::template from_e5m2<Upper>(word);
  else return E::template from_e4m3<Upper>(word);
#else
  Float2 x;
  if constexpr (E5M2) x = bits_as<Float2>(__builtin_amdgcn_cvt_pk_f32_bf8(word, Upper));
  else x = bits_as<Float2>(__builtin_amdgcn_cvt_pk_f32_fp8(word, Upper));
  return E::exact_pair(x.x, x.y);
#endif
}
template <class E, bool E5M2>
ATTN_DEVICE Line own_fp8_line(uint32_t low, uint32_t high) {
  return {{own_fp8_pair<E, E5M2, false>(low), own_fp8_pair<E, E5M2, true>(low), own_fp8_pair<E, E5M2, false>(high),
           own_fp8_pair<E, E5M2, true>(high)}};
}

// Bytes of a word, from its lower or upper half, as the upper bytes of two halves.
template <bool Upper>
ATTN_DEVICE uint32_t upper_bytes(uint32_t word) {
  return __builtin_amdgcn_perm(0, word, Upper ? 0x030c020c : 0x010c000c);
}
#if defined(__gfx950__)
// In the other encodings, by fp8_half(). Of e4m3fnuz no code of e4m3fn is half the greatest value. `nans` has the upper
// bits of bytes that are NaN, which is 0x80.
template <class E, bool E5M2, bool Upper>
ATTN_DEVICE uint32_t foreign_fp8_pair(uint32_t word, uint32_t nans) {
  typedef __attribute__((ext_vector_type(2))) short Short2;
  typedef __attribute__((ext_vector_type(2))) unsigned short UShort2;
  const Short2 lost = bits_as<Short2>(upper_bytes<Upper>(nans)) >> short(6);
  const uint32_t wide = upper_bytes<Upper>(word);
  if constexpr (E5M2) {
    const uint32_t half = (wide & 0x7f007f00) >> 1;
    const UShort2 least = __builtin_elementwise_max(bits_as<UShort2>(half), UShort2{0x400, 0x400});
    const uint32_t size = half + bits_as<uint32_t>(least) - 0x04000400;
    return E::from_half_pair(size | (wide & 0x80008000) | bits_as<uint32_t>(lost));
  } else {
    const Short2 codes = bits_as<Short2>(wide) >> short(1);
    const uint32_t bits = (bits_as<uint32_t>(codes) & 0xbf80bf80) | bits_as<uint32_t>(lost);
    return E::from_half_pair(bits_as<uint32_t>(bits_as<Half2>(bits) * Half2{128.f, 128.f}));
  }
}
ATTN_DEVICE uint32_t foreign_nans(uint32_t word) {
  return word & ~((word & 0x7f7f7f7f) + 0x7f7f7f7f) & 0x80808080;
}
template <class E, bool E5M2>
ATTN_DEVICE Line foreign_fp8_line(uint32_t low, uint32_t high) {
  const uint32_t lost[2] = {foreign_nans(low), foreign_nans(high)};
  return {{foreign_fp8_pair<E, E5M2, false>(low, lost[0]), foreign_fp8_pair<E, E5M2, true>(low, lost[0]),
           foreign_fp8_pair<E, E5M2, false>(high, lost[1]), foreign_fp8_pair<E, E5M2, true>(high, lost[1])}};
}
#else
// Four codes of e4m3fn as those of e4m3fnuz, which stand for half the value (cache_unit in rows.h): the same but for -0,
// which would be NaN, and NaN itself.
ATTN_DEVICE uint32_t own_codes(uint32_t word) {
  const uint32_t size = word & 0x7f7f7f7f;
  const uint32_t nan = (size + 0x01010101) >> 7 & 0x01010101;  // 0x7f, and 0x80 after the addition
  return (size + nan) | (word & (size + 0x7f7f7f7f) & 0x80808080);
}
// e5m2 has infinities, which e5m2fnuz lacks; its codes are upper bytes of halves.
template <class E>
ATTN_DEVICE Line e5m2_line(uint32_t low, uint32_t high) {
  return {{E::from_half_pair(upper_bytes<false>(low)), E::from_half_pair(upper_bytes<true>(low)),
           E::from_half_pair(upper_bytes<false>(high)), E::from_half_pair(upper_bytes<true>(high))}};
}
#endif

// Eight values (two words) of an fp8 type as a line of E.
template <class E, int T>
ATTN_DEVICE Line widen_line(uint32_t low, uint32_t high) {
#if defined(__gfx950__)
  if constexpr (is_fnuz(T)) return foreign_fp8_line<E, is_e5m2(T)>(low, high);
#else
  if constexpr (T == kFloat8E5M2) return e5m2_line<E>(low, high);
  if constexpr (T == kFloat8E4M3FN) low = own_codes(low), high = own_codes(high);
#endif
  return own_fp8_line<E, is_e5m2(T)>(low, high);
}

}  // namespace attn
