// Small kernels of a GPU: device code only, all in one code object's source. ATTN_KERNEL names the one to compile, as
// the compilers of kernels_gpu.cpp do:
//   1  attn_merge          one block joins the partials of some rows of one tile and KV head
//   2  attn_append         one block writes the heads of one row
//   3  attn_chain_sample   one block samples one request
#include "append.h"
#include "output_gpu.h"
#include "rows.h"
#include "sample_gpu.h"

namespace attn {

// NVIDIA joins few rows of many chunks by many waves at once; AMD's block has the width of its other kernels.
#if ATTN_NVIDIA && ATTN_KERNEL == 1
constexpr int kThreads = 512, kBlocks = 2;
#else
constexpr int kThreads = 256, kBlocks = 4;
#endif
constexpr int kWaves = kThreads / kWave;

#if ATTN_KERNEL == 1

constexpr int kMostDims = 256;

// One row of a tile by a wave: lanes look at kWave chunks side by side for the weights, then at dims lane,
// lane + kWave, ... for the sums.
struct WaveMerge {
  static constexpr int kDims = kMostDims / kWave;
  float row[kDims] = {}, top = -kInfinity, sum = 0.f;

  // Chunks [begin, end).
  ATTN_MEMBER void add(const AttendParams& p, const MergeItem& item, int r, int begin, int end) {
    for (int first = begin; first < end; first += kWave) {
      const int i = first + lane_index(), n = least(kWave, end - first);
      const float lse = i < end ? *global(&p.partial_lse[slot_of(item, i) * p.tile_q + r]) : -kInfinity;
      const float before = top;
      top = wave_max(lse, top);
      const float base = top == -kInfinity ? 0.f : top, fade = exp2_fast(before - base);
      // A chunk without a visible key weighs 0, and a NaN goes on into every sum.
      const float weight = exp2_fast(lse - base);
      sum = sum * fade;
      ATTN_UNROLL
      for (int j = 0; j < kDims; j++) row[j] *= fade;
      ATTN_UNROLL_BY(4)
      for (int k = 0; k < n; k++) {
        const float share = from_lane(weight, k);
        const float* out = p.partial_out + (slot_of(item, first + k) * p.tile_q + r) * p.head_dim_vo;
        sum += share;
        ATTN_UNROLL
        for (int j = 0; j < kDims; j++) {
          const int d = lane_index() + j * kWave;
          if (d < p.head_dim_vo) row[j] = multiply_add(share, global(out)[d], row[j]);
        }
      }
    }
  }

  // What another wave found for the same row, at `other`, joins in.
  static constexpr int kWords = kMostDims + 2;
  ATTN_MEMBER void put(Shared at) const {
    ATTN_UNROLL
    for (int j = 0; j < kDims; j++) write_word(at + (lane_index() + j * kWave) * 4, bits_as<uint32_t>(row[j]));
    if (lane_index() != 0) return;
    write_word(at + kMostDims * 4, bits_as<uint32_t>(top)), write_word(at + kMostDims * 4 + 4, bits_as<uint32_t>(sum));
  }
  ATTN_MEMBER void join(Shared other) {
    const float before = top, its = bits_as<float>(read_word(other + kMostDims * 4));
    top = its > top || its != its ? its : top;
    const float base = top == -kInfinity ? 0.f : top, fade = exp2_fast(before - base), share = exp2_fast(its - base);
    sum = sum * fade + share * bits_as<float>(read_word(other + kMostDims * 4 + 4));
    ATTN_UNROLL
    for (int j = 0; j < kDims; j++)
      row[j] = row[j] * fade + share * bits_as<float>(read_word(other + (lane_index() + j * kWave) * 4));
  }

  ATTN_MEMBER void write(const Sink& sink, int dims) const {
    ATTN_UNROLL
    for (int j = 0; j < kDims; j++) {
      const int d = lane_index() + j * kWave;
      if (d >= dims) continue;
      const float x = sum != 0.f ? row[j] / sum : row[j];  // also for a NaN
      char* to = static_cast<char*>(sink.out);
      const int64_t at = sink.offset + d;
      if (sink.dtype == kFloat32) Output<float>::write_one(to + at * 4, x);
      else if (sink.dtype == kFloat16) Output<F16>::write_one(to + at * 2, x);
      else Output<B16>::write_one(to + at * 2, x);
    }
    if (sink.lse && lane_index() == 0) *global(sink.lse) = top + log2_fast(sum);
  }

