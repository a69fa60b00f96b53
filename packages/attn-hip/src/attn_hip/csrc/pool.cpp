#include "pool.h"

#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdio>
#include <cstring>
#include <memory>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

namespace attn {
namespace {

constexpr int kMostThreads = 1024;
constexpr int kSpins = 2000;  // a few microseconds: the tail of a balanced phase
constexpr size_t kLine = 64;

void pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#endif
}

// Memory of one thread, aligned to a cache line, that only grows.
class Scratch {
 public:
  void reserve(size_t bytes) {
    if (bytes <= size_) return;
    at_.reset();
    size_ = 0;
    at_.reset(static_cast<char*>(::operator new(bytes, std::align_val_t{kLine})));
    size_ = bytes;
  }
  void* get() const { return at_.get(); }

 private:
  struct Delete {
    void operator()(char* at) const { ::operator delete(at, std::align_val_t{kLine}); }
  };
  std::unique_ptr<char, Delete> at_;
  size_t size_ = 0;
};

// Hands out items by a counter and counts those that are finished.
class Phase {
 public:
  void open(int64_t items) {
    items_ = items;
    next_.store(0, std::memory_order_relaxed);
    left_.store(items, std::memory_order_relaxed);
  }

  template <class Run>
  void work(const Run& run, void* scratch) {
    int64_t done = 0;
    for (int64_t i; (i = next_.fetch_add(1, std::memory_order_relaxed)) < items_; done++) run(i, scratch);
    if (done) left_.fetch_sub(done, std::memory_order_acq_rel);
  }

  void wait() const {
    for (int spins = 0; left_.load(std::memory_order_acquire) > 0; spins++) {
      if (spins < kSpins) pause();
      else std::this_thread::yield();
    }
  }

 private:
  int64_t items_ = 0;
  alignas(kLine) std::atomic<int64_t> next_{0};
  alignas(kLine) std::atomic<int64_t> left_{0};
};

void run_alone(const Region& region, void* scratch) {
  for (int64_t i = 0; i < region.first; i++) region.run_first(i, scratch);
  for (int64_t i = 0; i < region.second; i++) region.run_second(i, scratch);
}

class Pool {
 public:
  const pid_t owner = getpid();

  // Returns false when another thread is using the pool.
  bool run(const Region& region, int threads, void* scratch) {
    std::unique_lock<std::mutex> mine(busy_, std::try_to_lock);
    if (!mine) return false;
    grow(threads - 1);
    const int helpers = std::min(threads - 1, size());
    for (int i = 0; i < helpers; i++) workers_[size_t(i)]->scratch.reserve(region.scratch_bytes);
    {
      const std::lock_guard<std::mutex> hold(lock_);
      region_ = &region;
      first_.open(region.first);
      second_.open(region.second);
      seats_ = helpers;
      turn_++;
    }
    wake_.notify_all();
    work(region, scratch);
    close();
    return true;
  }

  int size() const { return size_.load(std::memory_order_relaxed); }

 private:
  struct Worker {
    Scratch scratch;
  };

  void grow(int wanted) {
    while (size() < wanted) {
      workers_.push_back(std::make_unique<Worker>());
      if (!start(size(), workers_.back().get())) {  // the system gives no more: go on with those there are
        workers_.pop_back();
        return;
      }
      size_.fetch_add(1, std::memory_order_relaxed);
    }
  }

  bool start(int index, Worker* worker) {
    sigset_t all, old;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);  // signals are for the threads of the program
    bool started = true;
    try {
      std::thread([this, index, worker, turn = turn_] { serve(index, *worker, turn); }).detach();
    } catch (const std::system_error&) {
      started = false;
    }
    pthread_sigmask(SIG_SETMASK, &old, nullptr);
    return started;
  }

  void serve(int index, Worker& worker, uint64_t seen);

  void work(const Region& region, void* scratch) {
    first_.work(region.run_first, scratch);
    if (!region.second) return;
    first_.wait();  // for items, not for threads: one that came late holds nobody up
    second_.work(region.run_second, scratch);
  }

  // Takes the region back. Who has not come yet finds no seat; who has is waited for.
  void close() {
    std::unique_lock<std::mutex> hold(lock_);
    seats_ = 0;
    hold.unlock();
    for (int spins = 0; inside_.load(std::memory_order_acquire) > 0 && spins < kSpins; spins++) pause();
    hold.lock();
    left_.wait(hold, [this] { return inside_ == 0; });
    region_ = nullptr;
  }

  std::mutex busy_;  // held for the length of a call
  std::vector<std::unique_ptr<Worker>> workers_;
  std::atomic<int> size_{0};

  std::mutex lock_;  // of what follows
  std::condition_variable wake_, left_;
  const Region* region_ = nullptr;
  uint64_t turn_ = 0;
  int seats_ = 0;   // workers with a smaller index may join
  std::atomic<int> inside_{0};  // workers in the region
  Phase first_, second_;
};

