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

struct KvStrides {
  int64_t page, token, head;
};

inline KvStrides kv_strides(const py::tuple& strides, bool paged, bool heads_first) {
  require(strides.size() == (paged ? 4 : 3), "native: k and v need 4 dimensions when paged, else 3 [fa2.native]");
  if (!paged) return {0, stride(strides, 0), stride(strides, 1)};
  return {stride(strides, 0), stride(strides, heads_first ? 2 : 1), stride(strides, heads_first ? 1 : 2)};
}

}  // namespace attn
