// Runs of a plan: the tensors of one call joined to kernels and index arrays.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

#include "bind_memory.h"
#include "gpu_launch.h"
#include "kernels.h"
#include "pool.h"

namespace attn {

// The facts of a problem as far as they do not depend on memory.
inline AttendParams problem_params(int q_dtype, int kv_dtype, int o_dtype, int num_qo_heads, int num_kv_heads,
                                   int head_dim_qk, int head_dim_vo, int page_size, int mask, int position,
                                   int window_left, float sm_scale, float soft_cap) {
  require(num_kv_heads > 0 && num_qo_heads > 0 && num_qo_heads % num_kv_heads == 0,
          "native: num_qo_heads needs to be a multiple of num_kv_heads [fa2.native]");
  require(std::min(head_dim_qk, head_dim_vo) > 0 && std::max(head_dim_qk, head_dim_vo) <= kMostDims,
          "native: head dims need to be 1 to 1024 [fa2.native]");
  AttendParams p = {};
  p.q_dtype = q_dtype, p.kv_dtype = kv_dtype, p.o_dtype = o_dtype;
  p.num_qo_heads = num_qo_heads, p.num_kv_heads = num_kv_heads, p.group = num_qo_heads / num_kv_heads;
  p.head_dim_qk = head_dim_qk, p.head_dim_vo = head_dim_vo, p.page_size = page_size;
  p.mask = mask, p.position = position, p.window_left = window_left;
  p.sm_scale = sm_scale, p.soft_cap = soft_cap;
  p.q_scale = p.k_scale = p.v_scale = 1.f;
  return p;
}

// Fills in the tensors of a run.
inline void set_tensors(AttendParams& p, bool heads_first, const Placed& q, const Placed& k, const Placed& v,
                        const Placed& out, uint64_t lse, uint64_t partials, int64_t slots) {
  p.q = at<void>(q.at), p.k = at<void>(k.at), p.v = at<void>(v.at), p.out = at<void>(out.at), p.lse = at<float>(lse);
  p.q_stride_row = q.strides[0], p.q_stride_head = q.strides[1];
  p.out_stride_row = out.strides[0], p.out_stride_head = out.strides[1];
  const KvStrides ks = kv_strides(k, p.page_size, heads_first);
  const KvStrides vs = kv_strides(v, p.page_size, heads_first);
  p.k_stride_page = ks.page, p.k_stride_token = ks.token, p.k_stride_head = ks.head;
  p.v_stride_page = vs.page, p.v_stride_token = vs.token, p.v_stride_head = vs.head;
  p.partial_out = at<float>(partials), p.partial_lse = p.partial_out + slots * p.tile_q * p.head_dim_vo;
}

// What multiplies q, k and v: a number each, or one that the kernel reads where it is.
struct Scales {
  float q = 1.f, k = 1.f, v = 1.f;
  uint64_t q_at = 0, k_at = 0, v_at = 0;
};

inline void set_scales(AttendParams& p, const Scales& scales) {
  p.q_scale = scales.q, p.k_scale = scales.k, p.v_scale = scales.v;
  p.q_scale_ptr = at<float>(scales.q_at), p.k_scale_ptr = at<float>(scales.k_at);
  p.v_scale_ptr = at<float>(scales.v_at);
}

// The facts of a problem, ready to be launched. Immutable, so threads may share it.
class Kernel {
 public:
  Kernel(int q_dtype, int kv_dtype, int o_dtype, int num_qo_heads, int num_kv_heads, int head_dim_qk, int head_dim_vo,
         int page_size, bool heads_first, int mask, int position, int window_left, float sm_scale, float soft_cap,
         double rope_theta, double rope_scale)
      : p_(problem_params(q_dtype, kv_dtype, o_dtype, num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo, page_size,
                          mask, position, window_left, sm_scale, soft_cap)),
        heads_first_(heads_first) {
    if (position == kPositionRope) {
      turns_.resize(size_t(head_dim_qk / 2));
      rope_turns(head_dim_qk, rope_theta, rope_scale, turns_.data());
      p_.rope_turns = turns_.data();
    }
    if (position == kPositionAlibi) {
      slopes_.resize(size_t(num_qo_heads));
      alibi_slopes(num_qo_heads, slopes_.data());
      p_.alibi_slopes = slopes_.data();
    }
  }
  Kernel(const Kernel&) = delete;
  Kernel& operator=(const Kernel&) = delete;

  // Index arrays in host memory, and how many entries two of them have room for.
  struct Arrays {
    uint64_t qo_indptr, kv_indptr, kv_indices, kv_len, custom_mask, mask_indptr, items, merges, counts;
    int64_t item_capacity, merge_capacity, slots;
    int tile_q;
  };

