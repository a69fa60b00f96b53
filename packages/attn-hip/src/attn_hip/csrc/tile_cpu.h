// What the CPU tiles share: scratch, the rows of keys and values that a step reads, and the units' bookkeeping.
#pragma once
#include "attend.h"
#include "rope.h"
#include "vec.h"

namespace attn {

// Keys that one step takes. A decode reads all heads of a step before the next step, and that must stay in a core's
// L2 together with what is fetched ahead; a prefill has more to gain from long steps. Which one a request gets
// follows from its own size.
constexpr int kShortStep = 16, kLongStep = 48;

ATTN_DEVICE int round_up(int n, int step) { return (n + step - 1) / step * step; }

// Hands out pieces of a thread's scratch.
class Arena {
 public:
  explicit Arena(void* at) : at_(static_cast<char*>(at)) {}
  template <class T>
  T* take(size_t n) {
    T* piece = reinterpret_cast<T*>(at_);
    at_ += (n * sizeof(T) + 63) / 64 * 64;
    return piece;
  }
  size_t taken(const void* from) const { return size_t(at_ - static_cast<const char*>(from)); }

 private:
  char* at_;
};

// Rows of K and V of one step and one head, as elements E. Staged rows are float copies, padded with zeros to a
// multiple of the vector width and rotated where RoPE asks for it; others are read where they lie. Rows behind the
// last key are zeros: slots there are never read.
template <class E, bool Staged, int Step>
class KeyRows {
 public:
  const E* k[Step];
  const E* v[Step];

  void open(const AttendParams& p, const WorkItem& item, Arena& arena) {
    p_ = &p, item_ = &item;
    size_ = element_size(p.kv_dtype);
    qk_pad_ = round_up(p.head_dim_qk, kWide), vo_pad_ = round_up(p.head_dim_vo, kWide);
    const size_t longest = size_t(most(qk_pad_, vo_pad_));
    zeros_ = arena.take<float>(longest);
    std::memset(zeros_, 0, longest * sizeof(float));
    for (auto& places : places_) places = arena.take<Place>(Step);
    if (!Staged) return;
    k_panel_ = arena.take<float>(size_t(Step) * (qk_pad_ + kGap));
    v_panel_ = arena.take<float>(size_t(Step) * (vo_pad_ + kGap));
    if (p.position == kPositionRope) {
      cosine_ = arena.take<float>(size_t(Step) * p.head_dim_qk / 2);
      sine_ = arena.take<float>(size_t(Step) * p.head_dim_qk / 2);
    }
  }

  // Moves to tokens [kv, kv + n) of [.., end).
  void seek(int kv, int n, int end) {
    if (next_ == kv) {
      Place* now = places_[1];
      places_[1] = places_[0], places_[0] = now;
    } else {
      find(kv, n, places_[0]);
    }
    n_ = n, next_ = kv + n;
    const int next_n = most(0, least(Step, end - next_));
    find(next_, next_n, places_[1]);
    ahead_k_.start(p_->k, p_->head_dim_qk, p_->k_stride_head, p_->k_stride_token, next_n);
    ahead_v_.start(p_->v, p_->head_dim_vo, p_->v_stride_head, p_->v_stride_token, next_n);
    if (Staged && p_->position == kPositionRope) {
      const int half = p_->head_dim_qk / 2;
      for (int t = 0; t < n; t++) rotation(p_->rope_turns, kv + t, half, cosine_ + t * half, sine_ + t * half);
    }
  }

  // Points k and v at the rows of the item's h-th head.
  void stage(int h) {
    const char* k_head = row(p_->k, (item_->kv_head + h) * p_->k_stride_head);
    const char* v_head = row(p_->v, (item_->kv_head + h) * p_->v_stride_head);
    for (int t = 0; t < n_; t++) {
      const char* k_row = row(k_head, places_[0][t].k);
      const char* v_row = row(v_head, places_[0][t].v);
      if constexpr (Staged) {
        fetch_k(1);
        fetch_v(1);
        k[t] = copy(k_panel_ + t * (qk_pad_ + kGap), k_row, p_->head_dim_qk, qk_pad_);
        v[t] = copy(v_panel_ + t * (vo_pad_ + kGap), v_row, p_->head_dim_vo, vo_pad_);
        const int half = p_->head_dim_qk / 2;
        if (p_->position == kPositionRope)
          rotate(k_panel_ + t * (qk_pad_ + kGap), cosine_ + t * half, sine_ + t * half, half);
      } else {
        k[t] = reinterpret_cast<const E*>(k_row);
        v[t] = reinterpret_cast<const E*>(v_row);
      }
    }
    for (int t = n_; t < Step; t++) k[t] = v[t] = reinterpret_cast<const E*>(zeros_);
  }

