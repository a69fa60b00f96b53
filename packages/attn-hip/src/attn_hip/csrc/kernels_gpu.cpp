// The GPU build: device code only. One block runs one work item; tile_q is GpuTile::kHeight.
//
//   gfx942  clang++ -x hip --offload-arch=gfx942 --cuda-device-only --no-gpu-bundle-output -nogpulib -nogpuinc
//           -std=c++17 -O3 -mcode-object-version=5
//   sm_90   nvcc -x cu -std=c++17 -arch=sm_90 -O3 -cubin
#include "tile_gpu.h"

#ifndef ATTN_WAVES
#define ATTN_WAVES 4
#endif
#ifndef ATTN_KEYS
#define ATTN_KEYS 64
#endif

namespace attn {

template <int D>
ATTN_DEVICE void attend_block(const AttendLaunch& launch) {
  using Tile = GpuTile<D, ATTN_WAVES, ATTN_KEYS>;
  if (block_index() >= launch.counts[0]) return;
  ATTN_SHARED uint16_t keys[Tile::kPanel];
  ATTN_SHARED uint16_t values[Tile::kPanel];
  Tile tile((Shared)keys, (Shared)values);
  attend<Tile>(launch.params, launch.items[block_index()], tile);
}

}  // namespace attn

extern "C" ATTN_GLOBAL ATTN_BLOCK_THREADS(ATTN_WAVES * attn::kWave) void attend_bf16_64(attn::AttendLaunch launch) {
  attn::attend_block<64>(launch);
}

extern "C" ATTN_GLOBAL ATTN_BLOCK_THREADS(ATTN_WAVES * attn::kWave) void attend_bf16_128(attn::AttendLaunch launch) {
  attn::attend_block<128>(launch);
}
