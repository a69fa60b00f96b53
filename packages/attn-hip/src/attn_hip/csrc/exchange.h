// DLPack's C exchange API (dlpack.h 1.3), as far as runs use it: what a tensor object is, read without torch's headers
// and without a Python call. torch offers the table as Tensor.__dlpack_c_exchange_api__ from 2.10 or 2.11 on.
#pragma once
#include <Python.h>

#include <cstdint>

namespace attn {

struct ExchangeDevice {
  int32_t type, index;
};

struct ExchangeType {
  uint8_t code, bits;
  uint16_t lanes;
};

// Shape and strides are the tensor's own memory: valid while the object lives and Python's lock is held.
struct ExchangeTensor {
  void* data;
  ExchangeDevice device;
  int32_t ndim;
  ExchangeType dtype;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;
};

struct ExchangeApi {
  uint32_t major, minor;
  void* older;
  void* allocate;
  void* to_managed;
  void* from_managed;
  int (*view)(void* object, ExchangeTensor* out);  // 0, or -1 with a Python error set
  // The current stream's function follows. It is not used: whether torch answers for ROCm devices is not known here.
};
constexpr const char* kExchangeName = "dlpack_exchange_api";
constexpr uint32_t kExchangeMajor = 1;

}  // namespace attn