  // Ask for the next rows of the step ahead, to be spread over the work on this one.
  void fetch_k(int rows) {
    for (; rows > 0 && ahead_k_.token < ahead_k_.tokens; rows--)
      fetch(row(ahead_k_.base, places_[1][ahead_k_.token].k + ahead_k_.head * ahead_k_.stride), ahead_k_);
  }
  void fetch_v(int rows) {
    for (; rows > 0 && ahead_v_.token < ahead_v_.tokens; rows--)
      fetch(row(ahead_v_.base, places_[1][ahead_v_.token].v + ahead_v_.head * ahead_v_.stride), ahead_v_);
  }

 private:
  static constexpr int kGap = 16;  // keeps rows of a power-of-two size out of each other's cache set

  // The row of the step ahead that is to be fetched next, in the order of memory.
  struct Ahead {
    const void* base;
    int64_t stride;  // of heads
    int dim, token, head, tokens;
    bool heads_first;  // the heads of a token lie together (NHD)

    void start(const void* at, int head_dim, int64_t stride_head, int64_t stride_token, int n) {
      base = at, dim = head_dim, stride = stride_head;
      heads_first = stride_head < stride_token;
      token = head = 0, tokens = n;
    }
    void move(int heads) {
      if (heads_first) {
        if (++head == heads) head = 0, token++;
      } else if (++token == tokens && ++head < heads) {
        token = 0;
      }
    }
  };

  void fetch(const char* at, Ahead& ahead) {
    at += item_->kv_head * ahead.stride * size_;
    for (int i = 0; i < ahead.dim * size_; i += 64) prefetch(at + i);
    ahead.move(item_->num_heads);
  }

  const char* row(const void* base, int64_t offset) const { return static_cast<const char*>(base) + offset * size_; }

  const E* copy(float* to, const char* from, int n, int padded) const {
    load_row(to, from, p_->kv_dtype, n);
    for (int i = n; i < padded; i++) to[i] = 0.f;
    return reinterpret_cast<const E*>(to);
  }

  void find(int token, int n, Place* to) const {
    const AttendParams& p = *p_;
    for (int t = 0; t < n;) {
      to[t] = place_of(p, item_->request, token + t);
      const int run = p.page_size ? least(n - t, p.page_size - (token + t) % p.page_size) : n - t;
      for (int i = 1; i < run; i++)
        to[t + i] = {to[t].k + i * p.k_stride_token, to[t].v + i * p.v_stride_token};
      t += run;
    }
  }

  const AttendParams* p_;
  const WorkItem* item_;
  int size_, qk_pad_, vo_pad_;
  float* zeros_;
  float *k_panel_, *v_panel_, *cosine_, *sine_;
  Place* places_[2];  // of this step and of the one ahead
  int n_ = 0, next_ = -1;
  Ahead ahead_k_, ahead_v_;
};

template <class T>
struct CpuUnit {
  RowFacts<T> facts;
  RowState<T> state;
  void* q;
  float* out;
  int first, count, kv_head;  // packed rows
};

// Facts of rows [first, first + count) in the order of T's lanes; places behind the last row repeat it.
template <class T>
static void fill_facts(RowFacts<T>& facts, const AttendParams& p, const WorkItem& item, const Rows& rows, int first,
                       int count, int kv_head) {
  int query[T::kHeight], begin[T::kHeight], end[T::kHeight];
  float slope[T::kHeight];
  facts.least_begin = facts.least_end = 0x7fffffff;
  facts.most_begin = facts.most_end = 0;
  for (int i = 0; i < T::kHeight; i++) {
    const int packed = first + least(i, count - 1);
    query[i] = packed / p.group;
    const Keys keys = keys_of(p, rows, query[i]);
    begin[i] = keys.begin, end[i] = least(keys.end, item.kv_end);
    slope[i] = p.position == kPositionAlibi ? p.alibi_slopes[kv_head * p.group + packed % p.group] : 0.f;
    facts.least_begin = least(facts.least_begin, begin[i]), facts.most_begin = most(facts.most_begin, begin[i]);
    facts.least_end = least(facts.least_end, end[i]), facts.most_end = most(facts.most_end, end[i]);
  }
  std::memcpy(facts.query, query, sizeof(query));
  std::memcpy(facts.begin, begin, sizeof(begin));
  std::memcpy(facts.end, end, sizeof(end));
  std::memcpy(facts.slope, slope, sizeof(slope));
}

// Query row `packed` as float, rotated where RoPE asks for it. `to` has room for two heads.
static inline void load_query(float* to, const AttendParams& p, const Rows& rows, int packed, int kv_head) {
  const int64_t at = row_offset(p, rows, packed, kv_head, p.q_stride_row, p.q_stride_head);
  load_row(to, static_cast<const char*>(p.q) + at * element_size(p.q_dtype), p.q_dtype, p.head_dim_qk);
  if (p.position != kPositionRope) return;
  const int half = p.head_dim_qk / 2, position = rows.kv_len - rows.q_len + packed / p.group;
  float* cosine = to + p.head_dim_qk;
  rotation(p.rope_turns, position, half, cosine, cosine + half);
  rotate(to, cosine, cosine + half, half);
}

static inline void store_result(const Sink& sink, const float* row, int n, float lse) {
  store_row(static_cast<char*>(sink.out) + sink.offset * element_size(sink.dtype), row, sink.dtype, n);
  if (sink.lse) *sink.lse = lse;
}

// A tile: units of `Self::kHeight` packed rows for each head of the item. Self adds scores() and accumulate().
template <class Self, class E, bool Staged, int Step>
class CpuTile {
 public:
  static constexpr int kKeys = Step;
  static constexpr bool kPlain = false, kFolds = false, kPatient = false, kNeverIdle = false;
  static const AttendParams& late(const AttendParams& p) { return p; }

