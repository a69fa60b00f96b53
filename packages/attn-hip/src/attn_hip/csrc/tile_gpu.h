// GPU tile: a block of Waves waves over steps of keys staged in shared memory.
//
// Waves share the work in two ways. KeyGroups groups of them each take a share of the keys of a step; what they find is
// joined at the end. The waves of a group take 16 * Blocks packed rows each.
//   KeyGroups = Waves   decode, where reading the cache is all that counts and no wave should wait for another
//   KeyGroups = 2       verify: one block asks for all that keeps a multiprocessor busy, so fewer tiles are split
//   KeyGroups = 1       prefill
// General: any features and any head dims up to D; else head dims are D, and position and mask kMaskNone or causal.
#pragma once
#include "attend.h"
#include "join_gpu.h"
#include "output_gpu.h"
#include "rope.h"
#include "softmax_patient.h"
#include "stage_gpu.h"

namespace attn {
template <class T>
struct OneRow : T { static constexpr int kRows = 1; };

template <class E, int D, int Blocks, int Waves, int KeyGroups, bool General, bool Fp8>
class GpuTile {
  // A ring is as long as memory of a block allows where two run side by side, or one that is paired.
  static constexpr int kSteps = KeyGroups == 2 ? 384 / D : KeyGroups == Waves || (Blocks == 1 && D <= 128) ? 3 : 2;
  using Stage = Stager<E, D, Waves, KeyGroups, kSteps, General, Fp8>;
  using Frags = typename Stage::Frags;
  using Group = GroupProducts<E, D>;
  static constexpr bool kTogether = Stage::kTogether;
  // Where waves work on products together each block of rows is a unit: while one softens, another multiplies.
  static constexpr int kUnits = kTogether ? Blocks : 1, kUnitBlocks = Blocks / kUnits;
  static constexpr int kScoreCols = Stage::kPanelKeys / 16, kQueryFrags = D / Frags::kKeyDepth;
  // Fragments of q stay in registers, or are read from shared memory at every step.
  static constexpr bool kKeepsQuery = !kHasAsyncCopy || (Blocks == 1 && D <= 128 && !kTogether);
  // One panel of q serves the block, or every wave takes its rows through the memory of the last step, which is not
  // in use yet.
  static constexpr bool kSharesQuery = kHasAsyncCopy;
  static constexpr int kQueryPanelBytes = Blocks * 16 * Frags::KeyPanel::kRowBytes;
  static constexpr int kQueryBytes = (kSharesQuery ? Waves / KeyGroups : Waves) * kQueryPanelBytes;
  static constexpr int kQueryAt = kSharesQuery ? Stage::kBytes : Stage::kBytes - Stage::kStageBytes;
  using Join = RowJoin<D, 16 * Blocks * Waves / KeyGroups, KeyGroups>;
  static constexpr bool kJoinsByRow = kHasAsyncCopy;
  static constexpr int kJoinBytes = KeyGroups == 1 ? 0 : kJoinsByRow ? Join::kBytes : Waves / 2 * Blocks * 16 * D * 4;

 public:
  static constexpr int kKeys = Stage::kKeys, kRows = kUnitBlocks * kFragRows, kThreads = Waves * kWave;
  static constexpr int kHeight = 16 * Blocks * Waves / KeyGroups;
  static constexpr int kSharedBytes = most_of(most_of(Stage::kBytes, kQueryAt + kQueryBytes), kJoinBytes);
  static constexpr bool kPlain = !General, kFolds = true, kPatient = kSoftensPatiently;
  // Whether every unit takes part in every step, see it keys or not.
  static constexpr bool kNeverIdle = kTogether;
  using Row = float; using RowInt = int; using Elem = float;

  struct Scores {
    FragC x[kUnitBlocks][kScoreCols];
    ATTN_MEMBER static constexpr int cols() { return kScoreCols * kFragCols; }
    ATTN_MEMBER static constexpr int span() { return kKeys; }
    ATTN_MEMBER float get(int r, int c) const { return x[r / kFragRows][c / kFragCols].x[place(r, c)]; }
    ATTN_MEMBER void set(int r, int c, float e) { x[r / kFragRows][c / kFragCols].x[place(r, c)] = e; }
    // Where kPatient: see lift_row and weigh_row.
    ATTN_MEMBER float lift(int r, float scale, float base) { return lift_row(x[r / kFragRows], scale, base); }
    ATTN_MEMBER float weigh(int r) { return weigh_row(x[r / kFragRows]); }
    ATTN_MEMBER static constexpr int place(int r, int c) { return r % kFragRows * kFragCols + c % kFragCols; }
  };

