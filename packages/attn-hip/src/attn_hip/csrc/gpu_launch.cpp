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

// CUlaunchConfig and CUlaunchAttribute of the driver API.
struct LaunchAttribute {
  uint32_t id, pad;
  int32_t value[16];
};
struct LaunchConfig {
  unsigned grid[3], block[3], shared_bytes;
  void* stream;
  LaunchAttribute* attributes;
  unsigned num_attributes;
};
static_assert(sizeof(LaunchAttribute) == 72 && sizeof(LaunchConfig) == 56, "as the driver lays them out");
constexpr uint32_t kProgrammaticStreamSerialization = 6;

int launch_follower(const GpuDriver& driver, const GpuFunction& function, unsigned blocks, uint64_t stream,
                    void** arguments) {
  using LaunchEx = int (*)(const LaunchConfig*, void*, void**, void**);
  LaunchAttribute early = {kProgrammaticStreamSerialization, 0, {1}};
  const LaunchConfig config = {
      {blocks, 1, 1}, {function.threads, 1, 1}, function.lds, reinterpret_cast<void*>(stream), &early, 1};
  return reinterpret_cast<LaunchEx>(driver.launch_after)(&config, function.handle, arguments, nullptr);
}

}  // namespace

int gpu_launch(const GpuDriver& driver, const GpuFunction& function, unsigned blocks, uint64_t stream, void* argument,
               bool follows) {
  if (blocks == 0) return 0;
  const Current current(driver);
  if (current.error()) return current.error();
  void* arguments[] = {argument};
  if (follows && driver.launch_after) return launch_follower(driver, function, blocks, stream, arguments);
  return driver.launch(function.handle, blocks, 1, 1, function.threads, 1, 1, function.lds,
                       reinterpret_cast<void*>(stream), arguments, nullptr);
}

}  // namespace attn
