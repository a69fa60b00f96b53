// Runs that go from Python's arguments to the launch in one native call.
//
// A call that is right in every respect is enqueued; of any other nothing is done and False is returned, so that the
// checks in Python, which can say what is wrong, see it. Nothing here may be more lenient than those.
#pragma once
#include <algorithm>
#include <cmath>
#include <memory>
#include <vector>

#include "bind_run.h"
#include "exchange.h"
#include "storage.h"

namespace attn {

// What the tensors of every run of a plan must be.
class Held {
 public:
  // stream: (function, device) for the current stream's handle, or () on a CPU. tensors: (torch.Tensor, its is_neg, q, k,
  // out) of a run that was right; shapes of q and out; of k and v, after the first dimension, whose size is at least
  // least_rows.
  Held(const py::object& api, const StorageApi& storage, const py::tuple& stream, const py::tuple& tensors,
       const py::tuple& q_and_out, const py::tuple& k_tail, const py::tuple& v_tail, int64_t least_rows)
      : api_(static_cast<const ExchangeApi*>(PyCapsule_GetPointer(api.ptr(), kExchangeName))), storage_(storage),
        tensor_(tensors[0]), is_neg_(tensors[1]), q_shape_(sizes(q_and_out[0])), out_shape_(sizes(q_and_out[1])),
        k_tail_(sizes(k_tail)), v_tail_(sizes(v_tail)), least_rows_(least_rows) {
    if (!api_) throw py::error_already_set();
    require(api_->major == kExchangeMajor && api_->view,
            "native: the exchange API of tensors needs major version 1 [fa2.native]");
    ExchangeTensor q, k, out;
    if (api_->view(tensors[2].ptr(), &q) || api_->view(tensors[3].ptr(), &k) || api_->view(tensors[4].ptr(), &out)) {
      throw py::error_already_set();
    }
    if (stream.size()) stream_ = stream[0], stream_device_ = stream[1];
    q_dtype_ = q.dtype, kv_dtype_ = k.dtype, out_dtype_ = out.dtype, device_ = q.device;
  }

  size_t kv_dims() const { return k_tail_.size() + 1; }

  // Reads a tensor that has memory for all its elements and is read as it is stored. No subclass is: it may mean
  // anything.
  bool read(PyObject* object, ExchangeTensor* found) const {
    if (Py_TYPE(object) != reinterpret_cast<PyTypeObject*>(tensor_.ptr())) return false;
    if (api_->view(object, found)) return forget();
    if (!found->data || found->device.type != device_.type || found->device.index != device_.index) return false;
    found->data = static_cast<char*>(found->data) + found->byte_offset;
    if (!storage_.holds(object, *found)) return false;
    PyObject* negated = PyObject_CallOneArg(is_neg_.ptr(), object);
    if (!negated) return forget();
    Py_DECREF(negated);  // True and False outlive this
    return negated == Py_False;
  }

  bool query(const ExchangeTensor& q) const {
    return same(q.dtype, q_dtype_) && is_shape(q, 0, q_shape_) && q.strides[2] == 1;
  }
  bool output(const ExchangeTensor& out) const {
    return same(out.dtype, out_dtype_) && is_shape(out, 0, out_shape_) && packed(out);
  }
  bool lse(const ExchangeTensor& lse) const {
    constexpr ExchangeType kFloat = {2, 32, 1};
    return same(lse.dtype, kFloat) && lse.ndim == 2 && lse.shape[0] == out_shape_[0] &&
           lse.shape[1] == out_shape_[1] && packed(lse);
  }
  bool keys(const ExchangeTensor& k) const { return cache(k, 1, k_tail_); }
  bool values(const ExchangeTensor& v) const { return cache(v, 1, v_tail_); }
  // Keys and values in one tensor [pages, 2, ...].
  bool both(const ExchangeTensor& kv) const {
    return k_tail_ == v_tail_ && kv.ndim > 1 && kv.shape[1] == 2 && cache(kv, 2, k_tail_);
  }

  bool stream(uint64_t* found) const {
    *found = 0;
    if (!stream_) return true;
    PyObject* handle = PyObject_CallOneArg(stream_.ptr(), stream_device_.ptr());
    if (!handle) return forget();
    *found = PyLong_AsUnsignedLongLong(handle);
    Py_DECREF(handle);
    return !PyErr_Occurred() || forget();
  }

