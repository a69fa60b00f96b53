// Joins the partial results of a split-KV tile on a GPU: waves take rows, or shares of the chunks of a row.
#pragma once
#include "output_gpu.h"

namespace attn {

constexpr int kMostMergeDims = 256;

// One row of a tile by a wave: lanes look at kWave chunks side by side for the weights, then at dims for the sums. A
// lane has `Run` neighbouring dims, and as many again kWave * Run further on, up to D. Of `Bytes` of shared memory a
// wave keeps some for what waves join; where lanes have lines, the rest holds partials that are copied there together.
template <int D, int Run, int Bytes = 0>
struct WaveMerge {
  static constexpr int kDims = D / kWave, kWords = D + 2, kPutBytes = (kWords * 4 + 15) / 16 * 16;
  static constexpr int kHolds = Bytes > kPutBytes && Run == 4 ? (Bytes - kPutBytes) / (D * 4) : 0;
  static constexpr int kHeld = kHolds < kWave ? kHolds : kWave, kBatch = kHeld > 0 ? kHeld : kWave;  // chunks
  static constexpr int kBytes = kHeld > 0 ? Bytes / 16 * 16 : kWords * 4;                            // of a wave
  static constexpr int kChunksAtOnce = Run == 1 ? 4 : 8;  // whose loads are under way together
  float row[kDims] = {}, top = -kInfinity, sum = 0.f;

  // Chunks [begin, end). `mine`: kBytes of this wave, if kHeld.
  ATTN_MEMBER void add(const AttendParams& p, const MergeItem& item, int r, int dims, int begin, int end,
                       Shared mine) {
    const bool holds = kHeld > 0 && dims % Run == 0;
    for (int first = begin; first < end; first += kBatch) {
      const int i = first + lane_index(), n = least(kBatch, end - first);
      const float lse = lane_index() < n ? *global(&p.partial_lse[slot_of(item, i) * p.tile_q + r]) : -kInfinity;
      if constexpr (kHeld > 0) {
        if (holds) {
          for (int k = 0; k < n; k++)
            hold(mine + kPutBytes + k * (D * 4), p.partial_out + (slot_of(item, first + k) * p.tile_q + r) * dims, dims);
          close_copies();
        }
      }
      const float before = top;
      top = wave_max(lse, top);
      const float base = top == -kInfinity ? 0.f : top, fade = exp2_fast(before - base);
      // A chunk without a visible key weighs 0, and a NaN goes on into every sum.
      const float weight = exp2_fast(lse - base);
      sum = sum * fade;
      ATTN_UNROLL
      for (int j = 0; j < kDims; j++) row[j] *= fade;
      if constexpr (kHeld > 0) {
        if (holds) {
          await_copies<0>();  // each lane reads what it copied
          ATTN_UNROLL_BY(4)
          for (int k = 0; k < n; k++) add_held(mine + kPutBytes + k * (D * 4), dims, from_lane(weight, k));
          continue;
        }
      }
      ATTN_UNROLL_BY(kChunksAtOnce)
      for (int k = 0; k < n; k++) {
        const float share = from_lane(weight, k);
        add_chunk(p.partial_out + (slot_of(item, first + k) * p.tile_q + r) * dims, dims, share);
      }
    }
  }

  // What another wave found for the same row, at `other`, joins in.
  ATTN_MEMBER void put(Shared at) const {
    ATTN_UNROLL
    for (int j = 0; j < kDims; j++) write_word(at + (lane_index() + j * kWave) * 4, bits_as<uint32_t>(row[j]));
    if (lane_index() != 0) return;
    write_word(at + D * 4, bits_as<uint32_t>(top)), write_word(at + D * 4 + 4, bits_as<uint32_t>(sum));
  }
  ATTN_MEMBER void join(Shared other) {
    const float before = top, its = bits_as<float>(read_word(other + D * 4));
    top = its > top || its != its ? its : top;
    const float base = top == -kInfinity ? 0.f : top, fade = exp2_fast(before - base), share = exp2_fast(its - base);
    sum = sum * fade + share * bits_as<float>(read_word(other + D * 4 + 4));
    ATTN_UNROLL
    for (int j = 0; j < kDims; j++)
      row[j] = row[j] * fade + share * bits_as<float>(read_word(other + (lane_index() + j * kWave) * 4));
  }