  struct Unit {
    RowFacts<GpuTile> facts;
    RowState<GpuTile> state;
    typename Frags::Query q[kKeepsQuery ? kUnitBlocks : 1][kKeepsQuery ? kQueryFrags : 1];
    FragOut out[kUnitBlocks][D / 16];
    Scores next[1];  // where kTogether: on their way
  };

  // Parameters that are used now and then: read anew, where holding them would cost registers.
  ATTN_MEMBER static const AttendParams& late(const AttendParams& p) {
    if constexpr (General) return argument_again(p);
    else return p;
  }
  ATTN_MEMBER static float row(float x) { return x; }
  ATTN_MEMBER static float elem(float x) { return x; }
  ATTN_MEMBER static float max(float a, float b) { return greater(a, b); }
  ATTN_MEMBER static float max_across(float x) { return row_max(x); }
  ATTN_MEMBER static float sum_across(float x) { return row_sum(x); }
  ATTN_MEMBER static float exp2(float x) { return exp2_fast(x); }
  ATTN_MEMBER static float exp2_scaled(float x, float base, float scale) {
    return exp2_fast(multiply_add(x, scale, -base * scale));
  }
  ATTN_MEMBER static float log2(float x) { return log2_fast(x); }
  ATTN_MEMBER static float tanh(float x) {
    const float y = x > 10.f ? 10.f : (x < -10.f ? -10.f : x);
    const float e = exp2_fast(y * (2 * kLog2e));
    return (e - 1.f) / (e + 1.f);
  }
  ATTN_MEMBER static float pick(bool which, float yes, float no) { return which ? yes : no; }
  ATTN_MEMBER static float to_float(int x) { return float(x); }
  ATTN_MEMBER static int key(int kv, int c) {
    return kv + Stage::key_group() * Stage::kPanelKeys + c / kFragCols * 16 + frag_col(c % kFragCols);
  }
  ATTN_MEMBER static bool within(int key, int begin, int end) { return key >= begin && key < end; }
  ATTN_MEMBER static bool mask_bits(const uint8_t* bits, const Rows& rows, int query, int key) {
    const int64_t bit = int64_t(query) * rows.kv_len + least(key, rows.kv_len - 1);
    return global(bits)[bit >> 3] >> (bit & 7) & 1;
  }

  ATTN_MEMBER GpuTile(const AttendParams& p, const WorkItem& item, const Rows& rows, Shared shared)
      : p_(p), item_(item), rows_(rows), shared_(shared),
        stage_(p, item, shared, keys_of_tile(p, rows, item, kKeys)) {}
  ATTN_MEMBER static constexpr int heads() { return 1; }
  ATTN_MEMBER static constexpr int units() { return kUnits; }
  ATTN_MEMBER Unit& unit(int, int u) { return units_[u]; }

  ATTN_MEMBER void open(const AttendParams& p, const WorkItem& item, const Rows& rows) {
    first_ = rows.first + Stage::row_group() * 16 * kUnitBlocks;
    last_ = rows.first + rows.count - 1;
    ATTN_UNROLL
    for (int u = 0; u < kUnits; u++) open_unit(late(p), item, rows, units_[u], first_ + u * kUnitRows);
    load_query();
  }

  ATTN_MEMBER void seek(int kv, int, int) { kv_ = kv; }

  ATTN_MEMBER void stage(int) {
    if constexpr (kTogether) {
      await_all();
      stage_.advance();
      start_scores();
    } else {
      stage_.advance();
      if (!General || late(p_).position != kPositionRope) return;
      rotate_keys();
      stage_.join();
    }
  }