 private:
  static bool forget() {
    PyErr_Clear();
    return false;
  }
  static std::vector<int64_t> sizes(const py::handle& shape) { return shape.cast<std::vector<int64_t>>(); }
  static bool same(const ExchangeType& a, const ExchangeType& b) {
    return a.code == b.code && a.bits == b.bits && a.lanes == b.lanes;
  }
  static bool is_shape(const ExchangeTensor& t, int32_t first, const std::vector<int64_t>& shape) {
    return t.ndim == first + int32_t(shape.size()) && std::equal(shape.begin(), shape.end(), t.shape + first);
  }
  static bool packed(const ExchangeTensor& t) {
    int64_t wanted = 1;
    for (int32_t d = t.ndim - 1; d >= 0; wanted *= t.shape[d--]) {
      if (t.strides[d] != wanted) return false;
    }
    return true;
  }
  bool cache(const ExchangeTensor& t, int32_t first, const std::vector<int64_t>& tail) const {
    return same(t.dtype, kv_dtype_) && is_shape(t, first, tail) && t.shape[0] >= least_rows_ &&
           t.strides[t.ndim - 1] == 1;
  }

  const ExchangeApi* api_;
  StorageApi storage_;
  py::object tensor_, is_neg_, stream_, stream_device_;
  std::vector<int64_t> q_shape_, out_shape_, k_tail_, v_tail_;
  int64_t least_rows_;
  ExchangeType q_dtype_, kv_dtype_, out_dtype_;
  ExchangeDevice device_;
};

// The tensors of a call that was found right.
struct DirectTensors {
  Placed q, k, v, out;
  uint64_t lse = 0, partials = 0;
  Scales scales;
};

// What a run writes; lse is out where there is none.
struct Written {
  Extent out, lse;
  bool meets(const ExchangeTensor& other) const {
    const Extent read(other);
    return out.meets(read) || lse.meets(read);
  }
};

// Reads the arguments of a call; false where it is not one to be enqueued here.
class DirectCall {
 public:
  static constexpr Py_ssize_t kArguments = 8;

  // q, cache, out, lse, workspace, q_scale, k_scale, v_scale
  static bool read(const Held& held, PyObject* const* a, DirectTensors* t) {
    ExchangeTensor q, out, lse, work;
    if (!held.read(a[0], &q) || !held.query(q)) return false;
    if (!held.read(a[2], &out) || !held.output(out)) return false;
    Written written = {Extent(out), Extent(out)};
    if (a[3] != Py_None) {
      if (!held.read(a[3], &lse) || !held.lse(lse) || written.meets(lse)) return false;
      written.lse = Extent(lse);
      t->lse = reinterpret_cast<uint64_t>(lse.data);
    }
    if (written.meets(q) || !read_cache(held, a[1], written, t)) return false;
    t->q = of(q, 0), t->out = of(out, 0);
    if (a[4] != Py_None) {
      if (!held.read(a[4], &work)) return false;
      t->partials = reinterpret_cast<uint64_t>(work.data);
    }
    return factor(a[5], &t->scales.q) && factor(a[6], &t->scales.k) && factor(a[7], &t->scales.v);
  }

 private:
  static bool read_cache(const Held& held, PyObject* cache, const Written& written, DirectTensors* t) {
    ExchangeTensor k, v;
    if (PyTuple_CheckExact(cache)) {
      if (PyTuple_GET_SIZE(cache) != 2) return false;
      if (!held.read(PyTuple_GET_ITEM(cache, 0), &k) || !held.keys(k) || written.meets(k)) return false;
      if (!held.read(PyTuple_GET_ITEM(cache, 1), &v) || !held.values(v) || written.meets(v)) return false;
      t->k = of(k, 0), t->v = of(v, 0);
      return true;
    }
    if (held.kv_dims() != 4 || !held.read(cache, &k) || !held.both(k) || written.meets(k)) return false;
    t->k = of(k, 1), t->v = t->k;
    t->v.at += uint64_t(k.strides[1]) * k.dtype.bits / 8;
    return true;
  }

