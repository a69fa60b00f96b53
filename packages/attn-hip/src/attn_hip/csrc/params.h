// Parameter blocks shared by the planner, the binding and the kernels of every target.
//
// Plain data, one layout on host and device: a block is passed to a kernel by value. Strides are in elements and
// 64-bit; every pointer is to memory of the device that runs the kernel. A head dimension (of q, k, v and out)
// always has stride 1.
#pragma once
#if !defined(__AMDGCN__) && !defined(__CUDACC__)
#include <cstdint>
#endif

namespace attn {

#if defined(__AMDGCN__) || defined(__CUDACC__)
using int8_t = signed char;
using uint8_t = unsigned char;
using uint16_t = unsigned short;
using int32_t = int;
using uint32_t = unsigned int;
using int64_t = long long;
using uint64_t = unsigned long long;
#else
using std::int32_t;
using std::int64_t;
using std::int8_t;
using std::uint16_t;
using std::uint32_t;
using std::uint64_t;
using std::uint8_t;
#endif

enum DType : int32_t {
  kFloat32 = 0,
  kFloat16 = 1,
  kBFloat16 = 2,
  kFloat8E4M3FN = 3,
  kFloat8E4M3FNUZ = 4,
  kFloat64 = 5,  // probabilities only
  kFloat8E5M2 = 6,
  kFloat8E5M2FNUZ = 7,
};
enum Mask : int32_t { kMaskNone = 0, kMaskCausal = 1, kMaskCustom = 2 };
enum Position : int32_t { kPositionNone = 0, kPositionRope = 1, kPositionAlibi = 2 };

// One unit of attention work. The query rows of a request are packed with the heads of a GQA group:
// packed row i of KV head h is query row i / group of query head h * group + i % group, so a request has
// q_len * group packed rows per KV head, cut into tiles of AttendParams::tile_q.
//
// The item covers packed rows [q_tile * tile_q, (q_tile + 1) * tile_q), keys [kv_begin, kv_end) and KV heads
// [kv_head, kv_head + num_heads). It writes
//   slot <  0: out and lse of its rows;
//   slot >= 0: partials of KV head kv_head + n to slot + n, to be joined by a MergeItem.
// Every tile of every request (also one without keys: kv_begin == kv_end) needs at least one item, or its rows
// of out and lse stay unwritten. Keys outside [0, kv_len) are never read.
//
// The bits of a result depend on kv_begin, kv_end and the request alone: not on tile_q, num_heads, the slot or
// the rest of the batch.
struct WorkItem {
  int32_t request;
  int32_t q_tile;
  int32_t kv_head;
  int32_t num_heads;  // CPU: 1..all; several heads let a decode read NHD pages in memory order. GPU: 1.
  int32_t kv_begin;   // tokens
  int32_t kv_end;     // tokens, <= kv_len
  int32_t slot;
  int32_t merge;  // slot >= 0: the MergeItem of KV head kv_head, which those of its other heads follow
};

// Joins partials [first_slot, first_slot + num_slots * slot_stride) of one tile and one KV head, in that order,
// into out and lse. num_slots >= 1.
struct MergeItem {
  int32_t request;
  int32_t q_tile;
  int32_t kv_head;
  int32_t first_slot;
  int32_t num_slots;
  int32_t slot_stride;  // distance between the slots of two chunks; num_heads of the items that wrote them
  int32_t arrived;      // counts the items that wrote theirs, where the last one joins them; 0 before and after a run
  int32_t launched;     // a merge kernel joins them; 0: the last item does
};

struct AttendParams {
  const void* q;  // [total_q, num_qo_heads, head_dim_qk] in q_dtype
  const void* k;  // paged: kv_dtype, see strides; ragged: the same with page_size 0 and kv_indices null
  const void* v;
  void* out;    // [total_q, num_qo_heads, head_dim_vo] in o_dtype
  float* lse;   // [total_q, num_qo_heads] contiguous, base 2, or null
  float* partial_out;  // [slots, tile_q, head_dim_vo]; null when no item has a slot
  float* partial_lse;  // [slots, tile_q]

