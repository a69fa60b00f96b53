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
  ATTN_MEMBER static uint32_t from_fp8(uint32_t word) {
    return bits_as<uint32_t>(__builtin_amdgcn_cvt_scalef32_pk_f16_fp8(word, 1.f, Upper));
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
  ATTN_MEMBER static uint32_t from_fp8(uint32_t word) {
    return bits_as<uint32_t>(__builtin_amdgcn_cvt_scalef32_pk_bf16_fp8(word, 1.f, Upper));
  }
#endif
};

// Two fp8 values of a word, from its lower or upper half, as a pair of E. Exact; NaN stays NaN. In the processor's own
// encoding.
template <class E, bool Upper>
ATTN_DEVICE uint32_t own_fp8_pair(uint32_t word) {
#if defined(__gfx950__)
  return E::template from_fp8<Upper>(word);
#else
  const Float2 x = bits_as<Float2>(__builtin_amdgcn_cvt_pk_f32_fp8(word, Upper));
  return E::exact_pair(x.x, x.y);
#endif
}
#if defined(__gfx950__)
// In the other encoding, e4m3fnuz, whose greatest value no code of e4m3fn is half of. The bits of a code, moved into a half,
// are its value times 2^-7, subnormals included. `nans` has the upper bits of bytes that are NaN, which is 0x80.
template <class E, bool Upper>
ATTN_DEVICE uint32_t foreign_fp8_pair(uint32_t word, uint32_t nans) {
  typedef __attribute__((ext_vector_type(2))) short Short2;
  constexpr uint32_t bytes = Upper ? 0x030c020c : 0x010c000c;
  const Short2 codes = bits_as<Short2>(__builtin_amdgcn_perm(0, word, bytes)) >> short(1);
  const Short2 lost = bits_as<Short2>(__builtin_amdgcn_perm(0, nans, bytes)) >> short(6);
  const uint32_t bits = (bits_as<uint32_t>(codes) & 0xbf80bf80) | bits_as<uint32_t>(lost);
  return E::from_half_pair(bits_as<uint32_t>(bits_as<Half2>(bits) * Half2{128.f, 128.f}));
}
ATTN_DEVICE uint32_t foreign_nans(uint32_t word) {
  return word & ~((word & 0x7f7f7f7f) + 0x7f7f7f7f) & 0x80808080;
}
#else
// Four codes of e4m3fn as those of e4m3fnuz, which stand for half the value (cache_unit in rows.h): the same but for -0,
// which would be NaN, and NaN itself.
ATTN_DEVICE uint32_t own_codes(uint32_t word) {
  const uint32_t size = word & 0x7f7f7f7f;
  const uint32_t nan = (size + 0x01010101) >> 7 & 0x01010101;  // 0x7f, and 0x80 after the addition
  return (size + nan) | (word & (size + 0x7f7f7f7f) & 0x80808080);
}
#endif

// Eight fp8 values (two words) as a line of E.
template <class E>
ATTN_DEVICE Line widen_line(uint32_t low, uint32_t high, bool fnuz) {
#if !defined(__gfx950__)
  if (!fnuz) {
    asm volatile("" : "+v"(low), "+v"(high));  // never worked out in vain
    low = own_codes(low), high = own_codes(high);
  }
#else
  if (fnuz) {
    asm volatile("" : "+v"(low), "+v"(high));
    const uint32_t lost[2] = {foreign_nans(low), foreign_nans(high)};
    return {{foreign_fp8_pair<E, false>(low, lost[0]), foreign_fp8_pair<E, true>(low, lost[0]),
             foreign_fp8_pair<E, false>(high, lost[1]), foreign_fp8_pair<E, true>(high, lost[1])}};
  }
#endif
  return {{own_fp8_pair<E, false>(low), own_fp8_pair<E, true>(low), own_fp8_pair<E, false>(high),
           own_fp8_pair<E, true>(high)}};
}

}  // namespace attn
