// Names that differ between compilers. Nothing here knows what attention is.
#pragma once

#if defined(__AMDGCN__)
#define ATTN_AMD 1
#elif defined(__CUDACC__)
#define ATTN_NVIDIA 1
#else
#define ATTN_CPU 1
#include <cmath>
#include <cstring>
#endif

#include "params.h"

#if ATTN_AMD
// HIP mode without HIP headers: four attributes and the compiler's builtins are all that is needed.
#define ATTN_GLOBAL __attribute__((global))
#define ATTN_DEVICE static __attribute__((device)) __attribute__((always_inline)) inline
#define ATTN_MEMBER __attribute__((device)) __attribute__((always_inline)) inline
#define ATTN_SHARED __attribute__((shared))
// Threads of a block, and waves that a SIMD should hold (AMD) or blocks that a multiprocessor should (NVIDIA).
#define ATTN_BLOCK(threads, waves, blocks) \
  __attribute__((amdgpu_flat_work_group_size(threads, threads), amdgpu_waves_per_eu(waves)))
#define ATTN_ARGUMENT const
#define ATTN_BLOCK_MEMORY(name, bytes) __attribute__((shared, aligned(16))) char name[bytes]
#define ATTN_UNROLL _Pragma("unroll")
#elif ATTN_NVIDIA
#define ATTN_GLOBAL __global__
#define ATTN_DEVICE static __device__ __forceinline__
#define ATTN_MEMBER __device__ __forceinline__
#define ATTN_SHARED __shared__ __align__(16)
#define ATTN_BLOCK(threads, waves, blocks) __launch_bounds__(threads, blocks)
#define ATTN_ARGUMENT const __grid_constant__
#define ATTN_BLOCK_MEMORY(name, bytes) extern __shared__ __align__(16) char name[]
#define ATTN_UNROLL _Pragma("unroll")
#else
#define ATTN_DEVICE static inline __attribute__((always_inline))
#define ATTN_MEMBER inline __attribute__((always_inline))
#if defined(__clang__)
#define ATTN_UNROLL _Pragma("clang loop unroll(full)")
#else
#define ATTN_UNROLL _Pragma("GCC unroll 64")
#endif
#endif

// Behind the parameters of a lambda.
#if ATTN_NVIDIA
#define ATTN_INLINE
#else
#define ATTN_INLINE __attribute__((always_inline))
#endif

#define ATTN_ROLL _Pragma("unroll 1")
#define ATTN_PRAGMA(text) _Pragma(#text)
#define ATTN_UNROLL_BY(n) ATTN_PRAGMA(unroll n)

// A pointer that is known to lead to device memory: AMD reads shared and device memory by different instructions.
#if ATTN_AMD
namespace attn {
template <class T>
ATTN_DEVICE __attribute__((address_space(1))) T* global(T* p) {
  return (__attribute__((address_space(1))) T*)p;
}
}  // namespace attn
#else
namespace attn {
template <class T>
ATTN_DEVICE T* global(T* p) {
  return p;
}
}  // namespace attn
#endif

// For loops over what a lane owns: registers on a GPU, memory on a CPU.
#if ATTN_CPU
#define ATTN_UNROLL_LANE
#else
#define ATTN_UNROLL_LANE ATTN_UNROLL
#endif

namespace attn {

constexpr float kInfinity = __builtin_huge_valf();
constexpr float kGreatest = 3.40282347e38f;  // of finite floats
constexpr float kLog2e = 1.44269504088896340736f;

template <class To, class From>
ATTN_DEVICE To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From), "bits_as keeps the size");
  To to;
  __builtin_memcpy(&to, &from, sizeof(to));
  return to;
}

ATTN_DEVICE int least(int a, int b) { return a < b ? a : b; }
ATTN_DEVICE int most(int a, int b) { return a > b ? a : b; }
constexpr int most_of(int a, int b) { return a > b ? a : b; }

}  // namespace attn
