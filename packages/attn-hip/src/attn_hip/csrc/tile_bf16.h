// CPU tiles for a bfloat16 query and cache on a core that multiplies pairs of bfloat16 (AVX512-BF16). The same two
// shapes as tile_rows.h and tile_dims.h; products take two dims (scores) or two keys (outputs) at a time, sums are
// float, and the softmax weights are rounded to bfloat16 as a matrix unit needs them.
#pragma once
#include "tile_dims.h"
#include "tile_rows.h"

#if defined(__AVX512BF16__)
namespace attn {

// sum[i] += a.low[i] * b.low[i] + a.high[i] * b.high[i] over pairs of bfloat16.
ATTN_DEVICE vf<16> dot(vf<16> sum, __m512i a, __m512i b) {
  return vf<16>(_mm512_dpbf16_ps(__m512(sum), (__m512bh)a, (__m512bh)b));
}
ATTN_DEVICE vf<8> dot(vf<8> sum, __m256i a, __m256i b) {
  return vf<8>(_mm256_dpbf16_ps(__m256(sum), (__m256bh)a, (__m256bh)b));
}

template <int W>
struct Pairs;
template <>
struct Pairs<16> {
  using V = __m512i;
  static V load(const void* p) { return _mm512_loadu_si512(p); }
  static V splat(uint32_t x) { return _mm512_set1_epi32(int(x)); }
  static V join(vf<16> low, vf<16> high) {  // rounds to nearest even, keeps a NaN
    const __m512i l = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(__m512(low)));
    return _mm512_or_si512(l, _mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(__m512(high))), 16));
  }
};
template <>
struct Pairs<8> {
  using V = __m256i;
  static V load(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
  static V splat(uint32_t x) { return _mm256_set1_epi32(int(x)); }
  static V join(vf<8> low, vf<8> high) {
    const __m256i l = _mm256_cvtepu16_epi32((__m128i)_mm256_cvtneps_pbh(__m256(low)));
    return _mm256_or_si256(l, _mm256_slli_epi32(_mm256_cvtepu16_epi32((__m128i)_mm256_cvtneps_pbh(__m256(high))), 16));
  }
};

ATTN_DEVICE uint32_t pair_at(const void* p) {
  uint32_t x;
  std::memcpy(&x, p, sizeof(x));
  return x;
}

// Two rows of 32 dims as pairs. The interleave works within 128-bit lanes, so the dims come out in an order of their
// own, which outputs keep until they are stored.
struct Interleaved {
  __m512i first, second;
};
ATTN_DEVICE Interleaved interleave(const void* low, const void* high) {
  const __m512i a = _mm512_loadu_si512(low), b = _mm512_loadu_si512(high);
  return {_mm512_unpacklo_epi16(a, b), _mm512_unpackhi_epi16(a, b)};
}
ATTN_DEVICE int dim_of(int place) {
  return (place & ~31) + (place >> 2 & 3) * 8 + (place >> 4 & 1) * 4 + (place & 3);
}

template <int W, int N, int Step>
class DotRowTile : public CpuTile<DotRowTile<W, N, Step>, BFloat, false, Step>, public RowLanes<W, N> {
  using Lanes = RowLanes<W, N>;
  using Base = CpuTile<DotRowTile, BFloat, false, Step>;

 public:
  using Lanes::kHeight;
  using Lanes::kRows;
  using typename Lanes::Row;
  using typename Lanes::Scores;
  using Unit = CpuUnit<DotRowTile>;
  using Base::Base;

  static size_t q_size(const AttendParams& p) { return size_t(p.head_dim_qk / 2) * kHeight; }
  static size_t out_size(const AttendParams& p) { return size_t(p.head_dim_vo) * kHeight; }
  static void set_query(const AttendParams& p, void* q, int i, const float* row) {
    for (int d = 0; d < p.head_dim_qk; d++)
      static_cast<uint16_t*>(q)[(d / 2 * kHeight + i) * 2 + d % 2] = float_to_bf16(row[d]);
  }
  static void get_out(const AttendParams& p, const float* out, int i, float share, float* row) {
    for (int d = 0; d < p.head_dim_vo; d++) row[dim_of(d)] = out[d * kHeight + i] * share;
  }

