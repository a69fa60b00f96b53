// Small kernels of a GPU: device code only, all in one code object's source. ATTN_KERNEL names the one to compile, as
// the compilers of kernels_gpu.cpp do:
//   1  attn_merge          one block joins the partials of some rows of one tile and KV head
//   2  attn_append         one block writes the heads of one row
//   3  attn_chain_sample   one block samples one request
#include "append.h"
#include "merge_gpu.h"
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

#if ATTN_KERNEL == 2

ATTN_DEVICE void copy_head(void* cache, int64_t to, const void* rows, int64_t from, int size, int n) {
  char* target = static_cast<char*>(cache) + to * size;
  const char* source = static_cast<const char*>(rows) + from * size;
  const uint64_t places = reinterpret_cast<uint64_t>(target) | reinterpret_cast<uint64_t>(source);
  if ((places | uint64_t(n * size)) % 16 == 0) {
    for (int i = lane_index(); i < n * size / 16; i += kWave) store_line(target + 16 * i, load_line(source + 16 * i));
    return;
  }
  for (int i = lane_index(); i < n; i += kWave)
    for (int b = 0; b < size; b++) global(target)[i * size + b] = global(source)[i * size + b];
}

// A wave takes a head of the key or of the value at a time.
ATTN_DEVICE void append_row(const AppendParams& p, int64_t row) {
  const Slot slot = slot_of(p, row);
  if (!slot.exists) return;
  const int size = element_size(p.dtype);
  for (int i = wave_index(); i < 2 * p.num_kv_heads; i += kWaves) {
    const int h = i >> 1;
    if (i & 1)
      copy_head(p.v, slot.v + h * p.v_stride_head, p.value, row * p.value_stride_row + h * p.value_stride_head, size,
                p.head_dim_vo);
    else
      copy_head(p.k, slot.k + h * p.k_stride_head, p.key, row * p.key_stride_row + h * p.key_stride_head, size,
                p.head_dim_qk);
  }
}

#endif

}  // namespace attn

#if ATTN_KERNEL == 1
namespace attn {

constexpr int kMostMergeRows = 16;  // of a block

// Packed rows of a block: few, so that many waves share what is to be read, unless that takes more blocks than there are.
ATTN_DEVICE int merge_rows_of(int tile_q, int merges) {
  int rows = kLeastMergeRows;
  while (rows < kMostMergeRows && merges * (tile_q / rows) > block_count()) rows *= 2;
  return rows;
}

// Joins rows [first, first + most) of a tile, as far as there are any.
ATTN_DEVICE void merge_part(const AttendParams& p, const MergeItem& item, int first, int most, Shared shared) {
  const Rows rows = rows_of(p, item.request, item.q_tile);
  const int count = least(rows.count - first, most);
#if ATTN_NVIDIA
  if (p.head_dim_vo <= 128) {  // leaves registers for twice as many loads
    merge_rows<WaveMerge<128, 4>, kWaves>(p, item, rows, first, count, p.head_dim_vo, shared);
    return;
  }
#endif
  merge_rows<WaveMerge<kMostMergeDims, 1>, kWaves>(p, item, rows, first, count, p.head_dim_vo, shared);
}

}  // namespace attn

// A grid that is smaller than the parts there are goes over them in rounds, where kTakesTurns.
extern "C" ATTN_GLOBAL ATTN_BLOCK(attn::kThreads, 4, attn::kBlocks)
void attn_merge(ATTN_ARGUMENT attn::MergeLaunch launch) {
  using namespace attn;
#if ATTN_NVIDIA
  ATTN_SHARED char shared[kWaves * WaveMerge<kMostMergeDims, 1>::kBytes];
#else
  const Shared shared = nullptr;
#endif
  const AttendParams& p = launch.params;
  const int merges = launch.counts[1], launched = launch.counts[5];
  await_leader();  // also where nothing is left to do: who follows this kernel relies on both
  if (launched == 0) return;
  const int each = merge_rows_of(p.tile_q, merges), parts = p.tile_q / each;
  for (int i = block_index(); i < merges * parts; i += block_count()) {
    const int at = i / parts;
    const MergeItem item = launch.items[at];
    if (!kJoinsParts || item.launched) merge_part(p, item, (i - at * parts) * each, each, (Shared)shared);
    if constexpr (!kTakesTurns) return;
    barrier();  // before memory serves the next rows
  }
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
