// The way of keys and values from the cache into shared memory, one step at a time and ahead of its use.
//
// The waves of a block form KeyGroups groups, each with its share of the keys of a step and panels for them. Each wave
// moves kWaveKeys keys into its group's panels, so a group waits for nobody else.
// A line travels one of three ways:
//   async    the hardware copies it into a ring of Steps panels (NVIDIA, cache of the query's type);
//   ahead    it waits in registers for the panel to be free: one step is on its way while the last is worked on;
//   at once  as ahead, but without the wait, where the registers are needed otherwise: for more waves, say.
#pragma once
#include "rows.h"
#if ATTN_AMD
#include "fragment_amd.h"
namespace attn {
constexpr bool kHasGroupProducts = false;
template <class E, int D>
struct GroupProducts;
}  // namespace attn
#else
#include "fragment_nvidia.h"
#include "group_nvidia.h"
#endif

namespace attn {

template <int T>
struct TypeOf {
  static constexpr int kDType = T;
};

// x / d by a product. Exact for 0 <= x < 2^31.
struct Divider {
  uint32_t divisor, inverse;
  ATTN_MEMBER explicit Divider(int d) : divisor(uint32_t(most(d, 1))), inverse(0xffffffffu / divisor) {}
  ATTN_MEMBER int of(int x) const {
    const uint32_t q = high_product(uint32_t(x), inverse);
    return int(uint32_t(x) - q * divisor >= divisor ? q + 1 : q);
  }
};

// Page and slot of the one token of a step that a lane looks up for its wave. Ragged: page 0 and the row of k.
class PageLookup {
 public:
  ATTN_MEMBER PageLookup(const AttendParams& p, int request)
      : page_size_(p.page_size), start_(p.kv_indptr[request]), indices_(p.kv_indices) {}
  int page, slot;
  ATTN_MEMBER void look(int token, bool exists) {
    page = 0, slot = start_ + token;
    if (!indices_) return;
    const int entry = page_size_.of(token);
    slot = token - entry * int(page_size_.divisor);
    if (exists) page = indices_[start_ + entry];
  }

 private:
  Divider page_size_;
  int start_;
  const int32_t* indices_;
};

// Of each of `Rows` lines the first n elements of `size` bytes, one by one, and zeros behind them. For what does not
// start on 16 bytes or ends within them.
template <int Rows>
ATTN_DEVICE void load_elements(Line (&lines)[Rows], const char* const (&from)[Rows], int n, int size) {
  ATTN_UNROLL
  for (int r = 0; r < Rows; r++) lines[r] = {{0, 0, 0, 0}};
  ATTN_ROLL
  for (int i = 0; i < n; i++) {
    const int bit = i * size * 8;
    ATTN_UNROLL
    for (int r = 0; r < Rows; r++) {
      const uint32_t x = size == 2 ? *global(reinterpret_cast<const uint16_t*>(from[r] + 2 * i))
                                   : *global(reinterpret_cast<const uint8_t*>(from[r] + i));
      ATTN_UNROLL
      for (int w = 0; w < 4; w++) lines[r].x[w] |= bit / 32 == w ? x << (bit & 31) : 0;
    }
  }
}
ATTN_DEVICE Line load_elements(const char* from, int n, int size) {
  Line line[1];
  load_elements(line, {from}, n, size);
  return line[0];
}

template <class E, int D, int Waves, int KeyGroups, int Steps, bool General, bool Fp8>
class Stager : KeptWave {
 public:
  static constexpr bool kAlone = KeyGroups == Waves;  // each wave is a group
  static constexpr int kGroupWaves = Waves / KeyGroups;
  static constexpr int kWaveKeys = kHasAsyncCopy || D < 256 || kAlone ? 16 : 8;
  static constexpr int kKeys = Waves * kWaveKeys, kPanelKeys = kKeys / KeyGroups;
  using Frags = Fragments<E, D, kPanelKeys>;
  static constexpr bool kAsync = kHasAsyncCopy && !General && !Fp8;
  static constexpr bool kAhead = !kAsync && (kHasAsyncCopy ? D < 256 : !kAlone && !(General && D == 256));
  // Whether the four waves of a group work on one product together, with panels for operands.
  static constexpr bool kTogether = kHasGroupProducts && kAsync && kGroupWaves == 4 && D <= 128;
  static constexpr int kStages = kAsync ? Steps : 1;
  // Keys go from the cache to where the product wants them, without a panel between.
  static constexpr bool kDirect = kKeysFromGlobal && kAlone && !General;
  static_assert(!(kDirect && kAhead), "direct keys stay where they were loaded to until the next step");
  static constexpr int kValueBytes = KeyGroups * Frags::kPanelBytes, kKeyBytes = kDirect ? 0 : kValueBytes;
  static constexpr int kStageBytes = kKeyBytes + kValueBytes, kBytes = kStages * kStageBytes;
  static constexpr bool kApart = !kAhead && !kAsync && General;  // keys are put before values are loaded
  static constexpr int kElems = Fp8 && !General ? 16 : 8;  // of a line on its way