  void stage(int h) {
    Base::stage(h);
    const int dims = this->p_->head_dim_vo;
    for (int t = 0; t < Step; t += 2) {
      for (int d = 0; d < dims; d += 32) {
        const Interleaved pairs = interleave(this->rows_.v[t] + d, this->rows_.v[t + 1] + d);
        _mm512_store_si512(values_ + t / 2 * dims + d, pairs.first);
        _mm512_store_si512(values_ + t / 2 * dims + d + 16, pairs.second);
      }
      this->rows_.fetch_v(2);
    }
  }

  Scores scores(const Unit& unit, int kv) {
    const int n = this->depth(unit, kv);
    for (int t = 0; t < n; t += kBlock) {
      score_block(this->rows_.k + t, unit.q, this->p_->head_dim_qk, scores_ + t * kHeight);
      this->rows_.fetch_k(kBlock);
    }
    return {scores_, n};
  }

  void accumulate(Unit& unit, const Row (&fade)[kRows], const Scores& s) {
    for (int t = 0; t < s.n; t += 2) {
      for (int r = 0; r < N; r++) {
        const Row next = t + 1 < s.n ? s.get(r, t + 1) : splat<W>(0.f);
        const auto pair = Pairs<W>::join(s.get(r, t), next);
        std::memcpy(weights_ + t / 2 * kHeight + r * W, &pair, sizeof(pair));
      }
    }
    const int dims = this->p_->head_dim_vo, pairs = (s.n + 1) / 2;
    int d = 0;
    for (; dims - d >= kBlock; d += kBlock) output_block<kBlock>(d, dims, pairs, fade, unit.out);
    for (; d < dims; d += 4) output_block<4>(d, dims, pairs, fade, unit.out);
  }

 private:
  static constexpr int kBlock = 8;  // keys or dims whose sums one pass holds in registers
  static_assert(Step % kBlock == 0, "a step is whole blocks");

  static void score_block(const BFloat* const* k, const void* q_panel, int dims, float* to) {
    const auto* q = static_cast<const uint32_t*>(q_panel);
    Row sum[kBlock][N];
    const BFloat* key[kBlock];
    ATTN_UNROLL
    for (int t = 0; t < kBlock; t++) {
      key[t] = k[t];
      ATTN_UNROLL
      for (int r = 0; r < N; r++) sum[t][r] = splat<W>(0.f);
    }
    for (int d = 0; d < dims; d += 2, q += kHeight) {
      typename Pairs<W>::V query[N];
      ATTN_UNROLL
      for (int r = 0; r < N; r++) query[r] = Pairs<W>::load(q + r * W);
      ATTN_UNROLL
      for (int t = 0; t < kBlock; t++) {
        const auto x = Pairs<W>::splat(pair_at(key[t] + d));
        ATTN_UNROLL
        for (int r = 0; r < N; r++) sum[t][r] = dot(sum[t][r], query[r], x);
      }
    }
    ATTN_UNROLL
    for (int t = 0; t < kBlock; t++) {
      ATTN_UNROLL
      for (int r = 0; r < N; r++) store(to + t * kHeight + r * W, sum[t][r]);
    }
  }

  template <int D>
  void output_block(int d, int dims, int pairs, const Row (&fade)[kRows], float* out) const {
    Row sum[D][N];
    ATTN_UNROLL
    for (int i = 0; i < D; i++) {
      ATTN_UNROLL
      for (int r = 0; r < N; r++) sum[i][r] = load<W>(out + (d + i) * kHeight + r * W) * fade[r];
    }
    for (int t = 0; t < pairs; t++) {
      const uint32_t* value = values_ + t * dims + d;
      typename Pairs<W>::V weight[N];
      ATTN_UNROLL
      for (int r = 0; r < N; r++) weight[r] = Pairs<W>::load(weights_ + t * kHeight + r * W);
      ATTN_UNROLL
      for (int i = 0; i < D; i++) {
        const auto x = Pairs<W>::splat(value[i]);
        ATTN_UNROLL
        for (int r = 0; r < N; r++) sum[i][r] = dot(sum[i][r], weight[r], x);
      }
    }
    ATTN_UNROLL
    for (int i = 0; i < D; i++) {
      ATTN_UNROLL
      for (int r = 0; r < N; r++) store(out + (d + i) * kHeight + r * W, sum[i][r]);
    }
  }

  alignas(64) float scores_[Step * kHeight];
  alignas(64) uint32_t weights_[Step / 2 * kHeight];
  alignas(64) uint32_t values_[Step / 2 * 512];  // [key pair][dim]
};

template <int R>
class DotDimTile : public CpuTile<DotDimTile<R>, BFloat, false, kShortStep>, public DimLanes<R> {
  using Lanes = DimLanes<R>;
  using Lanes::W;
  using Base = CpuTile<DotDimTile, BFloat, false, kShortStep>;

