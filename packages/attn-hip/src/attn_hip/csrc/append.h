// Where a row of an append goes.
#pragma once
#include "portability.h"

namespace attn {

struct Slot {
  int64_t k, v;  // offset of KV head 0 in elements
  bool exists;
};

ATTN_DEVICE Slot slot_of(const AppendParams& p, int64_t row) {
  const int request = p.batch_indices[row], position = p.positions[row];
  if (request < 0 || request >= p.batch || position < 0) return {0, 0, false};
  const int64_t entry = int64_t(p.kv_indptr[request]) + position / p.page_size;
  if (entry >= p.kv_indptr[request + 1] || entry >= p.num_indices) return {0, 0, false};
  const int64_t page = p.kv_indices[entry], token = position % p.page_size;
  if (page < 0 || page >= p.num_pages) return {0, 0, false};
  return {page * p.k_stride_page + token * p.k_stride_token, page * p.v_stride_page + token * p.v_stride_token, true};
}

}  // namespace attn
