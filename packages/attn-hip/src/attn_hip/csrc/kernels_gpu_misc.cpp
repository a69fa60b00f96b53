// Small kernels of a GPU: device code only, all in one code object's source. ATTN_KERNEL names the one to compile, as
// the compilers of kernels_gpu.cpp do:
//   1  attn_merge          one block joins the partials of one tile and KV head
//   2  attn_append         one block writes the heads of one row
//   3  attn_chain_sample   one block samples one request
#include "append.h"
#include "output_gpu.h"
#include "rows.h"
#include "sample_gpu.h"

namespace attn {

constexpr int kWaves = 256 / kWave;

#if ATTN_KERNEL == 1

constexpr int kMostDims = 256;

// One row of a tile by a wave: lanes look at kWave chunks side by side for the weights, then at dims lane,
// lane + kWave, ... for the sums.
struct WaveMerge {
  static constexpr int kDims = kMostDims / kWave;
  float row[kDims] = {}, top = -kInfinity, sum = 0.f;

  ATTN_MEMBER void add(const AttendParams& p, const MergeItem& item, int r) {
    for (int first = 0; first < item.num_slots; first += kWave) {
      const int i = first + lane_index(), n = least(kWave, item.num_slots - first);
      const float lse = i < item.num_slots ? *global(&p.partial_lse[slot_of(item, i) * p.tile_q + r]) : -kInfinity;
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

ATTN_DEVICE void merge_tile(const AttendParams& p, const MergeItem& item) {
  const Rows rows = rows_of(p, item.request, item.q_tile);
  const WorkItem whole = {item.request, item.q_tile, item.kv_head, 1, 0, rows.kv_len, -1, 0};
  for (int r = wave_index(); r < rows.count; r += kWaves) {
    WaveMerge merge;
    merge.add(p, item, r);
    merge.write(sink_of(p, rows, whole, rows.first + r, item.kv_head), p.head_dim_vo);
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
extern "C" ATTN_GLOBAL ATTN_BLOCK(256, 4, 4) void attn_merge(ATTN_ARGUMENT attn::MergeLaunch launch) {
  const attn::MergeItem item = launch.items[attn::block_index()];
  if (attn::block_index() >= launch.counts[1]) return;
  attn::merge_tile(launch.params, item);
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