 public:
  using Lanes::kRows;
  using typename Lanes::Row;
  using typename Lanes::Scores;
  using Unit = CpuUnit<DotDimTile>;
  using Base::Base;

  static size_t q_size(const AttendParams& p) { return size_t(p.head_dim_qk / 2) * R; }
  static size_t out_size(const AttendParams& p) { return size_t(p.head_dim_vo) * R; }
  static void set_query(const AttendParams& p, void* q, int i, const float* row) {
    for (int d = 0; d < p.head_dim_qk; d++) static_cast<uint16_t*>(q)[i * p.head_dim_qk + d] = float_to_bf16(row[d]);
  }
  static void get_out(const AttendParams& p, const float* out, int i, float share, float* row) {
    for (int d = 0; d < p.head_dim_vo; d++) row[dim_of(d)] = out[i * p.head_dim_vo + d] * share;
  }

  Scores scores(const Unit& unit, int kv) {
    const int n = this->depth(unit, kv);
    for (int t = 0; t < round_up(n, kKeyBlock); t += kKeyBlock) {
      score_block(this->rows_.k + t, static_cast<const uint16_t*>(unit.q), this->p_->head_dim_qk, scores_ + t);
      this->rows_.fetch_k(kKeyBlock);
    }
    return {scores_, n};
  }

  void accumulate(Unit& unit, const Row (&fade)[kRows], const Scores& s) {
    for (int d = 0; d < this->p_->head_dim_vo; d += 32) output_block(d, fade, s, unit.out);
  }

 private:
  static constexpr int kKeyBlock = 8 / R;

  static void score_block(const BFloat* const* k, const uint16_t* q, int dims, float* to) {
    vf<W> sum[8];
    ATTN_UNROLL
    for (int i = 0; i < 8; i++) sum[i] = splat<W>(0.f);
    for (int d = 0; d < dims; d += 32) {
      __m512i x[kKeyBlock];
      ATTN_UNROLL
      for (int t = 0; t < kKeyBlock; t++) x[t] = _mm512_loadu_si512(k[t] + d);
      ATTN_UNROLL
      for (int r = 0; r < R; r++) {
        const __m512i query = _mm512_loadu_si512(q + r * dims + d);
        ATTN_UNROLL
        for (int t = 0; t < kKeyBlock; t++) sum[r * kKeyBlock + t] = dot(sum[r * kKeyBlock + t], x[t], query);
      }
    }
    float sums[8];
    sum_each<W>(sum, sums);
    ATTN_UNROLL
    for (int r = 0; r < R; r++) {
      ATTN_UNROLL
      for (int t = 0; t < kKeyBlock; t++) to[r * kShortStep + t] = sums[r * kKeyBlock + t];
    }
  }

  // 32 dims of the outputs, two keys at a time. Weights behind the last key are 0 (masked), and so are values.
  void output_block(int d, const Row (&fade)[kRows], const Scores& s, float* out) {
    const int dims = this->p_->head_dim_vo;
    vf<W> sum[R][2];
    ATTN_UNROLL
    for (int r = 0; r < R; r++) {
      ATTN_UNROLL
      for (int i = 0; i < 2; i++) sum[r][i] = load<W>(out + r * dims + d + i * W) * fade[r];
    }
    for (int t = 0; t < s.n; t += 2) {
      const Interleaved x = interleave(this->rows_.v[t] + d, this->rows_.v[t + 1] + d);
      ATTN_UNROLL
      for (int r = 0; r < R; r++) {
        const float* weight = s.x + r * kShortStep + t;
        const uint32_t both = uint32_t(float_to_bf16(weight[1])) << 16 | float_to_bf16(weight[0]);
        const __m512i pair = _mm512_set1_epi32(int(both));
        sum[r][0] = dot(sum[r][0], x.first, pair);
        sum[r][1] = dot(sum[r][1], x.second, pair);
      }
      if (d == 0) this->rows_.fetch_v(2);
    }
    ATTN_UNROLL
    for (int r = 0; r < R; r++) {
      ATTN_UNROLL
      for (int i = 0; i < 2; i++) store(out + r * dims + d + i * W, sum[r][i]);
    }
  }

  alignas(64) float scores_[kShortStep * R];
};

}  // namespace attn
#endif
