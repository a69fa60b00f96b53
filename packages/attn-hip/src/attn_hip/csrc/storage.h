// Whether the elements of a tensor lie in its storage, which can be shrunk behind a tensor's back.
//
// DLPack tells no size of a storage. torch's C functions for compiled models do (aoti_torch/c/shim.h, a stable ABI): they
// take the address of an at::Tensor, which is one pointer, the one that Tensor._cdata tells. A Python call to
// untyped_storage() costs ten times as much.
#pragma once
#include <pybind11/pybind11.h>

#include <cstdint>

#include "bind_memory.h"
#include "exchange.h"

namespace attn {
namespace py = pybind11;

// Bytes that elements of a tensor lie in.
struct Extent {
  uint64_t begin, end;
  explicit Extent(const ExchangeTensor& t) : begin(reinterpret_cast<uint64_t>(t.data)) {
    int64_t last = 0;
    for (int32_t d = 0; d < t.ndim; d++) last += (t.shape[d] - 1) * t.strides[d];
    end = begin + uint64_t(last + 1) * t.dtype.bits / 8;
  }
  bool meets(const Extent& other) const { return begin < other.end && other.begin < end; }
};

class StorageApi {
 public:
  // size, offset: addresses of aoti_torch_get_storage_size and aoti_torch_get_storage_offset. cdata: Tensor._cdata.
  StorageApi(uint64_t size, uint64_t offset, const py::object& cdata)
      : size_(reinterpret_cast<Ask>(size)), offset_(reinterpret_cast<Ask>(offset)), cdata_(cdata) {
    require(Py_TYPE(cdata.ptr()) == &PyGetSetDescr_Type, "native: needs the descriptor of _cdata [fa2.native]");
    getter_ = reinterpret_cast<PyGetSetDescrObject*>(cdata.ptr())->d_getset;
  }

  // Bytes of a tensor's storage, and elements before the tensor's first.
  py::tuple of(const py::object& tensor) const {
    int64_t size = 0, offset = 0;
    auto* type = reinterpret_cast<PyTypeObject*>(py::object(cdata_.attr("__objclass__")).ptr());
    if (!PyObject_TypeCheck(tensor.ptr(), type) || !ask(tensor.ptr(), &size, &offset)) {
      throw py::type_error("native: needs a torch tensor [fa2.native]");
    }
    return py::make_tuple(size, offset);
  }

  // Whether a torch.Tensor that has elements lies in its storage.
  bool holds(PyObject* tensor, const ExchangeTensor& t) const {
    int64_t size = 0, offset = 0;
    if (!ask(tensor, &size, &offset)) return false;
    const Extent extent(t);
    return offset * t.dtype.bits / 8 + int64_t(extent.end - extent.begin) <= size;
  }

 private:
  using Ask = int32_t (*)(void* tensor, int64_t* found);

  bool ask(PyObject* object, int64_t* size, int64_t* offset) const {
    PyObject* at = getter_->get(object, getter_->closure);
    void* tensor = at ? PyLong_AsVoidPtr(at) : nullptr;
    Py_XDECREF(at);
    if (!tensor) {
      PyErr_Clear();
      return false;
    }
    return !size_(&tensor, size) && !offset_(&tensor, offset);
  }

  Ask size_, offset_;
  py::object cdata_;
  const PyGetSetDef* getter_;
};

}  // namespace attn
