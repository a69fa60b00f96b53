// Cuts a batch into work items: which rows, which keys, which heads each one takes. A pure function of its input;
// reads index arrays on the host and touches no device.
//
// Keys are cut on one grid per request, at multiples of a chunk length from key 0. A row's bits therefore depend on
// its request and the chunk length alone, so with a fixed length not on the rest of the batch.
#pragma once
#include <cstdint>
#include <vector>

#include "params.h"

namespace attn {

constexpr int64_t kSplitAuto = 0, kSplitNever = -1;
constexpr int64_t kUnlimited = -1;

// What splitting costs and brings on a device, in keys that a worker takes in the same time when few others work.
// Measured; all zero where nobody has, and then chunks are chosen for balance.
struct Pace {
  int64_t start;      // an item before its first key
  int64_t part;       // an item more where it writes a partial
  int64_t join;       // once, where any tile is split
  int64_t gather;     // to that for each partial of the longest tile, where one block reads them all
  int64_t saturated;  // workers that keep the device busy where they are spread: of more, all get slower; 0: not measured
  int64_t spread;     // up to so many items are: each has a compute unit to itself
  int64_t crowded;    // workers that keep it busy where more items are
};

struct PlanInput {
  const int32_t* qo_indptr;  // [batch + 1] query rows
  const int32_t* kv_len;     // [batch] tokens
  int32_t batch;
  int32_t group, num_kv_heads;
  int32_t tile_q;       // packed rows per tile
  int32_t kv_tile;      // chunks that are not fixed are multiples of it
  int32_t min_chunk;    // tokens; chunks that are not fixed are no shorter
  int32_t fine;         // > 0: short chunks may be any multiple of it, whatever balances best; 0: of kv_tile only
  int32_t workers;      // what runs items side by side: compute units or threads
  int32_t joined;       // tiles of up to so many partials are joined by their last item, not by a kernel of its own
  int32_t max_heads;    // KV heads per item, at most; several let a thread read NHD pages as they lie
  int32_t window_left;  // -1 off
  bool causal;
  Pace pace;
  int64_t split;      // kSplitAuto, kSplitNever, or tokens per chunk
  int64_t max_slots;  // partials that there is memory for, or kUnlimited; a fixed split does not keep to it
};

struct Plan {
  std::vector<WorkItem> items;    // most expensive first
  std::vector<MergeItem> merges;
  int32_t num_slots = 0;
  int32_t num_launched = 0;  // of the merges
  int32_t max_heads = 0;  // of an item
  int64_t chunk = 0;      // tokens; kSplitNever when nothing may be cut

  // Items as they are made, and what each costs. Kept, like the memory of the rest, for the next plan that is made
  // in place of this one: fresh pages would cost more than the planning.
  std::vector<WorkItem> unsorted;
  std::vector<int64_t> costs;
};

// Plans a batch into `plan`, in place of what was there. Throws std::length_error for more than 2^26 items.
void make_plan(const PlanInput& in, Plan& plan);

// Bounds of every batch that a captured graph may be replayed with.
struct PlanLimits {
  int64_t batch, total_q;
  int64_t q_len;     // rows of each request, or -1: unlike, total_q in all
  int64_t max_kv;    // tokens of the longest request
  int64_t total_kv;  // tokens of all
};

// Sizes that no plan within the limits exceeds.
struct Capacity {
  int64_t items, merges, slots;
};

// Uses the scalars of `in` only. Slots are cut to in.max_slots unless the split is fixed.
Capacity capacity_of(const PlanInput& in, const PlanLimits& limits);

// Height of the tile of a GPU, in packed rows (query rows x gqa_group_size): 16, 64 or, for 256 rows and more, 128.
// The rows of a request are
//   q_len >= 0               q_len of each: exact, also under capture
//   eager, unlike requests   the mean
//   captured                 the longest request that fits: total_q - batch + 1 query rows
int cta_tile_q(int64_t total_q, int64_t batch, int64_t q_len, int group, bool captured);

}  // namespace attn