  ATTN_MEMBER Stager(const AttendParams& p, const WorkItem& item, Shared shared, Keys keys)
      : p_(p), shared_(shared), pages_(p, item.request), next_(keys.begin), end_(keys.end) {
    size_ = General ? element_size(p.kv_dtype) : kSize;
    k_ = static_cast<const char*>(p.k) + item.kv_head * p.k_stride_head * size_;
    v_ = static_cast<const char*>(p.v) + item.kv_head * p.v_stride_head * size_;
    const int64_t places = p.k_stride_page | p.k_stride_token | p.k_stride_head | p.v_stride_page | p.v_stride_token |
                           p.v_stride_head;
    const uint64_t bits = uint64_t(places * size_) | reinterpret_cast<uint64_t>(p.k) | reinterpret_cast<uint64_t>(p.v);
    aligned_ = kLoadsAnywhere || bits % 16 == 0;
    if (kAsync || next_ < end_) look_up(next_);
    if constexpr (kAsync) {
      ATTN_ROLL
      for (int s = 0; s + 1 < kStages; s++) start(s);
    }
    if constexpr (kAhead) fetch();
  }

  // Makes the next step's keys and values readable; starts on a later step.
  ATTN_MEMBER void advance() {
    if constexpr (kAsync) {
      await_copies<kStages - 2>();
      if constexpr (kTogether) GroupProducts<E, D>::show();
      join();  // the step is there for all, and no one reads the panel that is written next
      stage_ = stage_ + 1 == kStages ? 0 : stage_ + 1;
      start(stage_ == 0 ? kStages - 1 : stage_ - 1);
    } else {
      join();
      if constexpr (!kAhead) fetch();
      put();
      join();
      if constexpr (kAhead) fetch();
    }
  }
  // Before shared memory serves something else.
  ATTN_MEMBER void finish() {
    if constexpr (kAsync) await_copies<0>();
    barrier();
  }

  // Where kDirect: the line of the k-th product that this lane has of its key, and which line of a row that is.
  ATTN_MEMBER static int direct_line(int k) {
    constexpr int n = kElems / 8;
    return (k / n * (kWave / 16) + lane_index() / 16) * n + k % n;
  }
  template <int T>
  ATTN_MEMBER Line key_line(int k) const { return widened<T>(key_[k / (kElems / 8)], k % (kElems / 8)); }
  // Calls `use` with the cache's type as a constant: a question for all that is done, and not for each line, so that no
  // results have to meet in the same registers.
  template <class Use>
  ATTN_MEMBER void typed(Use use) const {
    if constexpr (!General && !Fp8) {
      use(TypeOf<E::kDType>());
      return;
    }
    if (General && size_ == 2) return branch<E::kDType>(use);
    switch (params().kv_dtype) {
      case kFloat8E4M3FN: return branch<kFloat8E4M3FN>(use);
      case kFloat8E4M3FNUZ: return branch<kFloat8E4M3FNUZ>(use);
      case kFloat8E5M2: return branch<kFloat8E5M2>(use);
      default: return branch<kFloat8E5M2FNUZ>(use);
    }
  }
  // Which keys a wave works on, and among the waves of those keys which rows.
  ATTN_MEMBER static int key_group() { return key_group(wave_index()); }
  ATTN_MEMBER static int row_group() { return row_group(wave_index()); }

  ATTN_MEMBER Shared keys() const { return panel(kAsync ? stage_ : 0); }
  ATTN_MEMBER Shared values() const { return keys() + kKeyBytes; }
  ATTN_MEMBER void join() const {
    if constexpr (kAlone) wave_barrier();
    else if constexpr (KeyGroups > 1) GroupProducts<E, D>::join(key_group());
    else barrier();
  }

