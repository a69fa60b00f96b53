#include "gpu_launch.h"

namespace attn {
namespace {

// Makes the driver's device current for a scope. CUDA has no current context on a thread that never used the device.
class Current {
 public:
  explicit Current(const GpuDriver& driver) : driver_(driver) {
    error_ = get(&was_);
    if (error_ || was_ == driver_.owner) return;
    error_ = set(driver_.owner);
    changed_ = error_ == 0;
  }
  ~Current() {
    if (changed_) set(was_);
  }
  Current(const Current&) = delete;
  Current& operator=(const Current&) = delete;
  int error() const { return error_; }

 private:
  int get(uint64_t* owner) const {
    if (driver_.hip) {
      int ordinal = 0;
      const int error = reinterpret_cast<int (*)(int*)>(driver_.get_current)(&ordinal);
      *owner = uint64_t(ordinal);
      return error;
    }
    void* context = nullptr;
    const int error = reinterpret_cast<int (*)(void**)>(driver_.get_current)(&context);
    *owner = reinterpret_cast<uint64_t>(context);
    return error;
  }
  int set(uint64_t owner) const {
    if (driver_.hip) return reinterpret_cast<int (*)(int)>(driver_.set_current)(int(owner));
    return reinterpret_cast<int (*)(void*)>(driver_.set_current)(reinterpret_cast<void*>(owner));
  }

  const GpuDriver& driver_;
  uint64_t was_ = 0;
  int error_ = 0;
  bool changed_ = false;
};

}  // namespace

int gpu_launch(const GpuDriver& driver, const GpuFunction& function, unsigned blocks, uint64_t stream,
               void* argument) {
  if (blocks == 0) return 0;
  const Current current(driver);
  if (current.error()) return current.error();
  void* arguments[] = {argument};
  return driver.launch(function.handle, blocks, 1, 1, function.threads, 1, 1, function.lds,
                       reinterpret_cast<void*>(stream), arguments, nullptr);
}

}  // namespace attn