  CpuTile(Arena arena) : arena_(arena) {}
  int heads() const { return item_->num_heads; }
  int units() const { return per_head_; }
  CpuUnit<Self>& unit(int h, int u) { return units_[h * per_head_ + u]; }
  void seek(int kv, int n, int end) { n_ = n, rows_.seek(kv, n, end); }
  void stage(int h) { rows_.stage(h); }

  void open(const AttendParams& p, const WorkItem& item, const Rows& rows) {
    p_ = &p, item_ = &item, packed_ = rows;
    row_ = arena_.take<float>(size_t(2 * round_up(most(p.head_dim_qk, p.head_dim_vo), kWide)));
    per_head_ = round_up(most(rows.count, 0), Self::kHeight) / Self::kHeight;
    units_ = arena_.take<CpuUnit<Self>>(size_t(per_head_ * item.num_heads));
    const size_t q_size = Self::q_size(p), out_size = Self::out_size(p);
    for (int h = 0; h < item.num_heads; h++) {
      for (int u = 0; u < per_head_; u++) {
        CpuUnit<Self>& it = unit(h, u);
        it.kv_head = item.kv_head + h;
        it.first = rows.first + u * Self::kHeight;
        it.count = least(Self::kHeight, rows.first + rows.count - it.first);
        it.q = arena_.take<float>(q_size);
        it.out = arena_.take<float>(out_size);
        std::memset(it.out, 0, out_size * sizeof(float));
        fill_facts<Self>(it.facts, p, item, rows, it.first, it.count, it.kv_head);
        clear<Self>(it.state);
        for (int i = 0; i < Self::kHeight; i++) {
          if (i < it.count) load_query(row_, p, rows, it.first + i, it.kv_head);
          else std::memset(row_, 0, size_t(p.head_dim_qk) * sizeof(float));
          Self::set_query(p, it.q, i, row_);
        }
      }
    }
    rows_.open(p, item, arena_);
  }

  void close(float scale) {
    for (int i = 0; i < per_head_ * item_->num_heads; i++) {
      const CpuUnit<Self>& it = units_[i];
      float shares[Self::kHeight], lse[Self::kHeight];
      for (int r = 0; r < Self::kRows; r++) {
        const typename Self::Row part = share<Self>(it.state, r, scale), sum = log_sum<Self>(it.state, r);
        std::memcpy(shares + r * sizeof(part) / 4, &part, sizeof(part));
        std::memcpy(lse + r * sizeof(sum) / 4, &sum, sizeof(sum));
      }
      for (int j = 0; j < it.count; j++) {
        Self::get_out(*p_, it.out, j, shares[j], row_);
        store_result(sink_of(*p_, packed_, *item_, it.first + j, it.kv_head), row_, p_->head_dim_vo, lse[j]);
      }
    }
  }

 protected:
  const AttendParams* p_;
  const WorkItem* item_;
  Rows packed_;
  KeyRows<E, Staged, Step> rows_;
  int n_ = 0;  // keys of this tile
  // Keys of this tile that some row of the unit may see, or that lie before one.
  int depth(const CpuUnit<Self>& unit, int kv) const { return least(n_, unit.facts.most_end - kv); }

 private:
  Arena arena_;
  CpuUnit<Self>* units_;
  int per_head_;
  float* row_;
};

// Bytes that a tile of `rows` packed rows and `heads` heads can take, whatever its kind.
static inline size_t tile_bytes(const AttendParams& p, int heads) {
  const size_t qk = size_t(round_up(p.head_dim_qk, 32)), vo = size_t(round_up(p.head_dim_vo, 32));
  const size_t rows = size_t(round_up(p.tile_q, 32)) * size_t(heads);
  const size_t panels = size_t(kLongStep) * (qk + vo + 64 + qk) * sizeof(float) + 2 * kLongStep * sizeof(Place);
  return rows * ((qk + vo) * sizeof(float) + 512) + panels + 4 * (qk + vo) * sizeof(float) + 4096;
}

}  // namespace attn