  ATTN_MEMBER void write(const Sink& sink, int dims) const {
    ATTN_UNROLL
    for (int j = 0; j < kDims; j += Run) {
      if (dim(j) >= dims) continue;
      float run[Run];
      ATTN_UNROLL
      for (int i = 0; i < Run; i++) run[i] = sum != 0.f ? row[j + i] / sum : row[j + i];  // also for a NaN
      write_dims(sink, dim(j), dims, run);
    }
    if (sink.lse && lane_index() == 0) *global(sink.lse) = top + log2_fast(sum);
  }

 private:
  ATTN_MEMBER static int dim(int j) { return (j / Run * kWave + lane_index()) * Run + j % Run; }
  ATTN_MEMBER void add_chunk(const float* out, int dims, float share) {
    sum += share;
    ATTN_UNROLL
    for (int j = 0; j < kDims; j += Run) {
      if (Run > 1 && dims % Run == 0) {
        if (dim(j) >= dims) continue;
        float x[Run];
        load_partials(x, out + dim(j));
        ATTN_UNROLL
        for (int i = 0; i < Run; i++) row[j + i] = multiply_add(share, x[i], row[j + i]);
      } else {
        ATTN_UNROLL
        for (int i = 0; i < Run; i++)
          if (dim(j + i) < dims) row[j + i] = multiply_add(share, global(out)[dim(j + i)], row[j + i]);
      }
    }
  }
  ATTN_MEMBER static void hold(Shared to, const float* out, int dims) {
    ATTN_UNROLL
    for (int j = 0; j < kDims; j += Run)
      if (dim(j) < dims) copy_line(to + dim(j) * 4, out + dim(j), true);
  }
  ATTN_MEMBER void add_held(Shared from, int dims, float share) {
    sum += share;
    ATTN_UNROLL
    for (int j = 0; j < kDims; j += Run) {
      if (dim(j) >= dims) continue;
      float x[Run];
      read_partials(x, from + dim(j) * 4);
      ATTN_UNROLL
      for (int i = 0; i < Run; i++) row[j + i] = multiply_add(share, x[i], row[j + i]);
    }
  }
  ATTN_MEMBER static int64_t slot_of(const MergeItem& item, int i) {
    return int64_t(item.first_slot) + int64_t(i) * item.slot_stride;
  }
  // Not a number wins, as its sums should.
  ATTN_MEMBER static float wave_max(float x, float start) {
    x = x > start || x != x ? x : start;
    for (int mask = 1; mask < kWave; mask *= 2) {
      const float other = exchange(x, mask);
      x = other > x || other != other ? other : x;
    }
    return x;
  }
};

constexpr int kChunksOfWave = 4;  // what a wave has on its way at once

// Rows [first, first + count) of a tile. Where there are fewer rows than waves, waves share the chunks of a row, if
// there is shared memory for Waves merges.
template <class Merge, int Waves>
ATTN_DEVICE void merge_rows(const AttendParams& p, const MergeItem& item, const Rows& rows, int first, int count,
                            int dims, Shared shared) {
  if (count <= 0) return;
  const WorkItem whole = {item.request, item.q_tile, item.kv_head, 1, 0, rows.kv_len, -1, -1};
  int parts = 1;
  if (shared) {
    while (2 * parts * count <= Waves && parts * kChunksOfWave < item.num_slots) parts *= 2;
  }
  const int part = wave_index() & (parts - 1), n = (item.num_slots + parts - 1) / parts;
  int r = wave_index() / parts;
  if (parts > 1 && r >= count) barrier();  // of the one round there is
  for (; r < count; r += Waves / parts) {
    Merge merge;
    const Shared mine = shared + wave_index() * Merge::kBytes;
    merge.add(p, item, first + r, dims, part * n, least(part * n + n, item.num_slots), mine);
    if (parts > 1) {
      if (part > 0) merge.put(mine);
      barrier();
      if (part > 0) return;
      for (int i = 1; i < parts; i++) merge.join(mine + i * Merge::kBytes);
    }
    merge.write(sink_of(p, rows, whole, rows.first + first + r, item.kv_head), dims);
  }
}

}  // namespace attn
