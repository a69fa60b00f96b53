// CPU tile with head dimensions in the lanes of a vector: for one to four query rows, where rows would leave most
// lanes empty. Reads a cache of 8 or 16 bits where it lies, widening as it loads.
#pragma once
#include "tile_cpu.h"

namespace attn {

// R rows; scores of W neighbouring keys in a vector.
template <int R>
struct DimLanes {
  static constexpr int W = kWide;
  static constexpr int kRows = R, kHeight = R;
  using Row = float;
  using RowInt = int32_t;
  using Elem = vf<W>;

  struct Scores {  // [row][key]
    float* x;
    int n;
    int cols() const { return (n + W - 1) / W; }
    int span() const { return cols() * W; }
    Elem get(int r, int c) const { return load<W>(x + r * kShortStep + c * W); }
    void set(int r, int c, Elem e) { store(x + r * kShortStep + c * W, e); }
  };

  static Row row(float x) { return x; }
  static Elem elem(float x) { return splat<W>(x); }
  static Elem max(Elem a, Elem b) { return greater<W>(a, b); }
  static Row max(Row a, Row b) { return greater(a, b); }
  static Row max_across(Elem x) { return max_of<W>(x); }
  static Row sum_across(Elem x) { return sum_of<W>(x); }
  static Elem exp2(Elem x) { return attn::exp2<W>(x); }
  static Row exp2(Row x) { return attn::exp2(x); }
  static Row log2(Row x) { return attn::log2(x); }
  static Elem tanh(Elem x) { return attn::tanh<W>(x); }
  static Row pick(bool which, Row yes, Row no) { return which ? yes : no; }
  static Elem pick(vi<W> which, Elem yes, Elem no) { return which ? yes : no; }
  static Elem to_float(vi<W> x) { return attn::to_float<W>(x); }
  static vi<W> key(int kv, int c) { return count_up<W>() + (kv + c * W); }
  static vi<W> within(vi<W> key, int begin, int end) { return (key >= begin) & (key < end); }
  static vi<W> mask_bits(const uint8_t* bits, const Rows& rows, int query, vi<W> key) {
    vi<W> seen;
    for (int i = 0; i < W; i++) {
      // Lanes behind the last key are masked already; they must not read behind the bits.
      const int64_t bit = int64_t(query) * rows.kv_len + least(key[i], rows.kv_len - 1);
      seen[i] = -int(bits[bit >> 3] >> (bit & 7) & 1);
    }
    return seen;
  }
};

template <int R, class E, bool Staged>
class DimTile : public CpuTile<DimTile<R, E, Staged>, E, Staged, kShortStep>, public DimLanes<R> {
  using Lanes = DimLanes<R>;
  using Lanes::W;

 public:
  using Lanes::kRows;
  using typename Lanes::Row;
  using typename Lanes::Scores;
  using Unit = CpuUnit<DimTile>;
  using CpuTile<DimTile, E, Staged, kShortStep>::CpuTile;

  static size_t q_size(const AttendParams& p) { return size_t(round_up(p.head_dim_qk, W)) * R; }
  static size_t out_size(const AttendParams& p) { return size_t(round_up(p.head_dim_vo, W)) * R; }
  static void set_query(const AttendParams& p, void* q, int i, const float* row) {
    const int padded = round_up(p.head_dim_qk, W);
    for (int d = 0; d < padded; d++) static_cast<float*>(q)[i * padded + d] = d < p.head_dim_qk ? row[d] : 0.f;
  }
  static void get_out(const AttendParams& p, const float* out, int i, float share, float* row) {
    const int padded = round_up(p.head_dim_vo, W);
    for (int d = 0; d < p.head_dim_vo; d++) row[d] = out[i * padded + d] * share;
  }

  Scores scores(const Unit& unit, int kv) {
    const int n = this->depth(unit, kv);
    const int padded = round_up(this->p_->head_dim_qk, W);
    for (int t = 0; t < round_up(n, W); t += kKeyBlock) {
      score_block(this->rows_.k + t, static_cast<const float*>(unit.q), padded, scores_ + t);
      if (!Staged) this->rows_.fetch_k(kKeyBlock);
    }
    return {scores_, n};
  }

  void accumulate(Unit& unit, const Row (&fade)[kRows], const Scores& s) {
    const int padded = round_up(this->p_->head_dim_vo, W);
    int d = 0;
    for (; d + kVectors * W <= padded; d += kVectors * W) output_block<kVectors>(d, padded, fade, s, unit.out);
    for (; d < padded; d += W) output_block<1>(d, padded, fade, s, unit.out);
  }

 private:
  static constexpr int kKeyBlock = 8 / R;     // keys of a block of scores: eight sums in registers
  static constexpr int kVectors = 8 / R;  // vectors of a block of outputs, likewise

  static void score_block(const E* const* k, const float* q, int padded, float* to) {
    vf<W> sum[8];
    const E* key[kKeyBlock];
    ATTN_UNROLL
    for (int i = 0; i < 8; i++) sum[i] = splat<W>(0.f);
    ATTN_UNROLL
    for (int t = 0; t < kKeyBlock; t++) key[t] = k[t];
    for (int d = 0; d < padded; d += W) {
      vf<W> x[kKeyBlock];
      ATTN_UNROLL
      for (int t = 0; t < kKeyBlock; t++) x[t] = widen<W>(key[t] + d);
      ATTN_UNROLL
      for (int r = 0; r < R; r++) {
        const vf<W> query = load<W>(q + r * padded + d);
        ATTN_UNROLL
        for (int t = 0; t < kKeyBlock; t++) sum[r * kKeyBlock + t] = fma<W>(x[t], query, sum[r * kKeyBlock + t]);
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

  template <int V>
  void output_block(int d, int padded, const Row (&fade)[kRows], const Scores& s, float* out) {
    vf<W> sum[R][V];
    ATTN_UNROLL
    for (int r = 0; r < R; r++) {
      ATTN_UNROLL
      for (int i = 0; i < V; i++) sum[r][i] = load<W>(out + r * padded + d + i * W) * fade[r];
    }
    for (int t = 0; t < s.n; t++) {
      const E* value = this->rows_.v[t] + d;
      vf<W> x[V];
      ATTN_UNROLL
      for (int i = 0; i < V; i++) x[i] = widen<W>(value + i * W);
      ATTN_UNROLL
      for (int r = 0; r < R; r++) {
        const vf<W> weight = splat<W>(s.x[r * kShortStep + t]);
        ATTN_UNROLL
        for (int i = 0; i < V; i++) sum[r][i] = fma<W>(x[i], weight, sum[r][i]);
      }
      if (!Staged && d == 0) this->rows_.fetch_v(1);
    }
    ATTN_UNROLL
    for (int r = 0; r < R; r++) {
      ATTN_UNROLL
      for (int i = 0; i < V; i++) store(out + r * padded + d + i * W, sum[r][i]);
    }
  }

  alignas(64) float scores_[kShortStep * R];
};

}  // namespace attn
