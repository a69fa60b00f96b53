// Threads that run the items of one call: those of the OpenMP runtime that torch has loaded, where there is one
// (GNU's interface), else threads that are started once and sleep between calls.
//
// One call at a time uses them. A call made meanwhile by another thread, or from inside an item, runs its items on
// the thread that makes it, so nothing waits for itself. After fork() the child starts threads of its own.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>

namespace attn {

// What a call runs: items [0, first) in order, each by whichever thread is free, then items [0, second).
struct Region {
  int64_t first, second;
  size_t scratch_bytes;  // per thread
  std::function<void(int64_t item, void* scratch)> run_first, run_second;
};

// Runs a region on at most `threads` threads, the caller's among them; returns when it is done. Items must not
// throw. Throws std::bad_alloc before anything has run when scratch is short, and never for want of a thread.
void run_region(const Region& region, int threads);

// Threads of this process's own pool; OpenMP's and the callers' are not counted.
int pool_size();

}  // namespace attn