 private:
  static constexpr int kSize = Fp8 ? 1 : 2;
  static constexpr int kLines = D / kElems;                // of a row
  static constexpr int kRows = kWaveKeys * kLines / kWave;  // neighbouring rows of a lane
  static constexpr int kKeyLines = kLines * 16 / kWave;    // of a lane where kDirect
  static_assert(kRows >= 1, "a wave has work for every lane");

  // A group is four neighbouring waves where there are eight, for what such neighbours do at once.
  ATTN_MEMBER static int key_group(int wave) {
    if constexpr (KeyGroups == 1) return 0;
    else return kAlone ? wave % KeyGroups : wave / kGroupWaves;
  }
  ATTN_MEMBER static int row_group(int wave) {
    if constexpr (KeyGroups == 1) return wave;
    else return kAlone ? 0 : wave % kGroupWaves;
  }
  // Places in shared memory, which depend on the wave, stay in registers where there are some; else they are worked out
  // at every step.
  static constexpr bool kKeepsPlaces = !General && (!kAlone || D <= 64 || (Fp8 && D <= 128));
  ATTN_MEMBER int wave() const { return kKeepsPlaces ? kept_wave() : wave_index(); }
  ATTN_MEMBER static int line() { return lane_index() % kLines; }
  ATTN_MEMBER static int row() { return lane_index() / kLines * kRows; }
  ATTN_MEMBER int panel_row() const { return row_group(wave()) * kWaveKeys + row(); }
  ATTN_MEMBER Shared panel(int stage) const {
    return shared_ + stage * kStageBytes + key_group(wave()) * Frags::kPanelBytes;
  }

  ATTN_MEMBER const AttendParams& params() const {
    if constexpr (General) return argument_again(p_);
    else return p_;
  }
  // The first key of a step that this wave moves.
  ATTN_MEMBER int wave_key() const { return key_group(wave()) * kPanelKeys + row_group(wave()) * kWaveKeys; }
  ATTN_MEMBER bool exists(int row) const { return next_ + wave_key() + row < end_; }

  // Looks up this lane's token of the step that begins at kv. Copies write zeros for a token that does not exist; else
  // the last one stands in for it: its score is masked, its value cleared.
  ATTN_MEMBER void look_up(int kv) {
    const int token = kv + wave_key() + lane_index() % kWaveKeys;
    if constexpr (kAsync) pages_.look(token, token < end_);
    else pages_.look(least(token, end_ - 1), true);
  }

  // Where the token of the next step that this lane looked up is in k and v, in bytes; looks up the one after it.
  struct Spot {
    int64_t k, v;
  };
  ATTN_MEMBER Spot next_spot() {
    const AttendParams& p = params();
    const int page = pages_.page, slot = pages_.slot;
    look_up(next_ + kKeys);
    return {place_in(page, p.k_stride_page, slot, p.k_stride_token, size_),
            place_in(page, p.v_stride_page, slot, p.v_stride_token, size_)};
  }
  ATTN_MEMBER static Spot of_row(Spot spot, int i) {
    return {from_lane(spot.k, row() + i), from_lane(spot.v, row() + i)};
  }
  ATTN_MEMBER const char* key_at(Spot spot, int line) const { return k_ + spot.k + line * kElems * size_; }
  ATTN_MEMBER const char* value_at(Spot spot, int line) const { return v_ + spot.v + line * kElems * size_; }

  ATTN_MEMBER void start(int stage) {
    const Shared keys = panel(stage), values = keys + kKeyBytes;
    const Spot spot = next_spot();
    if (aligned_) {
      ATTN_UNROLL_BY(2)  // the fewer instructions, the sooner does a small batch begin
      for (int i = 0; i < kRows; i++) {
        const Spot at = of_row(spot, i);
        const bool real = exists(row() + i);
        copy_line(keys + Frags::KeyPanel::at(panel_row() + i, line()), key_at(at, line()), real);
        copy_line(values + Frags::ValuePanel::at(panel_row() + i, line()), value_at(at, line()), real);
      }
    } else {
      ATTN_ROLL
      for (int i = 0; i < kRows; i++) {
        const Spot at = of_row(spot, i);
        const int n = exists(row() + i) ? kElems : 0;
        const Line key[1] = {load_elements(key_at(at, line()), n, size_)};
        const Line value[1] = {load_elements(value_at(at, line()), n, size_)};
        Frags::put_keys(keys, panel_row() + i, line(), key);
        Frags::put_values(values, panel_row() + i, line(), value);
      }
    }
    close_copies();
    next_ += kKeys;
  }

