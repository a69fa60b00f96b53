// Where a work item's rows and keys are: packing of GQA heads, what each row may see, and the way from a token to
// its place in a paged or ragged cache.
#pragma once
#include "portability.h"

namespace attn {

// Packed rows [first, first + count) of a request.
struct Rows {
  int request;
  int q_begin, q_len;  // rows of q
  int kv_len;
  int first, count;
};

ATTN_DEVICE Rows rows_of(const AttendParams& p, int request, int q_tile) {
  Rows rows;
  rows.request = request;
  rows.q_begin = p.qo_indptr[request];
  rows.q_len = p.qo_indptr[request + 1] - rows.q_begin;
  rows.kv_len = p.kv_len[request];
  rows.first = q_tile * p.tile_q;
  rows.count = least(p.tile_q, rows.q_len * p.group - rows.first);
  return rows;
}

// Offset of a row of q or out, in elements.
ATTN_DEVICE int64_t row_offset(const AttendParams& p, const Rows& rows, int packed, int kv_head, int64_t stride_row,
                               int64_t stride_head) {
  const int query = packed / p.group;
  return (rows.q_begin + query) * stride_row + int64_t(kv_head * p.group + packed - query * p.group) * stride_head;
}

// The keys [begin, end) that the window and the causal diagonal leave to query row `query`; the end is not below
// the begin only where the row sees something.
struct Keys {
  int begin, end;
};

ATTN_DEVICE Keys keys_of(const AttendParams& p, const Rows& rows, int query) {
  const int64_t diagonal = int64_t(rows.kv_len) - rows.q_len + query;
  Keys keys = {0, rows.kv_len};
  if (p.mask == kMaskCausal && diagonal + 1 < keys.end) keys.end = int(diagonal + 1);
  if (p.window_left >= 0 && diagonal - p.window_left > 0) keys.begin = int(diagonal - p.window_left);
  return keys;
}

// The keys of an item that any row of a tile may see. The begin stays on the grid of tiles that starts at
// kv_begin, so that leaving out unseen keys changes no bit.
ATTN_DEVICE Keys keys_of_tile(const AttendParams& p, const Rows& rows, const WorkItem& item, int step) {
  Keys keys = {item.kv_begin, least(item.kv_end, rows.kv_len)};
  if (rows.count <= 0) return keys;
  const Keys low = keys_of(p, rows, rows.first / p.group);
  const Keys high = keys_of(p, rows, (rows.first + rows.count - 1) / p.group);
  keys.end = least(keys.end, high.end);
  if (low.begin > keys.begin) keys.begin += (low.begin - keys.begin) / step * step;
  return keys;
}

// Offset of a token in k or v, in elements, for KV head 0.
struct Place {
  int64_t k, v;
};

ATTN_DEVICE Place place_of(const AttendParams& p, int request, int token) {
  const int64_t start = p.kv_indptr[request];
  if (p.page_size == 0) return {(start + token) * p.k_stride_token, (start + token) * p.v_stride_token};
  const int entry = token / p.page_size, slot = token - entry * p.page_size;
  const int64_t page = p.kv_indices[start + entry];
  return {page * p.k_stride_page + slot * p.k_stride_token, page * p.v_stride_page + slot * p.v_stride_token};
}

ATTN_DEVICE float times(float x, const float* optional) { return optional ? x * *global(optional) : x; }

// What an element of the cache is worth of what a kernel reads it as: gfx942 knows e4m3fnuz only.
ATTN_DEVICE float cache_unit(const AttendParams& p) {
#if ATTN_AMD && !defined(__gfx950__) && (ATTN_KV || ATTN_GENERAL)
  return p.kv_dtype == kFloat8E4M3FN ? 2.f : 1.f;
#else
  return 1.f;
#endif
}

ATTN_DEVICE float logit_scale(const AttendParams& p) {
  return times(times(p.sm_scale * p.q_scale * p.k_scale * cache_unit(p), p.q_scale_ptr), p.k_scale_ptr);
}
ATTN_DEVICE float output_scale(const AttendParams& p) { return times(p.v_scale * cache_unit(p), p.v_scale_ptr); }

// Where a finished row goes.
struct Sink {
  void* out;
  int64_t offset;
  float* lse;  // or null
  int dtype;
};

ATTN_DEVICE Sink sink_of(const AttendParams& p, const Rows& rows, const WorkItem& item, int packed, int kv_head) {
  if (item.slot >= 0) {
    const int64_t at = int64_t(item.slot + kv_head - item.kv_head) * p.tile_q + packed - rows.first;
    return {p.partial_out, at * p.head_dim_vo, p.partial_lse + at, kFloat32};
  }
  const int query = packed / p.group, head = kv_head * p.group + packed - query * p.group;
  float* lse = p.lse ? p.lse + int64_t(rows.q_begin + query) * p.num_qo_heads + head : nullptr;
  return {p.out, row_offset(p, rows, packed, kv_head, p.out_stride_row, p.out_stride_head), lse, p.o_dtype};
}

}  // namespace attn
