// Tensors as Python hands them to native code: addresses and tuples of strides.
#pragma once
#include <pybind11/pybind11.h>

#include <cstdint>
#include <stdexcept>

namespace attn {
namespace py = pybind11;

template <class T>
inline T* at(uint64_t address) {
  return reinterpret_cast<T*>(address);
}

inline void require(bool holds, const char* message) {
  if (!holds) throw std::invalid_argument(message);
}

// Entry i of the tuple that Tensor.stride() returns.
inline int64_t stride(const py::tuple& strides, size_t i) {
  const int64_t value = PyLong_AsLongLong(PyTuple_GET_ITEM(strides.ptr(), Py_ssize_t(i)));
  if (value == -1 && PyErr_Occurred()) throw py::error_already_set();
  return value;
}

// A tensor of a run: where it is and its strides, in elements.
constexpr size_t kMostRunDims = 4;
struct Placed {
  uint64_t at = 0;
  size_t dims = 0;
  int64_t strides[kMostRunDims] = {};
};

inline Placed placed(uint64_t address, const py::tuple& strides) {
  Placed found = {address, strides.size()};
  require(found.dims <= kMostRunDims, "native: tensors need at most 4 dimensions [fa2.native]");
  for (size_t i = 0; i < found.dims; i++) found.strides[i] = stride(strides, i);
  return found;
}

struct KvStrides {
  int64_t page, token, head;
};

inline KvStrides kv_strides(const Placed& kv, bool paged, bool heads_first) {
  const int64_t* s = kv.strides;
  require(kv.dims == (paged ? 4 : 3), "native: k and v need 4 dimensions when paged, else 3 [fa2.native]");
  if (!paged) return {0, s[0], s[1]};
  return {s[0], s[heads_first ? 2 : 1], s[heads_first ? 1 : 2]};
}

}  // namespace attn