  template <int N>
  ATTN_MEMBER void load(Line (&to)[N], const char* const (&from)[N], int line, int dims) const {
    const int n = General ? most(0, least(kElems, dims - line * kElems)) : kElems;
    if (!aligned_ || n < kElems) {
      load_elements(to, from, n, size_);
    } else {
      ATTN_UNROLL
      for (int i = 0; i < N; i++) {
        if (General && size_ == 1) to[i] = {{load_word(from[i]), load_word(from[i] + 4), 0, 0}};
        else to[i] = load_line(from[i]);
      }
    }
  }

  ATTN_MEMBER void fetch() {
    if (kAhead && next_ >= end_) return;
    const Spot spot = next_spot();
    load_keys(spot);
    if constexpr (kApart) put_keys();
    load_values(spot);
    next_ += kKeys;
  }
  ATTN_MEMBER void load_keys(Spot spot) {
    const char* from[kDirect ? kKeyLines : kRows];
    if constexpr (kDirect) {
      ATTN_UNROLL
      for (int k = 0; k < kKeyLines; k++) from[k] = key_at(spot, k * (kWave / 16) + lane_index() / 16);
    } else {
      ATTN_UNROLL
      for (int i = 0; i < kRows; i++) from[i] = key_at(of_row(spot, i), line());
    }
    load(key_, from, line(), params().head_dim_qk);
  }
  ATTN_MEMBER void load_values(Spot spot) {
    const char* from[kRows];
    ATTN_UNROLL
    for (int i = 0; i < kRows; i++) from[i] = value_at(of_row(spot, i), line());
    load(value_, from, line(), params().head_dim_vo);
  }
  // Every step but the last is whole, and costs no question about single keys.
  ATTN_MEMBER void clear_values() {
    if (next_ <= end_) return;
    ATTN_UNROLL
    for (int i = 0; i < kRows; i++)
      if (!exists(row() + i - kKeys)) value_[i] = {{0, 0, 0, 0}};
  }

  template <int T, class Use>
  ATTN_MEMBER static void branch(Use use) {
    use(TypeOf<T>());
    asm volatile("" : : "n"(T));  // branches end unlike, so that none of their ends are joined
  }
  template <int T>
  ATTN_MEMBER static Line widened(const Line& x, int half) {
    if constexpr (T == E::kDType) return x;
    else return widen_line<E, T>(x.x[half * 2], x.x[half * 2 + 1]);
  }

  ATTN_MEMBER void put() {
    if constexpr (!kApart) put_keys();
    put_values();
  }
  ATTN_MEMBER void put_keys() {
    if constexpr (kDirect) return;
    else typed([&](auto type) ATTN_INLINE {
      ATTN_UNROLL
      for (int h = 0; h < kElems / 8; h++) {
        Line rows[kRows];
        ATTN_UNROLL
        for (int i = 0; i < kRows; i++) rows[i] = widened<type.kDType>(key_[i], h);
        Frags::put_keys(keys(), panel_row(), line() * (kElems / 8) + h, rows);
      }
    });
  }
  ATTN_MEMBER void put_values() {
    clear_values();
    typed([&](auto type) ATTN_INLINE {
      ATTN_UNROLL
      for (int h = 0; h < kElems / 8; h++) {
        Line rows[kRows];
        ATTN_UNROLL
        for (int i = 0; i < kRows; i++) rows[i] = widened<type.kDType>(value_[i], h);
        Frags::put_values(values(), panel_row(), line() * (kElems / 8) + h, rows);
      }
    });
  }

  const AttendParams& p_;
  Shared shared_;
  PageLookup pages_;
  const char *k_, *v_;  // the item's KV head
  int size_;            // of an element
  bool aligned_;
  int next_, end_;
  int stage_ = kStages - 1;
  Line key_[kDirect ? kKeyLines : kRows], value_[kRows];  // on their way
};

}  // namespace attn
