// Entry points of the CPU kernels. One shared object per instruction set is built from the same sources; the
// flags below choose the vector unit, so everything in it must be compiled with the same flags.
//
//   generic    (no flag; SSE2 on x86, NEON on arm)
//   avx2       -mavx2 -mfma -mf16c
//   avx512     the above + -mavx512f -mavx512bw -mavx512dq -mavx512vl
//   avx512bf16 the above + -mavx512bf16
// Always: -std=c++17 -O2 -fno-math-errno -fno-trapping-math -ffp-contract=off -fvisibility=hidden. Never
// -ffast-math: the kernels use true infinities and pass NaN on.
//
// Nothing here allocates, throws, locks or keeps state between calls. Arguments are trusted: the binding checks
// them. Any number of threads may call at once, each with a scratch of its own.
#pragma once
#include <cstddef>

#include "params.h"

namespace attn {

// Largest head dim, of queries and keys as of values; rows of it lie on the stack.
constexpr int kMostDims = 1024;

// Vector unit compiled in: "generic", "avx2", "avx512" or "avx512bf16".
const char* isa_name();

// Keys that one step of the kernel takes. Chunks that are multiples of it waste nothing; any size is right.
int kv_tile();

// Tile height for `rows` packed rows (q_len * group of the longest request): the least of 4, 8, 16, 32, 64 that
// holds them, or 64. Any multiple of 4 is right.
int tile_q_for(int rows);

// Bytes of scratch, 64-byte aligned, that a thread needs for items of at most `num_heads` KV heads.
size_t attend_scratch_bytes(const AttendParams& p, int num_heads);

// Runs one item. Uses scratch; writes out/lse or partials (see WorkItem).
void attend_item(const AttendParams& p, const WorkItem& item, void* scratch);

// Joins the partials of one tile. The items that wrote them must have finished.
void merge_item(const AttendParams& p, const MergeItem& item);

// Writes rows [begin, end) of an append. Rows of one call must not share a slot.
void append_rows(const AppendParams& p, int64_t begin, int64_t end);

// Samples requests [begin, end) of a speculative chain.
void sample_requests(const SampleParams& p, int64_t begin, int64_t end);

// Writes head_dim / 2 entries for AttendParams::rope_turns.
void rope_turns(int head_dim, double theta, double scale, double* out);

// Writes num_heads entries for AttendParams::alibi_slopes.
void alibi_slopes(int num_heads, float* out);

}  // namespace attn