  // A tensor without its dimension `skipped`, if that is not 0.
  static Placed of(const ExchangeTensor& t, int32_t skipped) {
    Placed found = {reinterpret_cast<uint64_t>(t.data)};
    for (int32_t d = 0; d < t.ndim; d++) {
      if (skipped == 0 || d != skipped) found.strides[found.dims++] = t.strides[d];
    }
    return found;
  }

  static bool factor(PyObject* scale, float* found) {
    if (scale == Py_None) return true;
    if (!PyFloat_CheckExact(scale)) return false;
    *found = float(PyFloat_AS_DOUBLE(scale));
    return std::isfinite(*found);
  }
};

// A function of Python's that enqueues one run of a plan. What it needs it keeps alive.
class Direct {
 public:
  Direct(const Held& held, py::object keep) : held_(held), keep_(std::move(keep)) {}
  virtual ~Direct() = default;

  static py::object function(std::unique_ptr<Direct> direct) {
    static PyMethodDef definition = {"direct", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&call)),
                                     METH_FASTCALL, nullptr};
    PyObject* self = PyCapsule_New(direct.get(), nullptr, [](PyObject* capsule) {
      delete static_cast<Direct*>(PyCapsule_GetPointer(capsule, nullptr));
    });
    if (!self) throw py::error_already_set();
    direct.release();
    const py::object owned = py::reinterpret_steal<py::object>(self);
    return py::reinterpret_steal<py::object>(PyCFunction_New(&definition, self));
  }

 protected:
  // Returns whether it was enqueued.
  virtual bool run(const DirectTensors& tensors) const = 0;
  const Held& held() const { return held_; }

 private:
  static PyObject* call(PyObject* self, PyObject* const* arguments, Py_ssize_t given) {
    if (given != DirectCall::kArguments) {
      return PyErr_Format(PyExc_TypeError, "direct: needs 8 arguments, got %zd [fa2.native]", given);
    }
    const auto* direct = static_cast<const Direct*>(PyCapsule_GetPointer(self, nullptr));
    DirectTensors tensors;
    try {
      return PyBool_FromLong(DirectCall::read(direct->held_, arguments, &tensors) && direct->run(tensors));
    } catch (const std::exception& error) {
      PyErr_SetString(PyExc_RuntimeError, error.what());
      return nullptr;
    }
  }

  Held held_;
  py::object keep_;
};

// An error of the driver's is left to the run in Python, which meets it again and reports it.
class DirectGpu : public Direct {
 public:
  DirectGpu(const Held& held, py::object keep, const GpuPlan& plan) : Direct(held, std::move(keep)), plan_(plan) {}

 protected:
  bool run(const DirectTensors& t) const override {
    uint64_t stream = 0;
    if ((plan_.slots() > 0 && !t.partials) || !held().stream(&stream)) return false;
    return plan_.run(stream, t.q, t.k, t.v, t.out, t.lse, t.partials, t.scales) == 0;
  }

 private:
  GpuPlan plan_;
};

class DirectHost : public Direct {
 public:
  DirectHost(const Held& held, py::object keep, const Kernel& kernel, const Kernel::Arrays& arrays, py::object threads)
      : Direct(held, std::move(keep)), kernel_(kernel), arrays_(arrays), threads_(std::move(threads)) {}

 protected:
  bool run(const DirectTensors& t) const override {
    kernel_.run(arrays_, t.q, t.k, t.v, t.out, t.lse, t.partials, t.scales, threads_().cast<int>());
    return true;
  }

 private:
  const Kernel& kernel_;  // kept alive by `keep`
  Kernel::Arrays arrays_;
  py::object threads_;
};

// keep: what owns the plan's memory.
inline py::object direct_gpu(const GpuPlan& plan, const Held& held, py::object keep) {
  return Direct::function(std::make_unique<DirectGpu>(held, std::move(keep), plan));
}

// threads: tells how many of them a run may use.
inline py::object direct_host(const py::object& kernel, const Held& held, const Kernel::Arrays& arrays,
                              py::object threads, py::object keep) {
  return Direct::function(std::make_unique<DirectHost>(held, py::make_tuple(kernel, std::move(keep)),
                                                       kernel.cast<const Kernel&>(), arrays, std::move(threads)));
}

}  // namespace attn
