// What key groups of a GPU tile found, joined: row by row, or by halves. Part of tile_gpu.h.
#pragma once
#include "tile_gpu.h"

namespace attn {

// Every lane sums the elements that it has of a product, in the order of the chunks, whichever of them was last. Of the
// rows of a lane each key group takes its share, into the first places of `unit`.
template <class E, int D, int Blocks, int Waves, int KeyGroups, bool General, bool Fp8>
ATTN_MEMBER void GpuTile<E, D, Blocks, Waves, KeyGroups, General, Fp8>::take_parts(const MergeItem& merge) {
  const AttendParams& p = late(p_);
  const int dims = General ? p.head_dim_vo : D;
  const int64_t step = int64_t(merge.slot_stride) * p.tile_q;
  constexpr int mine = kRows / KeyGroups;
  static_assert(mine * KeyGroups == kRows, "key groups have equal shares of rows");
  const int from = Stage::key_group() * mine;
  WorkItem whole = item_;
  whole.slot = -1;
  ATTN_UNROLL
  for (int u = 0; u < kUnits; u++) {
    Unit& unit = units_[u];
    int64_t first[mine];
    float base[mine], top[mine], sum[mine];
    ATTN_UNROLL
    for (int r = 0; r < mine; r++) {
      first[r] = int64_t(merge.first_slot) * p.tile_q + least(row_at(u, from + r), last_) - rows_.first;
      top[r] = -kInfinity, sum[r] = 0.f;
    }
    ATTN_UNROLL_BY(4)
    for (int i = 0; i < merge.num_slots; i++) {
      ATTN_UNROLL
      for (int r = 0; r < mine; r++) {
        const float lse = load_partial(p.partial_lse + first[r] + i * step);
        top[r] = lse > top[r] || lse != lse ? lse : top[r];  // not a number wins, as its sums should
      }
    }
    ATTN_UNROLL
    for (int r = 0; r < mine; r++) base[r] = top[r] == -kInfinity ? 0.f : top[r];
    ATTN_UNROLL
    for (int b = 0; b < kUnitBlocks; b++) {
      ATTN_UNROLL
      for (int i = 0; i < D / 16; i++) unit.out[b][i] = FragOut{};
    }
    ATTN_ROLL
    for (int i = 0; i < merge.num_slots; i++) {
      ATTN_UNROLL
      for (int r = 0; r < mine; r++) {
        const float weight = exp2(load_partial(p.partial_lse + first[r] + i * step) - base[r]);
        sum[r] += weight;
        add_part(unit, r, p.partial_out + (first[r] + i * step) * dims, dims, weight);
      }
    }
    ATTN_UNROLL
    for (int r = 0; r < mine; r++) {
      unit.state.top[r] = top[r], unit.state.sum[r] = sum[r];
      write_unit_row(p, unit, r, row_at(u, from + r), 1.f, 1.f, &whole);
    }
  }
}

template <class E, int D, int Blocks, int Waves, int KeyGroups, bool General, bool Fp8>
ATTN_MEMBER void GpuTile<E, D, Blocks, Waves, KeyGroups, General, Fp8>::add_part(
    Unit& unit, int r, const float* row, int dims, float weight) const {
  const bool whole = !General || dims % kRun == 0;
  ATTN_UNROLL
  for (int c = 0; c < D / 16 * kFragCols; c += kRun) {
    float* to = element_of(unit.out[r / kFragRows][c / kFragCols], r % kFragRows * kFragCols + c % kFragCols);
    const int d = c / kFragCols * 16 + frag_col(c % kFragCols);
    float x[kRun] = {};
    if (whole && (!General || d < dims)) {
      load_partials(x, row + d);
    } else {
      ATTN_UNROLL
      for (int i = 0; i < kRun; i++)
        if (d + i < dims) x[i] = row[d + i];
    }
    ATTN_UNROLL
    for (int i = 0; i < kRun; i++) to[i] = multiply_add(weight, x[i], to[i]);
  }
}

// Writes the rows of the item, each joined from what the groups found.
template <class E, int D, int Blocks, int Waves, int KeyGroups, bool General, bool Fp8>
ATTN_MEMBER void GpuTile<E, D, Blocks, Waves, KeyGroups, General, Fp8>::join_rows(
    const AttendParams& p, float left, float scale) {
  stage_.finish();
  Unit& unit = units_[0];
  const Join join(shared_);
  ATTN_UNROLL
  for (int r = 0; r < kRows; r++) {
    const int row = row_at(0, r) - rows_.first, block = r / kFragRows;
    ATTN_UNROLL
    for (int c = 0; c < D / 16 * kFragCols; c += kRun)
      join.put(Stage::key_group(), row, c / kFragCols * 16 + frag_col(c % kFragCols),
               element_of(unit.out[block][c / kFragCols], r % kFragRows * kFragCols + c % kFragCols));
    if (frag_col(0) == 0) join.put_state(Stage::key_group(), row, unit.state.top[r], unit.state.sum[r]);
  }
  barrier();
  ATTN_UNROLL_BY(KeyGroups == 2 ? 2 : 1)
  for (int row = wave_index(); row < rows_.count; row += Waves) {
    RowState<OneRow<GpuTile>> state;
    float out[Join::kEach];
    join.template take<GpuTile>(row, left, state.top[0], state.sum[0], out);
    const float part = share<OneRow<GpuTile>>(state, 0, scale), lse = log_sum<OneRow<GpuTile>>(state, 0, left);
    ATTN_UNROLL
    for (int i = 0; i < Join::kEach; i++) out[i] *= part;
    const Sink sink = sink_of(p, rows_, item_, rows_.first + row, item_.kv_head);
    write_dims(sink, lane_index() * Join::kEach, General ? p.head_dim_vo : D, out);
    if (lane_index() == 0 && sink.lse) *global(sink.lse) = lse;
  }
}

// Sums what the groups found for the same rows into the first group, by halves.
template <class E, int D, int Blocks, int Waves, int KeyGroups, bool General, bool Fp8>
ATTN_MEMBER void GpuTile<E, D, Blocks, Waves, KeyGroups, General, Fp8>::join_groups(float left) {
  stage_.finish();
  RowState<GpuTile>& state = units_[0].state;
  // Place of the state of a row of block r that group g found.
  const auto place = [](int g, int r) {
    return (((Stage::row_group() * KeyGroups + g) * Blocks + r / kFragRows) * 16 + frag_row(r % kFragRows)) * 2;
  };
  ATTN_UNROLL
  for (int r = 0; r < kRows; r++) {
    if (frag_col(0) != 0) continue;
    write_float(place(Stage::key_group(), r), state.top[r]);
    write_float(place(Stage::key_group(), r) + 1, state.sum[r]);
  }
  barrier();
  float by[kRows];
  ATTN_UNROLL
  for (int r = 0; r < kRows; r++) {
    float top = -kInfinity, sum = 0.f;
    ATTN_UNROLL
    for (int g = 0; g < KeyGroups; g++) top = max(top, read_float(place(g, r)));
    const float base = top == -kInfinity ? 0.f : top;
    ATTN_UNROLL
    for (int g = 0; g < KeyGroups; g++)
      sum += read_float(place(g, r) + 1) * exp2_scaled(read_float(place(g, r)), base, left);
    by[r] = exp2_scaled(state.top[r], base, left);
    state.top[r] = top, state.sum[r] = sum;
  }
  scale_out(units_[0], by);
  for (int half = KeyGroups / 2; half > 0; half /= 2) {
    const int group = Stage::key_group();
    barrier();
    if (group >= half && group < 2 * half)
      each_out(group - half, half, [&](int at, float x) { write_float(at, x); });
    barrier();
    if (group < half) each_out(group, half, [&](int at, float& x) { x += read_float(at); });
  }
}

// Calls visit(place, element) for every element of the output; `slot` of `slots` places for each row group.
template <class E, int D, int Blocks, int Waves, int KeyGroups, bool General, bool Fp8>
template <class Visit>
ATTN_MEMBER void GpuTile<E, D, Blocks, Waves, KeyGroups, General, Fp8>::each_out(int slot, int slots, Visit visit) {
  constexpr int elements = kFragRows * kFragCols, each = Blocks * (D / 16) * elements;
  const int first = (Stage::row_group() * slots + slot) * each * kWave + lane_index();
  ATTN_UNROLL
  for (int b = 0; b < Blocks; b++) {
    ATTN_UNROLL
    for (int i = 0; i < D / 16; i++) {
      ATTN_UNROLL
      for (int e = 0; e < elements; e++)
        visit(first + ((b * (D / 16) + i) * elements + e) * kWave, *element_of(units_[0].out[b][i], e));
    }
  }
}

}  // namespace attn
