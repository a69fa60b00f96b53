// The attention kernel of a GPU: device code only. One block runs one work item.
//
//   gfx942  clang++ -x hip --offload-arch=gfx942 --cuda-device-only --no-gpu-bundle-output -nogpulib -nogpuinc
//           -std=c++17 -O3 -mcode-object-version=5
//   sm_90   nvcc -x cu -std=c++17 -arch=sm_90a -O3 -cubin
//
// A variant is chosen by definitions (see variants.py):
//   ATTN_Q        type of query and matrix products: 1 float16, 2 bfloat16
//   ATTN_KV       plain kernels: 0 cache of the query's type, 1 fp8
//   ATTN_D        head dim, or what smaller ones are padded to: 64, 128, 256
//   ATTN_TILE     packed rows: 16 to 128
//   ATTN_WIDE     1: waves take two blocks of 16 rows where the tile has more than 64
//   ATTN_WAVES    of a block: 4, or 8 in two groups that share the keys of a step (NVIDIA, plain, 64 rows)
//   ATTN_GENERAL  0: causal and window only, head dims of ATTN_D; 1: everything
//   ATTN_ENTRY    name of the kernel
#include "merge_gpu.h"
#include "tile_gpu.h"

namespace attn {

constexpr int kWaves = ATTN_WAVES;
// Two row blocks for a wave halve what it reads from shared memory, at the price of registers.
constexpr int kRowBlocks = ATTN_TILE <= 64 || !ATTN_WIDE ? 1 : 2;
constexpr int kKeyGroups = 16 * kRowBlocks * kWaves / ATTN_TILE;
#if ATTN_Q == 1
using Element = F16;
#else
using Element = B16;
#endif
using Tile = GpuTile<Element, ATTN_D, kRowBlocks, kWaves, kKeyGroups, ATTN_GENERAL, ATTN_KV>;
static_assert(Tile::kHeight == ATTN_TILE, "tiles are of the planned height");

// What registers should leave room for: waves of a SIMD, blocks of a multiprocessor.
constexpr int kSimdWaves = kKeyGroups == kWaves && !ATTN_GENERAL ? (ATTN_D <= 128 ? 4 : 2)
                           : ATTN_GENERAL && ATTN_D == 256 && ATTN_TILE == 16 ? 1 : 2;
constexpr int kBlocks = ATTN_D == 256 || ATTN_WAVES == 8 ? 1 : ATTN_TILE == 16 && ATTN_D == 64 && !ATTN_GENERAL ? 4 : 2;
// Few rows, or few partials, are joined by the block that writes the last of them, which saves a launch; more keep more
// blocks busy. Tall and wide tiles leave no registers for that.
constexpr bool kJoins = kJoinsParts && (ATTN_TILE == 16 || ATTN_D <= 128);

// Joins the partials of a tile when they are all there: in the block that comes here last, whichever that is.
ATTN_DEVICE void join_parts(const AttendParams& p, const Rows& rows, Tile& tile, const MergeItem& merge,
                            int32_t* arrived, Shared shared) {
  constexpr int run = ATTN_D < 4 * kWave ? ATTN_D / kWave : 4;
  using Merge = WaveMerge<ATTN_D, run, Tile::kSharedBytes / kWaves>;
  static_assert(kWaves * Merge::kBytes <= Tile::kSharedBytes, "waves meet in the tile's memory");
  tile.finish();
  if (thread_index() == 0) write_word(shared, count_around(arrived, merge.num_slots - 1));
  barrier();
  const bool last = int(read_word(shared)) == merge.num_slots - 1;
  if (!last) return;
  if constexpr (Tile::kTakesParts) {
    tile.take_parts(merge);
    return;
  }
  barrier();  // before it serves something else
  merge_rows<Merge, kWaves>(p, merge, rows, 0, rows.count, ATTN_GENERAL ? p.head_dim_vo : ATTN_D, shared);
}

// Whether a block that is done takes another item. A captured grid can then be as small as what runs side by side: the
// surplus blocks of a larger one cost time, and where they fill every multiprocessor some first blocks share one.
// Not where registers are full.
constexpr bool kTurns = kTakesTurns && !ATTN_GENERAL && !ATTN_KV && (ATTN_TILE == 16 || ATTN_D <= 128);

ATTN_DEVICE void run_item(const AttendLaunch& launch, const WorkItem& item, Shared shared) {
  const AttendParams& p = launch.params;
  const Rows rows = rows_of(p, item.request, item.q_tile);
  MergeItem merge = {};
  if (kJoins && item.slot >= 0) merge = launch.merges[item.merge];
  const bool joins = kJoins && item.slot >= 0 && !merge.launched;
  Tile tile(p, item, rows, shared);
  attend<Tile>(p, item, tile);
  if (joins) join_parts(p, rows, tile, merge, &launch.merges[item.merge].arrived, shared);
}

#if defined(ATTN_LDS)
static_assert(Tile::kSharedBytes == ATTN_LDS, "variants.py knows what a launch asks for");
#endif

}  // namespace attn

extern "C" ATTN_GLOBAL ATTN_BLOCK(attn::Tile::kThreads, attn::kSimdWaves, attn::kBlocks)
void ATTN_ENTRY(ATTN_ARGUMENT attn::AttendLaunch launch) {
  using namespace attn;
  ATTN_BLOCK_MEMORY(shared, Tile::kSharedBytes);
  WorkItem item = launch.items[block_index()];  // there is one, be it left over from another plan
  const int count = launch.counts[0];
  if (block_index() >= count) return;
  if constexpr (ATTN_TILE > 16) start_follower();  // the merge kernel; low tiles are joined here
  if constexpr (!kTurns) {
    run_item(launch, item, (Shared)shared);
    return;
  }
  const bool turns = count > block_count();
  while (true) {
    run_item(launch, item, (Shared)shared);
    if (!turns) return;
    barrier();
    // Every block asks until there is no item left: as often in all as there are items, so the count ends at 0. It asks
    // when it is done: who works on a long item shall not hold another.
    if (thread_index() == 0) write_word((Shared)shared, take_around(&launch.counts[4], count - 1));
    barrier();
    const int next = block_count() + int(read_word((Shared)shared));
    barrier();  // before memory serves the next item
    if (next >= count) return;
    item = launch.items[next];
  }
}