 private:
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

// Rows [first, first + kMergeRows) of a tile. Where there are fewer rows than waves, waves share the chunks of a row.
ATTN_DEVICE void merge_rows(const AttendParams& p, const MergeItem& item, int first, Shared shared) {
  const Rows rows = rows_of(p, item.request, item.q_tile);
  const WorkItem whole = {item.request, item.q_tile, item.kv_head, 1, 0, rows.kv_len, -1, 0};
  const int count = least(rows.count - first, kMergeRows);
  if (count <= 0) return;
  int parts = 1;
  if (shared) {
    while (2 * parts * count <= kWaves && parts * kChunksOfWave < item.num_slots) parts *= 2;
  }
  const int part = wave_index() & (parts - 1), n = (item.num_slots + parts - 1) / parts;
  int r = wave_index() / parts;
  if (parts > 1 && r >= count) barrier();  // of the one round there is
  for (; r < count; r += kWaves / parts) {
    WaveMerge merge;
    merge.add(p, item, first + r, part * n, least(part * n + n, item.num_slots));
    if (parts > 1) {
      const Shared mine = shared + wave_index() * (WaveMerge::kWords * 4);
      if (part > 0) merge.put(mine);
      barrier();
      if (part > 0) return;
      for (int i = 1; i < parts; i++) merge.join(mine + i * (WaveMerge::kWords * 4));
    }
    merge.write(sink_of(p, rows, whole, rows.first + first + r, item.kv_head), p.head_dim_vo);
  }
}

#elif ATTN_KERNEL == 2

ATTN_DEVICE void copy_head(void* cache, int64_t to, int to_dtype, const void* rows, int64_t from, int from_dtype,
                           int n, int first, int step) {
  const int to_size = element_size(to_dtype), from_size = element_size(from_dtype);
  char* target = static_cast<char*>(cache) + to * to_size;
  const char* source = static_cast<const char*>(rows) + from * from_size;
  const uint64_t places = reinterpret_cast<uint64_t>(target) | reinterpret_cast<uint64_t>(source);
  if (to_dtype == from_dtype && (places | uint64_t(n * to_size)) % 16 == 0) {
    for (int i = first; i < n * to_size / 16; i += step) store_line(target + 16 * i, load_line(source + 16 * i));
    return;
  }
  for (int i = first; i < n; i += step) {
    if (to_dtype != from_dtype) {
      store_element(target, i, to_dtype, load_element(source, i, from_dtype));
    } else {
      for (int b = 0; b < to_size; b++) global(target)[i * to_size + b] = global(source)[i * to_size + b];
    }
  }
}

// A wave takes a head of the key or of the value at a time.
ATTN_DEVICE void append_row(const AppendParams& p, int64_t row) {
  const Slot slot = slot_of(p, row);
  if (!slot.exists) return;
  for (int i = wave_index(); i < 2 * p.num_kv_heads; i += kWaves) {
    const int h = i >> 1;
    if (i & 1)
      copy_head(p.v, slot.v + h * p.v_stride_head, p.kv_dtype, p.value,
                row * p.value_stride_row + h * p.value_stride_head, p.key_dtype, p.head_dim_vo, lane_index(), kWave);
    else
      copy_head(p.k, slot.k + h * p.k_stride_head, p.kv_dtype, p.key,
                row * p.key_stride_row + h * p.key_stride_head, p.key_dtype, p.head_dim_qk, lane_index(), kWave);
  }
}

#endif

}  // namespace attn

#if ATTN_KERNEL == 1
extern "C" ATTN_GLOBAL ATTN_BLOCK(attn::kThreads, 4, attn::kBlocks)
void attn_merge(ATTN_ARGUMENT attn::MergeLaunch launch) {
#if ATTN_NVIDIA
  ATTN_SHARED char shared[attn::kWaves * attn::WaveMerge::kWords * 4];
#else
  const attn::Shared shared = nullptr;
#endif
  const int blocks = launch.params.tile_q / attn::kMergeRows, at = attn::block_index() / blocks;
  const attn::MergeItem item = launch.items[at];
  if (at >= launch.counts[1]) return;
  const int first = (attn::block_index() - at * blocks) * attn::kMergeRows;
  attn::merge_rows(launch.params, item, first, (attn::Shared)shared);
}
#elif ATTN_KERNEL == 2
extern "C" ATTN_GLOBAL ATTN_BLOCK(256, 4, 4) void attn_append(ATTN_ARGUMENT attn::AppendParams p) {
  attn::append_row(p, attn::block_index());
}
#elif ATTN_KERNEL == 3
extern "C" ATTN_GLOBAL ATTN_BLOCK(256, 4, 4) void attn_chain_sample(ATTN_ARGUMENT attn::SampleParams p) {
  using namespace attn;
  using Draw = BlockDraw<kWaves>;
  ATTN_SHARED char shared[Draw::kSharedBytes];
  const auto draw_last = [&](const LastRows& rows, bool rejected, double u) {
    return Draw(rows, (Shared)shared).index(rejected, u);
  };
  sample_request(p, block_index(), thread_index() == 0, draw_last);
}
#endif
