// The Python module of one instruction set. It knows no torch: tensors arrive as addresses and stride tuples.
//
// Python has checked types, shapes and devices against the plan; what is checked here is what would otherwise let a
// kernel leave its arrays.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <memory>
#include <string>
#include <vector>

#include "bind_memory.h"
#include "bind_rows.h"
#include "gpu_launch.h"
#include "kernels.h"
#include "planner.h"
#include "pool.h"

namespace attn {
namespace {

constexpr int kItemWords = sizeof(WorkItem) / sizeof(int32_t);
constexpr int kCountWords = 5;
static_assert(sizeof(MergeItem) == sizeof(WorkItem), "both have the same number of words in the image");

// How a batch is planned, apart from the batch.
PlanInput plan_input(int group, int num_kv_heads, int tile_q, int tile_kv, int min_chunk, int fine, int workers, int max_heads,
                     int window_left, bool causal, const std::array<int64_t, 6>& pace, int64_t split, int64_t max_slots,
                     int joined) {
  require(group > 0 && num_kv_heads > 0 && tile_q > 0 && tile_kv > 0 && min_chunk > 0 && fine >= 0 && workers > 0 &&
              max_heads > 0,
          "native: sizes of a plan need to be positive [fa2.native]");
  require(split >= kSplitNever && window_left >= -1, "native: split and window_left need to be -1 or more [fa2.native]");
  require(joined >= 0, "native: partials that are joined need to be 0 or more [fa2.native]");
  require(*std::min_element(pace.begin(), pace.end()) >= 0, "native: a pace needs to be positive [fa2.native]");
  return {nullptr, nullptr, 0, group, num_kv_heads, tile_q, tile_kv, min_chunk, fine, workers, joined, max_heads, window_left,
          causal, {pace[0], pace[1], pace[2], pace[3], pace[4], pace[5]}, split, max_slots};
}

// A plan whose memory comes from a plan that is gone, if there is one. Made and destroyed under Python's lock.
class Planned {
 public:
  Planned() {
    if (spare().empty()) return;
    plan_ = std::move(spare().back());
    spare().pop_back();
  }
  ~Planned() {
    if (spare().size() < kMostSpare) spare().push_back(std::move(plan_));
  }
  Planned(const Planned&) = delete;
  Planned& operator=(const Planned&) = delete;
  Plan& operator*() { return plan_; }
  const Plan& operator*() const { return plan_; }