  ATTN_MEMBER Scores scores(Unit& unit, int) const {
    if constexpr (kTogether) {
      Group::template await<kUnits - 1>();  // what may be under way still is the next unit's, or the last one's out
      Group::pin(unit.next[0].x[0]);
      return unit.next[0];
    }
    Scores s = {};
    if constexpr (Stage::kDirect) stage_.typed([&](auto type) ATTN_INLINE { add_scores<type.kDType>(unit, s); });
    else add_scores<E::kDType>(unit, s);
    return s;
  }
  template <int T>
  ATTN_MEMBER void add_scores(const Unit& unit, Scores& s) const {
    const Shared keys = stage_.keys();
    ATTN_UNROLL
    for (int k = 0; k < kQueryFrags; k++) {
      typename Frags::Query q[kUnitBlocks];
      ATTN_UNROLL
      for (int b = 0; b < kUnitBlocks; b++) {
        if constexpr (kKeepsQuery) q[b] = unit.q[b][k];
        else q[b] = Frags::read_query(queries(), b * 16, Frags::query_line(k));
      }
      ATTN_UNROLL
      for (int n = 0; n < kScoreCols; n++) {
        typename Frags::Key key;
        if constexpr (Stage::kDirect) key = bits_as<typename Frags::Key>(stage_.template key_line<T>(k));
        else key = Frags::read_keys(keys, n, k);
        ATTN_UNROLL
        for (int b = 0; b < kUnitBlocks; b++) Frags::multiply(s.x[b][n], q[b], key);
      }
    }
  }

  ATTN_MEMBER void accumulate(Unit& unit, const float (&fade)[kRows], const Scores& s) const {
    if constexpr (kTogether) {
      // What a product takes from registers is made while none is under way. It ran while this unit softened.
      Group::template await<0>();
      scale_out(unit, fade);
      start_out(unit, s);
      return;
    }
    bool fades = false;
    ATTN_UNROLL
    for (int r = 0; r < kRows; r++) fades |= fade[r] != 1.f;
    if (any_lane(fades)) scale_out(unit, fade);
    add(unit, s);
  }
  ATTN_MEMBER void soften_and_add(Unit& unit, Scores& s, float scale) const {
    soften_patiently<GpuTile>(unit.state, s, scale, [&](const float (&fade)[kRows]) { scale_out(unit, fade); });
    add(unit, s);
  }
  // out = out + weights v
  ATTN_MEMBER void add(Unit& unit, const Scores& s) const {
    const Shared values = stage_.values();
    ATTN_UNROLL
    for (int k = 0; k < Stage::kPanelKeys / Frags::kValueDepth; k++) {
      typename Frags::Weights weights[kUnitBlocks];
      ATTN_UNROLL
      for (int b = 0; b < kUnitBlocks; b++) weights[b] = Frags::weights(&s.x[b][k * (Frags::kValueDepth / 16)]);
      ATTN_UNROLL
      for (int i = 0; i < D / 16; i++) {
        const auto value = Frags::read_values(values, k, i);
        ATTN_UNROLL
        for (int b = 0; b < kUnitBlocks; b++) Frags::multiply(unit.out[b][i], weights[b], value);
      }
    }
  }

  ATTN_MEMBER static void scale_out(Unit& unit, const float (&by)[kRows]) {
    ATTN_UNROLL
    for (int b = 0; b < kUnitBlocks; b++) {
      ATTN_UNROLL
      for (int i = 0; i < D / 16; i++) {
        ATTN_UNROLL
        for (int e = 0; e < kFragRows * kFragCols; e++) unit.out[b][i].x[e] *= by[b * kFragRows + e / kFragCols];
      }
    }
  }

  // Until everything of the block is written, and its memory free.
  ATTN_MEMBER void finish() { stage_.finish(); }
  // Behind close() of the last one of them: writes the tile's rows from the partials of all its chunks, which are there.
  static constexpr bool kTakesParts = KeyGroups <= 2;
  ATTN_MEMBER void take_parts(const MergeItem& merge);
  ATTN_MEMBER void close(float scale) {
    const AttendParams& p = late(p_);
    const float left = scale_left<GpuTile>(p, logit_scale(p));
    if constexpr (kPatient) {
      ATTN_UNROLL
      for (int u = 0; u < kUnits; u++) settle(units_[u].state);
    }
    if constexpr (kTogether) await_all();
    if constexpr (KeyGroups > 1 && kJoinsByRow) {
      join_rows(p, left, scale);
      return;
    }
    if constexpr (KeyGroups > 1) {
      join_groups(left);
      if (Stage::key_group() != 0) return;
    }
    ATTN_UNROLL
    for (int u = 0; u < kUnits; u++) {
      ATTN_UNROLL
      for (int r = 0; r < kRows; r++) write_unit_row(p, units_[u], r, row_at(u, r), left, scale);
    }
  }

