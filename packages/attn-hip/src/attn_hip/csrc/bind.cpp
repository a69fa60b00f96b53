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

#include "bind_direct.h"
#include "bind_memory.h"
#include "bind_rows.h"
#include "bind_run.h"
#include "gpu_launch.h"
#include "kernels.h"
#include "planner.h"
#include "pool.h"

namespace attn {
namespace {

constexpr int kItemWords = sizeof(WorkItem) / sizeof(int32_t);
constexpr int kCountWords = 6;
static_assert(sizeof(MergeItem) == sizeof(WorkItem), "both have the same number of words in the image");

// How a batch is planned, apart from the batch.
PlanInput plan_input(int group, int num_kv_heads, int tile_q, int tile_kv, int min_chunk, int fine, int workers,
                     int max_heads, int window_left, bool causal, const std::array<int64_t, 7>& pace, int64_t split,
                     int64_t max_slots, int joined) {
  require(group > 0 && num_kv_heads > 0 && tile_q > 0 && tile_kv > 0 && min_chunk > 0 && fine >= 0 && workers > 0 &&
              max_heads > 0,
          "native: sizes of a plan need to be positive [fa2.native]");
  require(split >= kSplitNever && window_left >= -1, "native: split and window_left need to be -1 or more [fa2.native]");
  require(joined >= 0, "native: partials that are joined need to be 0 or more [fa2.native]");
  require(*std::min_element(pace.begin(), pace.end()) >= 0, "native: a pace needs to be positive [fa2.native]");
  return {nullptr, nullptr, 0, group, num_kv_heads, tile_q, tile_kv, min_chunk, fine, workers, joined, max_heads,
          window_left, causal, {pace[0], pace[1], pace[2], pace[3], pace[4], pace[5], pace[6]}, split, max_slots};
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
                                     made.max_heads, 0, made.num_launched};
  std::copy(said, said + kCountWords, at<int32_t>(counts));
}

py::tuple capacity(const PlanInput& in, int64_t batch, int64_t total_q, int64_t q_len, int64_t max_kv,
                   int64_t total_kv) {
  const Capacity most = capacity_of(in, {batch, total_q, q_len, max_kv, total_kv});
  return py::make_tuple(most.items, most.merges, most.slots);
}

Kernel::Arrays host_arrays(const Kernel&, const std::array<uint64_t, 9>& a, int64_t item_capacity,
                           int64_t merge_capacity, int64_t slots, int tile_q) {
  return {a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], item_capacity, merge_capacity, slots, tile_q};
}

void run_kernel(const Kernel& kernel, const Kernel::Arrays& arrays, uint64_t q, uint64_t k, uint64_t v, uint64_t out,
                uint64_t lse, uint64_t partials, const py::tuple& q_strides, const py::tuple& k_strides,
                const py::tuple& v_strides, const py::tuple& out_strides, float q_scale, float k_scale, float v_scale,
                uint64_t q_scale_ptr, uint64_t k_scale_ptr, uint64_t v_scale_ptr, int threads) {
  kernel.run(arrays, placed(q, q_strides), placed(k, k_strides), placed(v, v_strides), placed(out, out_strides), lse,
             partials, {q_scale, k_scale, v_scale, q_scale_ptr, k_scale_ptr, v_scale_ptr}, threads);
}

int run_gpu_scaled(const GpuPlan& plan, uint64_t stream, uint64_t q, uint64_t k, uint64_t v, uint64_t out, uint64_t lse,
                   uint64_t partials, const py::tuple& q_strides, const py::tuple& k_strides,
                   const py::tuple& v_strides, const py::tuple& out_strides, float q_scale, float k_scale,
                   float v_scale, uint64_t q_scale_ptr, uint64_t k_scale_ptr, uint64_t v_scale_ptr) {
  return plan.run(stream, placed(q, q_strides), placed(k, k_strides), placed(v, v_strides), placed(out, out_strides),
                  lse, partials, {q_scale, k_scale, v_scale, q_scale_ptr, k_scale_ptr, v_scale_ptr});
}

int run_gpu(const GpuPlan& plan, uint64_t stream, uint64_t q, uint64_t k, uint64_t v, uint64_t out, uint64_t lse,
            uint64_t partials, const py::tuple& q_strides, const py::tuple& k_strides, const py::tuple& v_strides,
            const py::tuple& out_strides) {
  return run_gpu_scaled(plan, stream, q, k, v, out, lse, partials, q_strides, k_strides, v_strides, out_strides, 1.f,
                        1.f, 1.f, 0, 0, 0);
}

GpuDriver gpu_driver(uint64_t launch, uint64_t get_current, uint64_t set_current, bool hip, uint64_t owner,
                     uint64_t launch_after) {
  require(launch && get_current && set_current, "native: a driver needs its functions [fa2.native]");
  return {reinterpret_cast<GpuDriver::Launch>(launch), at<void>(launch_after), at<void>(get_current),
          at<void>(set_current), hip, owner};
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
      .def("run", &run_kernel)
      .def("arrays", &host_arrays)
      .def("direct", &direct_host);
  py::class_<Kernel::Arrays>(m, "HostArrays", py::module_local());
  py::class_<AppendParams>(m, "Append", py::module_local()).def(py::init(&append_params));
  py::class_<SampleParams>(m, "Sample", py::module_local()).def(py::init(&sample_params));
  py::class_<AttendParams>(m, "Problem", py::module_local());
  py::class_<GpuDriver>(m, "GpuDriver", py::module_local())
      .def(py::init(&gpu_driver), py::arg(), py::arg(), py::arg(), py::arg(), py::arg(), py::arg("launch_after") = 0);
  py::class_<GpuFunction>(m, "GpuFunction", py::module_local()).def(py::init(&gpu_function));
  py::class_<GpuPlan::Arrays>(m, "GpuArrays", py::module_local())
      .def(py::init([](const std::array<uint64_t, 11>& a) {
        return GpuPlan::Arrays{a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10]};
      }));
  py::class_<GpuPlan>(m, "GpuPlan", py::module_local())
      .def(py::init<const GpuDriver&, GpuFunction, GpuFunction, const AttendParams&, bool, int,
                    const GpuPlan::Arrays&, unsigned, unsigned, int64_t>())
      .def("run", &run_gpu)
      .def("run_scaled", &run_gpu_scaled)
      .def("direct", &direct_gpu);
  py::class_<StorageApi>(m, "StorageApi", py::module_local())
      .def(py::init<uint64_t, uint64_t, const py::object&>())
      .def("of", &StorageApi::of);
  py::class_<Held>(m, "Held", py::module_local())
      .def(py::init<const py::object&, const StorageApi&, const py::tuple&, const py::tuple&, const py::tuple&,
                    const py::tuple&, const py::tuple&, int64_t>());
}

}  // namespace attn
