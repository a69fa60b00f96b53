// CPU tile with query rows in the lanes of a vector: for five rows and more.
//
// Queries and outputs are kept transposed, [dim][row]. A product then is "broadcast one element of a key (or value),
// multiply with a vector of rows": K and V are read as they lie, nothing is packed, and the softmax needs no
// reduction across lanes. Every sum runs over one chain in the order of dims (scores) or keys (outputs), so neither
// the vector width nor the number of vectors changes a bit.
#pragma once
#include "tile_cpu.h"

namespace attn {

// N vectors of W rows.
template <int W, int N>
struct RowLanes {
  static constexpr int kRows = N, kHeight = W * N;
  using Row = vf<W>;
  using RowInt = vi<W>;
  using Elem = vf<W>;

  struct Scores {  // [key][row]
    float* x;
    int n;
    int cols() const { return n; }
    int span() const { return n; }
    Elem get(int r, int c) const { return load<W>(x + c * kHeight + r * W); }
    void set(int r, int c, Elem e) { store(x + c * kHeight + r * W, e); }
  };

  static Row row(float x) { return splat<W>(x); }
  static Elem elem(float x) { return splat<W>(x); }
  static Elem max(Elem a, Elem b) { return greater<W>(a, b); }
  static Row max_across(Elem x) { return x; }
  static Row sum_across(Elem x) { return x; }
  static Elem exp2(Elem x) { return attn::exp2<W>(x); }
  static Elem log2(Elem x) { return attn::log2<W>(x); }
  static Elem tanh(Elem x) { return attn::tanh<W>(x); }
  static Elem pick(RowInt which, Elem yes, Elem no) { return which ? yes : no; }
  static Elem to_float(RowInt x) { return attn::to_float<W>(x); }
  static int key(int kv, int c) { return kv + c; }
  static RowInt within(int key, RowInt begin, RowInt end) {
    const RowInt at = splat_int<W>(key);
    return (at >= begin) & (at < end);
  }
  static RowInt mask_bits(const uint8_t* bits, const Rows& rows, RowInt query, int key) {
    RowInt seen;
    for (int i = 0; i < W; i++) {
      const int64_t bit = int64_t(query[i]) * rows.kv_len + key;
      seen[i] = -int(bits[bit >> 3] >> (bit & 7) & 1);
    }
    return seen;
  }
};

template <int W, int N, bool Staged, int Step>
class RowTile : public CpuTile<RowTile<W, N, Staged, Step>, float, Staged, Step>, public RowLanes<W, N> {
  using Lanes = RowLanes<W, N>;

 public:
  using Lanes::kHeight;
  using Lanes::kRows;
  using typename Lanes::Row;
  using typename Lanes::Scores;
  using Unit = CpuUnit<RowTile>;
  using CpuTile<RowTile, float, Staged, Step>::CpuTile;

  static size_t q_size(const AttendParams& p) { return size_t(p.head_dim_qk) * kHeight; }
  static size_t out_size(const AttendParams& p) { return size_t(p.head_dim_vo) * kHeight; }
  static void set_query(const AttendParams& p, void* q, int i, const float* row) {
    for (int d = 0; d < p.head_dim_qk; d++) static_cast<float*>(q)[d * kHeight + i] = row[d];
  }
  static void get_out(const AttendParams& p, const float* out, int i, float share, float* row) {
    for (int d = 0; d < p.head_dim_vo; d++) row[d] = out[d * kHeight + i] * share;
  }

  Scores scores(const Unit& unit, int kv) {
    const int n = this->depth(unit, kv);
    for (int t = 0; t < n; t += kKeyBlock) {
      score_block(this->rows_.k + t, static_cast<const float*>(unit.q), this->p_->head_dim_qk, scores_ + t * kHeight);
      if (!Staged) this->rows_.fetch_k(kKeyBlock);
    }
    return {scores_, n};
  }

  void accumulate(Unit& unit, const Row (&fade)[kRows], const Scores& s) {
    const int dims = this->p_->head_dim_vo;
    int d = 0;
    for (; dims - d >= kDimBlock && dims - d != 8; d += kDimBlock) {
      output_block<kDimBlock>(d, fade, s, unit.out);
      if (!Staged) this->rows_.fetch_v(2);
    }
    for (; dims - d >= 4; d += 4) output_block<4>(d, fade, s, unit.out);
    for (; dims - d >= 1; d += 1) output_block<1>(d, fade, s, unit.out);
  }

 private:
  // Dims of outputs, and keys of scores, whose sums one pass holds in registers.
  static constexpr int kDimBlock = W == 16 && N == 2 ? 12 : N == 1 ? 8 : 6;
  static constexpr int kKeyBlock = Step % kDimBlock == 0 ? kDimBlock : kDimBlock == 12 ? 8 : 4;
  static_assert(Step % kKeyBlock == 0, "a step is whole blocks");

  static void score_block(const float* const* k, const float* q, int dims, float* to) {
    Row sum[kKeyBlock][N];
    const float* key[kKeyBlock];
    ATTN_UNROLL
    for (int t = 0; t < kKeyBlock; t++) {
      key[t] = k[t];
      ATTN_UNROLL
      for (int r = 0; r < N; r++) sum[t][r] = splat<W>(0.f);
    }
    for (int d = 0; d < dims; d++, q += kHeight) {
      Row query[N];
      ATTN_UNROLL
      for (int r = 0; r < N; r++) query[r] = load<W>(q + r * W);
      ATTN_UNROLL
      for (int t = 0; t < kKeyBlock; t++) {
        const Row x = splat<W>(key[t][d]);
        ATTN_UNROLL
        for (int r = 0; r < N; r++) sum[t][r] = fma<W>(x, query[r], sum[t][r]);
      }
    }
    ATTN_UNROLL
    for (int t = 0; t < kKeyBlock; t++) {
      ATTN_UNROLL
      for (int r = 0; r < N; r++) store(to + t * kHeight + r * W, sum[t][r]);
    }
  }

  template <int D>
  void output_block(int d, const Row (&fade)[kRows], const Scores& s, float* out) const {
    Row sum[D][N];
    ATTN_UNROLL
    for (int i = 0; i < D; i++) {
      ATTN_UNROLL
      for (int r = 0; r < N; r++) sum[i][r] = load<W>(out + (d + i) * kHeight + r * W) * fade[r];
    }
    for (int t = 0; t < s.n; t++) {
      const float* value = this->rows_.v[t] + d;
      Row weight[N];
      ATTN_UNROLL
      for (int r = 0; r < N; r++) weight[r] = s.get(r, t);
      ATTN_UNROLL
      for (int i = 0; i < D; i++) {
        const Row x = splat<W>(value[i]);
        ATTN_UNROLL
        for (int r = 0; r < N; r++) sum[i][r] = fma<W>(x, weight[r], sum[i][r]);
      }
    }
    ATTN_UNROLL
    for (int i = 0; i < D; i++) {
      ATTN_UNROLL
      for (int r = 0; r < N; r++) store(out + (d + i) * kHeight + r * W, sum[i][r]);
    }
  }

  alignas(64) float scores_[Step * kHeight];
};

}  // namespace attn