 private:
  static constexpr int kUnitRows = 64;  // from a unit to the next, of which a wave has 16

  ATTN_MEMBER void open_unit(const AttendParams& p, const WorkItem& item, const Rows& rows, Unit& unit, int first) {
    RowFacts<GpuTile>& facts = unit.facts;
    ATTN_UNROLL
    for (int r = 0; r < kRows; r++) {
      const int packed = least(first + r / kFragRows * 16 + frag_row(r % kFragRows), last_), query = packed / p.group;
      const Keys seen = keys_of(p, rows, query);
      facts.query[r] = query, facts.begin[r] = seen.begin, facts.end[r] = least(seen.end, item.kv_end);
      facts.slope[r] = !General || p.position != kPositionAlibi
                           ? 0.f
                           : global(p.alibi_slopes)[item.kv_head * p.group + packed - query * p.group];
    }
    const Keys low = keys_of(p, rows, least(first, last_) / p.group);
    const Keys high = keys_of(p, rows, least(first + 16 * kUnitBlocks - 1, last_) / p.group);
    facts.least_begin = low.begin, facts.most_begin = high.begin;
    facts.least_end = least(low.end, item.kv_end);
    facts.most_end = first <= last_ ? least(high.end, item.kv_end) : 0;
    clear<GpuTile>(unit.state);
    ATTN_UNROLL
    for (int b = 0; b < kUnitBlocks; b++) {
      ATTN_UNROLL
      for (int i = 0; i < D / 16; i++) unit.out[b][i] = FragOut{};
    }
  }

  // Products of the block: queries by keys for every unit, weights by values for one, and the end of all.
  ATTN_MEMBER void start_scores() {
    const uint64_t q = Group::place(shared_ + kQueryAt), keys = Group::place(stage_.keys());
    Group::open();
    ATTN_UNROLL
    for (int u = 0; u < kUnits; u++) {
      ATTN_UNROLL
      for (int k = 0; k < D / 16; k++)
        Group::multiply(units_[u].next[0].x[0], Group::dims(Group::rows(q, u * (Group::kRows / 16)), k),
                        Group::dims(keys, k), k > 0);
      Group::close();
    }
  }
  ATTN_MEMBER void start_out(Unit& unit, const Scores& s) const {
    const uint64_t values = Group::place(stage_.values());
    typename Frags::Weights weights[Stage::kPanelKeys / 16];
    ATTN_UNROLL
    for (int k = 0; k < Stage::kPanelKeys / 16; k++) weights[k] = Frags::weights(&s.x[0][k]);
    Group::pin(unit.out[0]);
    Group::open();
    ATTN_UNROLL
    for (int k = 0; k < Stage::kPanelKeys / 16; k++)
      Group::multiply(unit.out[0], weights[k], Group::rows(values, k));
    Group::close();
  }
  ATTN_MEMBER void await_all() {
    Group::template await<0>();
    ATTN_UNROLL
    for (int u = 0; u < kUnits; u++) Group::pin(units_[u].out[0]);
  }

  // The packed row that stands behind row r of a unit; beyond the last, where there is none.
  ATTN_MEMBER int row_at(int u, int r) const {
    return first_ + u * kUnitRows + r / kFragRows * 16 + frag_row_again(r % kFragRows);
  }
  // Into the output, or as a partial; `whole` is an item for the output where this one is for a partial.
  ATTN_MEMBER void write_unit_row(const AttendParams& p, const Unit& unit, int r, int packed, float left,
                                  float scale, const WorkItem* whole = nullptr) const {
    const float part = share<GpuTile>(unit.state, r, scale), lse = log_sum<GpuTile>(unit.state, r, left);
    if (packed > last_) return;
    const Sink sink = whole ? sink_of(p, rows_, *whole, packed, whole->kv_head) : sink_at_end(p, packed);
    switch (sink.dtype) {
      case kFloat32: write_row<float>(unit, sink, r, part); break;
      case kFloat16: write_row<F16>(unit, sink, r, part); break;
      default: write_row<B16>(unit, sink, r, part);
    }
    if (frag_col(0) == 0 && sink.lse) *global(sink.lse) = lse;
  }