  void run(const Arrays& arrays, const Placed& q, const Placed& k, const Placed& v, const Placed& out, uint64_t lse,
           uint64_t partials, const Scales& scales, int threads) const {
    AttendParams p = p_;
    p.tile_q = arrays.tile_q;
    set_tensors(p, heads_first_, q, k, v, out, lse, partials, arrays.slots);
    set_scales(p, scales);
    p.qo_indptr = at<int32_t>(arrays.qo_indptr), p.kv_indptr = at<int32_t>(arrays.kv_indptr);
    p.kv_indices = at<int32_t>(arrays.kv_indices), p.kv_len = at<int32_t>(arrays.kv_len);
    p.custom_mask = at<uint8_t>(arrays.custom_mask), p.mask_indptr = at<int32_t>(arrays.mask_indptr);
    const int32_t* said = at<const int32_t>(arrays.counts);
    require(said[0] >= 0 && said[0] <= arrays.item_capacity && said[1] >= 0 && said[1] <= arrays.merge_capacity &&
                said[2] <= arrays.slots && said[3] >= 0 && said[3] <= p.num_kv_heads && (said[2] == 0 || partials),
            "native: counts of the plan image need to fit its arrays [fa2.native]");
    launch(p, at<const WorkItem>(arrays.items), said[0], at<const MergeItem>(arrays.merges), said[1], said[3], threads);
  }

 private:
  static void launch(const AttendParams& p, const WorkItem* items, int num_items, const MergeItem* merges,
                     int num_merges, int max_heads, int threads) {
    const py::gil_scoped_release released;
    const Region region = {num_items, num_merges, attend_scratch_bytes(p, max_heads),
                           [&p, items](int64_t i, void* scratch) { attend_item(p, items[i], scratch); },
                           [&p, merges](int64_t i, void*) { merge_item(p, merges[i]); }};
    run_region(region, threads);
  }

  AttendParams p_ = {};
  bool heads_first_;
  std::vector<double> turns_;
  std::vector<float> slopes_;
};

// The plan of a run on a GPU: kernels, index arrays, grid sizes. Immutable; what changes per run is passed to run().
class GpuPlan {
 public:
  struct Arrays {
    uint64_t qo_indptr, kv_indptr, kv_indices, kv_len, custom_mask, mask_indptr, rope_turns, alibi_slopes;
    uint64_t items, merges, counts;
  };

  GpuPlan(const GpuDriver& driver, GpuFunction attend, GpuFunction merge, const AttendParams& problem,
          bool heads_first, int tile_q, const Arrays& arrays, unsigned num_items, unsigned merge_blocks, int64_t slots)
      : driver_(driver), attend_(attend), merge_(merge), heads_first_(heads_first), num_items_(num_items),
        merge_blocks_(merge_blocks), slots_(slots) {
    AttendParams& p = launch_.params;
    p = problem;
    p.tile_q = tile_q;
    p.qo_indptr = at<int32_t>(arrays.qo_indptr), p.kv_indptr = at<int32_t>(arrays.kv_indptr);
    p.kv_indices = at<int32_t>(arrays.kv_indices), p.kv_len = at<int32_t>(arrays.kv_len);
    p.custom_mask = at<uint8_t>(arrays.custom_mask), p.mask_indptr = at<int32_t>(arrays.mask_indptr);
    p.rope_turns = at<double>(arrays.rope_turns), p.alibi_slopes = at<float>(arrays.alibi_slopes);
    launch_.items = at<WorkItem>(arrays.items), launch_.counts = at<int32_t>(arrays.counts);
    launch_.merges = at<MergeItem>(arrays.merges);
  }

  // Enqueues the kernels; returns the driver's error code.
  int run(uint64_t stream, const Placed& q, const Placed& k, const Placed& v, const Placed& out, uint64_t lse,
          uint64_t partials, const Scales& scales) const {
    AttendLaunch launch = launch_;
    set_tensors(launch.params, heads_first_, q, k, v, out, lse, partials, slots_);
    set_scales(launch.params, scales);
    return enqueue(stream, launch);
  }

  int64_t slots() const { return slots_; }

 private:
  int enqueue(uint64_t stream, AttendLaunch& launch) const {
    const py::gil_scoped_release released;
    const int error = gpu_launch(driver_, attend_, num_items_, stream, &launch);
    if (error || merge_blocks_ == 0) return error;
    MergeLaunch merge = {launch.params, launch.merges, launch.counts};
    return gpu_launch(driver_, merge_, merge_blocks_, stream, &merge, true);
  }

  GpuDriver driver_;
  GpuFunction attend_, merge_;
  AttendLaunch launch_ = {};
  bool heads_first_;
  unsigned num_items_, merge_blocks_;
  int64_t slots_;
};

}  // namespace attn