 private:
  static constexpr size_t kMostSpare = 2;
  static std::vector<Plan>& spare() {
    static auto* kept = new std::vector<Plan>();  // outlives objects that die with the interpreter
    return *kept;
  }
  Plan plan_;
};

std::unique_ptr<Planned> plan_batch(PlanInput in, uint64_t qo_indptr, uint64_t kv_len, int batch) {
  in.qo_indptr = at<const int32_t>(qo_indptr);
  in.kv_len = at<const int32_t>(kv_len);
  in.batch = batch;
  auto made = std::make_unique<Planned>();
  const py::gil_scoped_release released;
  make_plan(in, **made);
  return made;
}

// Writes items, merges and counts into an image that has room for them.
void write_plan(const Planned& planned, uint64_t items, uint64_t merges, uint64_t counts) {
  const Plan& made = *planned;
  std::copy(made.items.begin(), made.items.end(), at<WorkItem>(items));
  std::copy(made.merges.begin(), made.merges.end(), at<MergeItem>(merges));
  const int32_t said[kCountWords] = {int32_t(made.items.size()), int32_t(made.merges.size()), made.num_slots,
                                     made.max_heads};
  std::copy(said, said + kCountWords, at<int32_t>(counts));
}

py::tuple capacity(const PlanInput& in, int64_t batch, int64_t total_q, int64_t q_len, int64_t max_kv,
                   int64_t total_kv) {
  const Capacity most = capacity_of(in, {batch, total_q, q_len, max_kv, total_kv});
  return py::make_tuple(most.items, most.merges, most.slots);
}

// The facts of a problem as far as they do not depend on memory.
AttendParams problem_params(int q_dtype, int kv_dtype, int o_dtype, int num_qo_heads, int num_kv_heads,
                            int head_dim_qk, int head_dim_vo, int page_size, int mask, int position, int window_left,
                            float sm_scale, float soft_cap) {
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
void set_tensors(AttendParams& p, bool heads_first, uint64_t q, uint64_t k, uint64_t v, uint64_t out, uint64_t lse,
                 const py::tuple& q_strides, const py::tuple& k_strides, const py::tuple& v_strides,
                 const py::tuple& out_strides, uint64_t partials, int64_t slots) {
  p.q = at<void>(q), p.k = at<void>(k), p.v = at<void>(v), p.out = at<void>(out), p.lse = at<float>(lse);
  p.q_stride_row = stride(q_strides, 0), p.q_stride_head = stride(q_strides, 1);
  p.out_stride_row = stride(out_strides, 0), p.out_stride_head = stride(out_strides, 1);
  const KvStrides ks = kv_strides(k_strides, p.page_size, heads_first);
  const KvStrides vs = kv_strides(v_strides, p.page_size, heads_first);
  p.k_stride_page = ks.page, p.k_stride_token = ks.token, p.k_stride_head = ks.head;
  p.v_stride_page = vs.page, p.v_stride_token = vs.token, p.v_stride_head = vs.head;
  p.partial_out = at<float>(partials), p.partial_lse = p.partial_out + slots * p.tile_q * p.head_dim_vo;
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

  void run(uint64_t q, uint64_t k, uint64_t v, uint64_t out, uint64_t lse, const py::tuple& q_strides,
           const py::tuple& k_strides, const py::tuple& v_strides, const py::tuple& out_strides, uint64_t qo_indptr,
           uint64_t kv_indptr, uint64_t kv_indices, uint64_t kv_len, uint64_t custom_mask, uint64_t mask_indptr,
           uint64_t items, uint64_t merges, uint64_t counts, int64_t item_capacity, int64_t merge_capacity,
           uint64_t partials, int64_t slots, int tile_q, float q_scale, float k_scale, float v_scale,
           uint64_t q_scale_ptr, uint64_t k_scale_ptr, uint64_t v_scale_ptr, int threads) const {
    AttendParams p = p_;
    p.tile_q = tile_q;
    set_tensors(p, heads_first_, q, k, v, out, lse, q_strides, k_strides, v_strides, out_strides, partials, slots);
    p.qo_indptr = at<int32_t>(qo_indptr), p.kv_indptr = at<int32_t>(kv_indptr), p.kv_len = at<int32_t>(kv_len);
    p.kv_indices = at<int32_t>(kv_indices);
    p.custom_mask = at<uint8_t>(custom_mask), p.mask_indptr = at<int32_t>(mask_indptr);
    p.q_scale = q_scale, p.k_scale = k_scale, p.v_scale = v_scale;
    p.q_scale_ptr = at<float>(q_scale_ptr), p.k_scale_ptr = at<float>(k_scale_ptr);
    p.v_scale_ptr = at<float>(v_scale_ptr);
    const int32_t* said = at<const int32_t>(counts);
    require(said[0] >= 0 && said[0] <= item_capacity && said[1] >= 0 && said[1] <= merge_capacity && said[2] <= slots &&
                said[3] >= 0 && said[3] <= p.num_kv_heads && (said[2] == 0 || partials),
            "native: counts of the plan image need to fit its arrays [fa2.native]");
    launch(p, at<const WorkItem>(items), said[0], at<const MergeItem>(merges), said[1], said[3], threads);
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
          bool heads_first, int tile_q, const Arrays& arrays, unsigned num_items, unsigned num_merges, int64_t slots)
      : driver_(driver), attend_(attend), merge_(merge), heads_first_(heads_first), num_items_(num_items),
        num_merges_(num_merges), slots_(slots) {
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
  int run(uint64_t stream, uint64_t q, uint64_t k, uint64_t v, uint64_t out, uint64_t lse, uint64_t partials,
          const py::tuple& q_strides, const py::tuple& k_strides, const py::tuple& v_strides,
          const py::tuple& out_strides) const {
    AttendLaunch launch = launch_;
    set_tensors(launch.params, heads_first_, q, k, v, out, lse, q_strides, k_strides, v_strides, out_strides, partials,
                slots_);
    return enqueue(stream, launch);
  }

  int run_scaled(uint64_t stream, uint64_t q, uint64_t k, uint64_t v, uint64_t out, uint64_t lse, uint64_t partials,
                 const py::tuple& q_strides, const py::tuple& k_strides, const py::tuple& v_strides,
                 const py::tuple& out_strides, float q_scale, float k_scale, float v_scale, uint64_t q_scale_ptr,
                 uint64_t k_scale_ptr, uint64_t v_scale_ptr) const {
    AttendLaunch launch = launch_;
    AttendParams& p = launch.params;
    set_tensors(p, heads_first_, q, k, v, out, lse, q_strides, k_strides, v_strides, out_strides, partials, slots_);
    p.q_scale = q_scale, p.k_scale = k_scale, p.v_scale = v_scale;
    p.q_scale_ptr = at<float>(q_scale_ptr), p.k_scale_ptr = at<float>(k_scale_ptr);
    p.v_scale_ptr = at<float>(v_scale_ptr);
    return enqueue(stream, launch);
  }

 private:
  int enqueue(uint64_t stream, AttendLaunch& launch) const {
    const py::gil_scoped_release released;
    const int error = gpu_launch(driver_, attend_, num_items_, stream, &launch);
    if (error || num_merges_ == 0) return error;
    MergeLaunch merge = {launch.params, launch.merges, launch.counts};
    return gpu_launch(driver_, merge_, num_merges_ * (launch.params.tile_q / kMergeRows), stream, &merge);
  }

  GpuDriver driver_;
  GpuFunction attend_, merge_;
  AttendLaunch launch_ = {};
  bool heads_first_;
  unsigned num_items_, num_merges_;
  int64_t slots_;
};

GpuDriver gpu_driver(uint64_t launch, uint64_t get_current, uint64_t set_current, bool hip, uint64_t owner) {
  require(launch && get_current && set_current, "native: a driver needs its functions [fa2.native]");
  return {reinterpret_cast<GpuDriver::Launch>(launch), at<void>(get_current), at<void>(set_current), hip, owner};
}

GpuFunction gpu_function(uint64_t handle, unsigned threads, unsigned lds) {
  require(handle && threads, "native: a function needs a handle and threads [fa2.native]");
  return {at<void>(handle), threads, lds};
}

}  // namespace

PYBIND11_MODULE(ATTN_MODULE, m) {
  m.doc() = "Planner and kernels of attn-hip for one instruction set of the host CPU";
  m.attr("ITEM_WORDS") = kItemWords;
  m.attr("COUNT_WORDS") = kCountWords;
  m.def("isa", &isa_name);
  m.def("kv_tile", &kv_tile);
  m.def("tile_q_for", &tile_q_for);
  m.def("cta_tile_q", &cta_tile_q);
  m.def("pool_size", &pool_size);
  m.def("append", &append);
  m.def("gpu_append", &gpu_append);
  m.def("sample", &sample);
  m.def("gpu_sample", &gpu_sample);
  m.def("problem", &problem_params);
  m.def("rope_turns", [](int head_dim, double theta, double scale, uint64_t out) {
    rope_turns(head_dim, theta, scale, at<double>(out));
  });
  m.def("alibi_slopes", [](int num_heads, uint64_t out) { alibi_slopes(num_heads, at<float>(out)); });

  py::class_<PlanInput>(m, "PlanInput", py::module_local())
      .def(py::init(&plan_input))
      .def("plan", &plan_batch)
      .def("capacity", &capacity);
  py::class_<Planned>(m, "Plan", py::module_local())
      .def_property_readonly("num_items", [](const Planned& plan) { return (*plan).items.size(); })
      .def_property_readonly("num_merges", [](const Planned& plan) { return (*plan).merges.size(); })
      .def_property_readonly("num_launched", [](const Planned& plan) { return (*plan).num_launched; })
      .def_property_readonly("num_slots", [](const Planned& plan) { return (*plan).num_slots; })
      .def_property_readonly("max_heads", [](const Planned& plan) { return (*plan).max_heads; })
      .def_property_readonly("chunk", [](const Planned& plan) { return (*plan).chunk; })
      .def("write", &write_plan);
  py::class_<Kernel>(m, "Kernel", py::module_local())
      .def(py::init<int, int, int, int, int, int, int, int, bool, int, int, int, float, float, double, double>())
      .def("run", &Kernel::run);
  py::class_<AppendParams>(m, "Append", py::module_local()).def(py::init(&append_params));
  py::class_<SampleParams>(m, "Sample", py::module_local()).def(py::init(&sample_params));
  py::class_<AttendParams>(m, "Problem", py::module_local());
  py::class_<GpuDriver>(m, "GpuDriver", py::module_local()).def(py::init(&gpu_driver));
  py::class_<GpuFunction>(m, "GpuFunction", py::module_local()).def(py::init(&gpu_function));
  py::class_<GpuPlan::Arrays>(m, "GpuArrays", py::module_local())
      .def(py::init([](const std::array<uint64_t, 11>& a) {
        return GpuPlan::Arrays{a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10]};
      }));
  py::class_<GpuPlan>(m, "GpuPlan", py::module_local())
      .def(py::init<const GpuDriver&, GpuFunction, GpuFunction, const AttendParams&, bool, int,
                    const GpuPlan::Arrays&, unsigned, unsigned, int64_t>())
      .def("run", &GpuPlan::run)
      .def("run_scaled", &GpuPlan::run_scaled);
}

}  // namespace attn
