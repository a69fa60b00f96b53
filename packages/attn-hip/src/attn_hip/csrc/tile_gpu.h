// GPU tile: a block of Waves waves, 16 packed rows each, over steps of Step keys staged in shared memory.
//
// bfloat16 query and cache, head dimension D for both; rows of q and of the cache start on 16 bytes.
#pragma once
#include "attend.h"
#include "convert.h"
#if ATTN_AMD
#include "fragment_amd.h"
#else
#include "fragment_nvidia.h"
#endif

namespace attn {

template <int D, int Waves, int Step>
class GpuTile {
 public:
  static constexpr int kKeys = Step, kRows = kFragRows, kHeight = 16 * Waves, kThreads = Waves * kWave;
  static constexpr int kPitch = D + 8;  // spreads rows over the banks
  static constexpr int kPanel = Step * kPitch;
  using Row = float;
  using RowInt = int;
  using Elem = float;

  struct Scores {
    FragC x[Step / 16];
    ATTN_MEMBER static constexpr int cols() { return Step / 16 * kFragCols; }
    ATTN_MEMBER static constexpr int span() { return Step; }
    ATTN_MEMBER float get(int r, int c) const { return x[c / kFragCols].x[r * kFragCols + c % kFragCols]; }
    ATTN_MEMBER void set(int r, int c, float e) { x[c / kFragCols].x[r * kFragCols + c % kFragCols] = e; }
  };

  struct Unit {
    RowFacts<GpuTile> facts;
    RowState<GpuTile> state;
    FragA q[D / kStep];
    FragC out[D / 16];
  };

  ATTN_MEMBER static float row(float x) { return x; }
  ATTN_MEMBER static float elem(float x) { return x; }
  ATTN_MEMBER static float max(float a, float b) { return a > b ? a : b; }
  ATTN_MEMBER static float max_across(float x) { return row_max(x); }
  ATTN_MEMBER static float sum_across(float x) { return row_sum(x); }
  ATTN_MEMBER static float exp2(float x) { return exp2_fast(x); }
  ATTN_MEMBER static float log2(float x) { return log2_fast(x); }
  ATTN_MEMBER static float tanh(float x) {
    const float y = x > 10.f ? 10.f : (x < -10.f ? -10.f : x);
    const float e = exp2_fast(y * (2 * kLog2e));
    return (e - 1.f) / (e + 1.f);
  }
  ATTN_MEMBER static float pick(bool which, float yes, float no) { return which ? yes : no; }
  ATTN_MEMBER static float to_float(int x) { return float(x); }
  ATTN_MEMBER static int key(int kv, int c) { return kv + c / kFragCols * 16 + frag_col(c % kFragCols); }
  ATTN_MEMBER static bool within(int key, int begin, int end) { return key >= begin && key < end; }
  ATTN_MEMBER static bool mask_bits(const uint8_t* bits, const Rows& rows, int query, int key) {
    const int64_t bit = int64_t(query) * rows.kv_len + least(key, rows.kv_len - 1);
    return bits[bit >> 3] >> (bit & 7) & 1;
  }

  ATTN_MEMBER GpuTile(Shared keys, Shared values) : keys_(keys), values_(values) {}
  ATTN_MEMBER static constexpr int heads() { return 1; }
  ATTN_MEMBER static constexpr int units() { return 1; }
  ATTN_MEMBER Unit& unit(int, int) { return unit_; }

