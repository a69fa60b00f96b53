// What has no plan: rows into a paged cache, and the acceptance step of speculative decoding.
#pragma once
#include <algorithm>

#include "bind_memory.h"
#include "gpu_launch.h"
#include "kernels.h"
#include "pool.h"

namespace attn {

constexpr int64_t kAppendRows = 64;  // of one item; fewer are not worth a thread

inline AppendParams append_params(uint64_t key, uint64_t value, uint64_t k, uint64_t v, uint64_t batch_indices,
                           uint64_t positions, uint64_t kv_indices, uint64_t kv_indptr, const py::tuple& key_strides,
                           const py::tuple& value_strides, const py::tuple& k_strides, const py::tuple& v_strides,
                           bool heads_first, int64_t nnz, int64_t num_pages, int batch, int num_indices, int dtype,
                           int num_kv_heads, int head_dim_qk, int head_dim_vo, int page_size) {
  require(page_size > 0, "native: page_size needs to be positive [fa2.native]");
  const KvStrides ks = kv_strides(placed(k, k_strides), true, heads_first);
  const KvStrides vs = kv_strides(placed(v, v_strides), true, heads_first);
  AppendParams p = {};
  p.key = at<void>(key), p.value = at<void>(value), p.k = at<void>(k), p.v = at<void>(v);
  p.batch_indices = at<int32_t>(batch_indices), p.positions = at<int32_t>(positions);
  p.kv_indices = at<int32_t>(kv_indices), p.kv_indptr = at<int32_t>(kv_indptr);
  p.key_stride_row = stride(key_strides, 0), p.key_stride_head = stride(key_strides, 1);
  p.value_stride_row = stride(value_strides, 0), p.value_stride_head = stride(value_strides, 1);
  p.k_stride_page = ks.page, p.k_stride_token = ks.token, p.k_stride_head = ks.head;
  p.v_stride_page = vs.page, p.v_stride_token = vs.token, p.v_stride_head = vs.head;
  p.nnz = nnz, p.num_pages = num_pages, p.batch = batch, p.num_indices = num_indices;
  p.dtype = dtype;
  p.num_kv_heads = num_kv_heads, p.head_dim_qk = head_dim_qk, p.head_dim_vo = head_dim_vo, p.page_size = page_size;
  return p;
}

inline void append(const AppendParams& p, int threads) {
  const py::gil_scoped_release released;
  const auto rows = [&p](int64_t i, void*) {
    append_rows(p, i * kAppendRows, std::min((i + 1) * kAppendRows, p.nnz));
  };
  run_region({(p.nnz + kAppendRows - 1) / kAppendRows, 0, 0, rows, nullptr}, threads);
}

inline int gpu_append(AppendParams p, const GpuDriver& driver, GpuFunction function, int64_t rows, uint64_t stream) {
  const py::gil_scoped_release released;
  return gpu_launch(driver, function, unsigned((p.nnz + rows - 1) / rows), stream, &p);
}

// Strides of probabilities are those of the first two dimensions; the vocabulary has stride 1.
inline SampleParams sample_params(uint64_t draft_probs, uint64_t target_probs, uint64_t draft_ids, uint64_t seed,
                           uint64_t offset, uint64_t tokens, uint64_t accepted, uint64_t emitted,
                           const py::tuple& draft_strides, const py::tuple& target_strides, int64_t accepted_stride,
                           int64_t emitted_stride, int64_t vocab_size, int num_drafts, int num_seeds, int num_offsets,
                           int draft_dtype, int target_dtype) {
  require(draft_strides.size() == 3 && target_strides.size() == 3,
          "native: probabilities need 3 dimensions [fa2.native]");
  require(vocab_size > 0 && num_drafts >= 0 && num_seeds > 0 && num_offsets > 0,
          "native: sizes of a chain need to be positive [fa2.native]");
  SampleParams p = {};
  p.draft_probs = at<void>(draft_probs), p.target_probs = at<void>(target_probs);
  p.draft_ids = at<int64_t>(draft_ids), p.seed = at<int64_t>(seed), p.offset = at<int64_t>(offset);
  p.tokens = at<int32_t>(tokens), p.accepted = at<int32_t>(accepted), p.emitted = at<int32_t>(emitted);
  p.draft_stride_row = stride(draft_strides, 0), p.draft_stride_position = stride(draft_strides, 1);
  p.target_stride_row = stride(target_strides, 0), p.target_stride_position = stride(target_strides, 1);
  p.accepted_stride = accepted_stride, p.emitted_stride = emitted_stride;
  p.vocab_size = vocab_size, p.num_drafts = num_drafts, p.num_seeds = num_seeds, p.num_offsets = num_offsets;
  p.draft_dtype = draft_dtype, p.target_dtype = target_dtype;
  return p;
}

inline void sample(const SampleParams& p, int64_t batch, int threads) {
  const py::gil_scoped_release released;
  run_region({batch, 0, 0, [&p](int64_t i, void*) { sample_requests(p, i, i + 1); }, nullptr}, threads);
}

inline int gpu_sample(SampleParams p, const GpuDriver& driver, GpuFunction function, int64_t batch, uint64_t stream) {
  const py::gil_scoped_release released;
  return gpu_launch(driver, function, unsigned(batch), stream, &p);
}

}  // namespace attn