  ATTN_MEMBER Sink sink_at_end(const AttendParams& p, int packed) const {
    if constexpr (General && kReadsItemAgain) {
      const WorkItem item = item_again(p);
      return sink_of(p, rows_of(p, item.request, item.q_tile), item, packed, item.kv_head);
    } else {
      return sink_of(p, rows_, item_, packed, item_.kv_head);
    }
  }

  ATTN_MEMBER Shared queries() const {
    const int panel = kSharesQuery ? Stage::row_group() : wave_index();
    return shared_ + kQueryAt + panel * kQueryPanelBytes;
  }

  // An element of a query head, rotated where RoPE asks for it; 0 behind its last dim.
  ATTN_MEMBER uint16_t query_element(const uint16_t* q, int query, int d) const;
  ATTN_MEMBER Line query_line(int packed, int line, bool aligned) const;
  // Into shared memory line by line, and from there in the order of the product.
  ATTN_MEMBER void load_query();
  ATTN_MEMBER void put_query(int i, bool aligned);
  ATTN_MEMBER void rotate_keys() const {
    const AttendParams& p = late(p_);
    const int half = p.head_dim_qk / 2;
    const int first = kv_ + Stage::key_group() * Stage::kPanelKeys, threads = kThreads / KeyGroups;
    for (int i = Stage::row_group() * kWave + lane_index(); i < Stage::kPanelKeys * half; i += threads) {
      const int t = i / half, d = i - t * half;
      const float turn = turn_of(global(p.rope_turns)[d], first + t), cosine = cos_turn(turn), sine = sin_turn(turn);
      const Shared at = stage_.keys() + Frags::KeyPanel::at(t, d / 8) + d % 8 * 2;
      const Shared to = stage_.keys() + Frags::KeyPanel::at(t, (d + half) / 8) + (d + half) % 8 * 2;
      const float low = E::widen(read_element(at)), high = E::widen(read_element(to));
      write_element(at, uint16_t(E::pair(low * cosine - high * sine, 0.f)));
      write_element(to, uint16_t(E::pair(high * cosine + low * sine, 0.f)));
    }
  }

  // Adds a row of a partial, times its weight, to row r of a unit.
  ATTN_MEMBER void add_part(Unit& unit, int r, const float* row, int dims, float weight) const;
  // Writes the rows of the item, each joined from what the groups found.
  ATTN_MEMBER void join_rows(const AttendParams& p, float left, float scale);
  // Sums what the groups found for the same rows into the first group, by halves.
  ATTN_MEMBER void join_groups(float left);
  // Calls visit(place, element) for every element of the output; `slot` of `slots` places for each row group.
  template <class Visit>
  ATTN_MEMBER void each_out(int slot, int slots, Visit visit);
  ATTN_MEMBER float read_float(int i) const { return bits_as<float>(read_word(shared_ + 4 * i)); }
  ATTN_MEMBER void write_float(int i, float x) const { write_word(shared_ + 4 * i, bits_as<uint32_t>(x)); }

  // Row r of the output, as O.
  template <class O>
  ATTN_MEMBER void write_row(const Unit& unit, const Sink& sink, int r, float part) const {
    constexpr int size = Output<O>::kSize;
    char* to = static_cast<char*>(sink.out) + sink.offset * size;
    const bool aligned = reinterpret_cast<uint64_t>(to) % (kRun * size) == 0;
    ATTN_UNROLL
    for (int c = 0; c < D / 16 * kFragCols; c += kRun) {
      const int d = c / kFragCols * 16 + frag_col(c % kFragCols);
      float x[kRun];
      ATTN_UNROLL
      for (int i = 0; i < kRun; i++)
        x[i] = unit.out[r / kFragRows][c / kFragCols].x[r % kFragRows * kFragCols + c % kFragCols + i] * part;
      if (aligned && (!General || d + kRun <= late(p_).head_dim_vo)) {
        Output<O>::write(to + d * size, x);
      } else {
        ATTN_UNROLL
        for (int i = 0; i < kRun; i++)
          if (!General || d + i < late(p_).head_dim_vo) Output<O>::write_one(to + (d + i) * size, x[i]);
      }
    }
  }

  const AttendParams& p_;
  const WorkItem& item_;
  const Rows rows_;
  Shared shared_;
  Stage stage_;
  Unit units_[kUnits];
  int first_, last_, kv_;
};

}  // namespace attn

#include "tile_gpu_join.h"
#include "tile_gpu_query.h"
