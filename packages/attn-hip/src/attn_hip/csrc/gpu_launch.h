// Launches kernels of a GPU through the driver's own function: hipModuleLaunchKernel or cuLaunchKernel, which take the
// same arguments. Python finds the library and hands the addresses in; nothing here links to a GPU runtime.
#pragma once
#include <cstdint>

#include "params.h"

namespace attn {

// A device's driver. Addresses stay valid as long as the process.
struct GpuDriver {
  // int launch(function, grid x y z, block x y z, shared bytes, stream, arguments, extra); 0 is success.
  using Launch = int (*)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**,
                         void**);
  Launch launch;
  void* launch_after;  // cuLaunchKernelEx, where the driver lets a kernel start before the one ahead of it is done
  // CUDA: cuCtxGetCurrent(void**) and cuCtxSetCurrent(void*); HIP: hipGetDevice(int*) and hipSetDevice(int).
  void* get_current;
  void* set_current;
  bool hip;
  uint64_t owner;  // CUDA: the device's primary context; HIP: its ordinal
};

struct GpuFunction {
  void* handle;
  unsigned threads;
  unsigned lds;  // dynamic shared memory, bytes
};

// Runs a function on its own device, whatever device is current, and leaves the current one as it was. `argument` is
// the kernel's one argument. `follows`: the kernel waits itself for the one launched before it (await_leader), so it may
// start earlier. Launches nothing for no blocks. Returns the driver's error code, 0 for none.
int gpu_launch(const GpuDriver& driver, const GpuFunction& function, unsigned blocks, uint64_t stream, void* argument,
               bool follows = false);

}  // namespace attn