  ATTN_MEMBER void open(const AttendParams& p, const WorkItem& item, const Rows& rows) {
    p_ = &p, item_ = &item, rows_ = rows;
    first_ = rows.first + wave_index() * 16;
    last_ = rows.first + rows.count - 1;
    RowFacts<GpuTile>& facts = unit_.facts;
    const uint16_t* q[kFragRows];
    ATTN_UNROLL
    for (int r = 0; r < kRows; r++) {
      const int packed = least(first_ + frag_row(r), last_), query = packed / p.group;
      const Keys seen = keys_of(p, rows, query);
      facts.query[r] = query, facts.begin[r] = seen.begin, facts.end[r] = least(seen.end, item.kv_end);
      facts.slope[r] = p.position == kPositionAlibi ? p.alibi_slopes[item.kv_head * p.group + packed % p.group] : 0.f;
      q[r] = static_cast<const uint16_t*>(p.q) +
             row_offset(p, rows, packed, item.kv_head, p.q_stride_row, p.q_stride_head);
    }
    const Keys low = keys_of(p, rows, least(first_, last_) / p.group);
    const Keys high = keys_of(p, rows, least(first_ + 15, last_) / p.group);
    facts.least_begin = low.begin, facts.most_begin = high.begin;
    facts.least_end = least(low.end, item.kv_end);
    facts.most_end = first_ <= last_ ? least(high.end, item.kv_end) : 0;
    clear<GpuTile>(unit_.state);
    ATTN_UNROLL
    for (int i = 0; i < D / kStep; i++) load_a(unit_.q[i], q, i);
    ATTN_UNROLL
    for (int i = 0; i < D / 16; i++) {
      ATTN_UNROLL
      for (int e = 0; e < kRows * kFragCols; e++) unit_.out[i].x[e] = 0.f;
    }
  }

  ATTN_MEMBER void seek(int kv, int n, int) { kv_ = kv, n_ = n; }

  // Rows behind the last key become zeros; slots there are never read.
  ATTN_MEMBER void stage(int) {
    const auto* k = static_cast<const uint16_t*>(p_->k) + item_->kv_head * p_->k_stride_head;
    const auto* v = static_cast<const uint16_t*>(p_->v) + item_->kv_head * p_->v_stride_head;
    barrier();
    for (int i = thread_index(); i < Step * D / 8; i += kThreads) {
      const int t = i / (D / 8), d = i % (D / 8) * 8;
      Line key = zero_line(), value = zero_line();
      if (t < n_) {
        const Place at = place_of(*p_, item_->request, kv_ + t);
        key = load_line(k + at.k + d);
        value = load_line(v + at.v + d);
      }
      store_line(keys_ + t * kPitch + d, key);
      store_line(values_ + t * kPitch + d, value);
    }
    barrier();
  }

  ATTN_MEMBER Scores scores(const Unit& unit, int) const {
    Scores s;
    ATTN_UNROLL
    for (int n = 0; n < Step / 16; n++) {
      ATTN_UNROLL
      for (int e = 0; e < kRows * kFragCols; e++) s.x[n].x[e] = 0.f;
      ATTN_UNROLL
      for (int k = 0; k < D / kStep; k++) {
        FragB b;
        load_keys(b, keys_, kPitch, n, k);
        multiply(s.x[n], unit.q[k], b);
      }
    }
    return s;
  }

  ATTN_MEMBER void accumulate(Unit& unit, const float (&fade)[kRows], const Scores& s) const {
    ATTN_UNROLL
    for (int i = 0; i < D / 16; i++) {
      ATTN_UNROLL
      for (int e = 0; e < kRows * kFragCols; e++) unit.out[i].x[e] *= fade[e / kFragCols];
    }
    ATTN_UNROLL
    for (int k = 0; k < Step / kStep; k++) {
      FragA weights;
      to_a(weights, &s.x[k * (kStep / 16)]);
      ATTN_UNROLL
      for (int i = 0; i < D / 16; i++) {
        FragB b;
        load_values(b, values_, kPitch, k, i);
        multiply(unit.out[i], weights, b);
      }
    }
  }

  ATTN_MEMBER void close(float scale) {
    ATTN_UNROLL
    for (int r = 0; r < kRows; r++) {
      const int packed = first_ + frag_row(r);
      const float part = share<GpuTile>(unit_.state, r, scale), lse = log_sum<GpuTile>(unit_.state, r);
      if (packed > last_) continue;
      const Sink sink = sink_of(*p_, rows_, *item_, packed, item_->kv_head);
      ATTN_UNROLL
      for (int c = 0; c < D / 16 * kFragCols; c++) {
        const int d = c / kFragCols * 16 + frag_col(c % kFragCols);
        const float x = unit_.out[c / kFragCols].x[r * kFragCols + c % kFragCols];
        store_element(sink.out, sink.offset + d, sink.dtype, x * part);
      }
      if (frag_col(0) == 0 && sink.lse) *sink.lse = lse;
    }
  }

 private:
  const AttendParams* p_;
  const WorkItem* item_;
  Rows rows_;
  Unit unit_;
  Shared keys_, values_;
  int first_, last_, kv_, n_;
};

}  // namespace attn