  const int32_t* qo_indptr;       // [batch + 1] query rows
  const int32_t* kv_indptr;       // [batch + 1] pages, or tokens when ragged
  const int32_t* kv_indices;      // page ids, or null when ragged
  const int32_t* kv_len;          // [batch] tokens
  const uint8_t* custom_mask;     // kMaskCustom: bit row * kv_len + key of each request, little-endian
  const int32_t* mask_indptr;     // [batch] byte offset of each request's bits
  const float* alibi_slopes;      // kPositionAlibi: [num_qo_heads]
  const double* rope_turns;       // kPositionRope: [head_dim_qk / 2], theta^(-2i/head_dim_qk) / scale / (2 pi)
  const float* q_scale_ptr;       // Optional device scalars; each multiplies the float of its name below.
  const float* k_scale_ptr;
  const float* v_scale_ptr;

  int64_t q_stride_row, q_stride_head;
  int64_t out_stride_row, out_stride_head;
  int64_t k_stride_page, k_stride_token, k_stride_head;  // ragged: stride_page is not used
  int64_t v_stride_page, v_stride_token, v_stride_head;

  int32_t q_dtype, kv_dtype, o_dtype;  // DType; kv_dtype is the encoding of the cache's bytes
  int32_t num_qo_heads, num_kv_heads, group;  // group = num_qo_heads / num_kv_heads
  int32_t head_dim_qk, head_dim_vo;           // 1..512
  int32_t page_size;                          // tokens, 0 when ragged
  int32_t tile_q;                             // packed rows per q_tile; see tile_q_for() in kernels.h
  int32_t mask;                               // Mask
  int32_t position;                           // Position
  int32_t window_left;                        // -1 off
  int32_t reserved;
  float sm_scale;    // multiplies q @ k
  float soft_cap;    // 0 off
  float q_scale, k_scale, v_scale;
  float reserved_f;
};

// The one argument, by value, of an attention kernel of a GPU. Block b runs items[b]; a captured grid covers what a plan
// may have, so a block from counts[0] on returns at once. A grid may be smaller where a kernel takes items in turns
// (kernels_gpu.cpp): then a block that is done takes the next one that nobody has.
struct AttendLaunch {
  AttendParams params;
  const WorkItem* items;
  int32_t* counts;        // [6] items, merges, slots, KV heads of the widest item; items taken by blocks that were done;
                          // merges that are launched
  MergeItem* merges;      // for kernels that join partials themselves
};

// The same of the kernel that joins partials: blocks share the rows of items[0, counts[1]).
struct MergeLaunch {
  AttendParams params;
  const MergeItem* items;
  const int32_t* counts;
};

// Writes row n of key and value to position positions[n] of request batch_indices[n]. A row is skipped when its
// request is outside [0, batch), its position is negative or behind the request's last page, or its page id is
// outside [0, num_pages). Bits are copied.
struct AppendParams {
  const void* key;    // [nnz, num_kv_heads, head_dim_qk] in dtype
  const void* value;  // [nnz, num_kv_heads, head_dim_vo] in dtype
  void* k;            // cache pages in dtype
  void* v;
  const int32_t* batch_indices;  // [nnz]
  const int32_t* positions;      // [nnz] tokens
  const int32_t* kv_indices;
  const int32_t* kv_indptr;      // [batch + 1] pages

  int64_t key_stride_row, key_stride_head;
  int64_t value_stride_row, value_stride_head;
  int64_t k_stride_page, k_stride_token, k_stride_head;
  int64_t v_stride_page, v_stride_token, v_stride_head;
  int64_t nnz, num_pages;

  int32_t batch, num_indices;  // num_indices: entries of kv_indices
  int32_t dtype;
  int32_t num_kv_heads, head_dim_qk, head_dim_vo, page_size;
};

// Chain speculative sampling; the meaning is that of attn_core.sampling.chain_speculative_sampling, bit for bit.
// The vocabulary has stride 1. Ids outside [0, vocab_size) end a chain.
struct SampleParams {
  const void* draft_probs;   // [batch, num_drafts, vocab_size] float16, bfloat16, float32 or float64
  const void* target_probs;  // [batch, num_drafts + 1, vocab_size]
  const int64_t* draft_ids;  // [batch, num_drafts] contiguous
  const int64_t* seed;       // [num_seeds]: 1 or batch
  const int64_t* offset;     // [num_offsets]: 1 or batch
  int32_t* tokens;           // [batch, num_drafts + 1] contiguous, written
  int32_t* accepted;         // [batch] with the stride below, added to
  int32_t* emitted;          // likewise

  int64_t draft_stride_row, draft_stride_position;
  int64_t target_stride_row, target_stride_position;
  int64_t accepted_stride, emitted_stride;
  int64_t vocab_size;

  int32_t num_drafts, num_seeds, num_offsets;
  int32_t draft_dtype, target_dtype;
  int32_t reserved;
};

}  // namespace attn