thread_local bool inside = false;  // this thread is running an item

// libgomp's entry point for a parallel region: the function runs on every thread of a team, the caller among them.
using Parallel = void (*)(void (*)(void*), void*, unsigned threads, unsigned flags);

// Whether this process is a fork that has not called exec: threads of OpenMP that its parent started are not there,
// and a region that counts on them would never end.
bool forked() {
  constexpr unsigned kForkNoExec = 0x40;  // PF_FORKNOEXEC
  std::FILE* file = std::fopen("/proc/self/stat", "r");
  if (!file) return true;
  char line[512];
  const size_t size = std::fread(line, 1, sizeof(line) - 1, file);
  std::fclose(file);
  line[size] = 0;
  const char* end = std::strrchr(line, ')');  // the program's name may hold anything
  unsigned flags = kForkNoExec;
  if (!end || std::sscanf(end + 1, " %*c %*d %*d %*d %*d %*d %u", &flags) != 1) return true;
  return flags & kForkNoExec;
}

// The OpenMP threads that torch computes with, or null. They spin for milliseconds after every operator of torch;
// threads of our own would have to wait for a core meanwhile. Built with ATTN_OWN_THREADS, to compare, there are none.
Parallel torch_threads() {
#ifdef ATTN_OWN_THREADS
  return nullptr;
#endif
  static const pid_t loaded = getpid();
  static const Parallel found =
      forked() ? nullptr : reinterpret_cast<Parallel>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
  return getpid() == loaded ? found : nullptr;
}

// One call on the threads of OpenMP.
class Team {
 public:
  Team(const Region& region, void* scratch, size_t stride) : region_(region), scratch_(scratch), stride_(stride) {
    first_.open(region.first);
    second_.open(region.second);
  }
  void run(Parallel parallel, int threads) { parallel(&Team::join, this, unsigned(threads), 0); }

 private:
  static void join(void* team) { static_cast<Team*>(team)->work(); }

  void work() {
    const bool was = inside;
    inside = true;
    void* scratch = static_cast<char*>(scratch_) + stride_ * seats_.fetch_add(1, std::memory_order_relaxed);
    first_.work(region_.run_first, scratch);
    if (region_.second) {
      first_.wait();
      second_.work(region_.run_second, scratch);
    }
    inside = was;
  }

  const Region& region_;
  void* scratch_;  // a piece of `stride_` bytes for each thread
  size_t stride_;
  std::atomic<size_t> seats_{0};
  Phase first_, second_;
};

// Returns false when another thread is using them.
bool run_on_torch(Parallel parallel, const Region& region, int threads, Scratch& scratch) {
  static std::mutex busy;
  const std::unique_lock<std::mutex> mine(busy, std::try_to_lock);
  if (!mine) return false;
  const size_t stride = (region.scratch_bytes + kLine - 1) / kLine * kLine;
  scratch.reserve(stride * size_t(threads));
  // All of torch's threads, also where items are fewer: OpenMP ends those that a smaller team leaves out.
  Team(region, scratch.get(), stride).run(parallel, threads);
  return true;
}

void Pool::serve(int index, Worker& worker, uint64_t seen) {
  inside = true;
  std::unique_lock<std::mutex> hold(lock_);
  for (;;) {
    wake_.wait(hold, [&] { return turn_ != seen; });
    seen = turn_;
    if (index >= seats_) continue;
    const Region& region = *region_;
    inside_++;
    hold.unlock();
    work(region, worker.scratch.get());
    hold.lock();
    if (--inside_ == 0) left_.notify_one();
  }
}

// Never destroyed: its threads outlive every static object.
Pool& pool() {
  static std::atomic<Pool*> current{nullptr};
  Pool* found = current.load(std::memory_order_acquire);
  while (!found || found->owner != getpid()) {
    // A child of fork() has the memory of the pool but not its threads, and its locks may be held by none.
    Pool* fresh = new Pool;
    if (current.compare_exchange_strong(found, fresh)) return *fresh;
    delete fresh;
  }
  return *found;
}

}  // namespace

void run_region(const Region& region, int threads) {
  thread_local Scratch scratch;
  if (inside) {
    Scratch own;  // the thread's is in use by the item that called
    own.reserve(region.scratch_bytes);
    return run_alone(region, own.get());
  }
  scratch.reserve(region.scratch_bytes);
  const int most = int(std::min<int64_t>(std::min(threads, kMostThreads), std::max(region.first, region.second)));
  inside = true;
  if (most <= 1) {
    run_alone(region, scratch.get());
  } else {
    try {
      const Parallel parallel = torch_threads();
      const bool done = parallel ? run_on_torch(parallel, region, std::min(threads, kMostThreads), scratch)
                                 : pool().run(region, most, scratch.get());
      if (!done) run_alone(region, scratch.get());
    } catch (...) {
      inside = false;
      throw;
    }
  }
  inside = false;
}

int pool_size() { return pool().size(); }

}  // namespace attn
