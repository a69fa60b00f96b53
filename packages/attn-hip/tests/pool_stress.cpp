// Runs the thread pool hard; meant to be built with -fsanitize=thread. Prints "ok" when every item ran once.
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <thread>
#include <vector>

#include "pool.h"

namespace {

// One region of two phases; the second must see all of the first.
bool region(int items, int threads, size_t scratch_bytes, bool nest) {
  std::vector<int> ran(size_t(items), 0);
  std::atomic<int> wrong{0};
  const auto first = [&](int64_t i, void* scratch) {
    std::memset(scratch, int(i), scratch_bytes);
    if (nest && i % 7 == 0 && !region(5, threads, 64, false)) wrong++;
    if (i % 16 == 15) std::this_thread::sleep_for(std::chrono::microseconds(300));  // others must wait for it
    const char* mine = static_cast<const char*>(scratch);
    if (mine[0] != char(i) || mine[scratch_bytes - 1] != char(i)) wrong++;
    ran[size_t(i)]++;
  };
  const auto second = [&](int64_t i, void*) {
    for (int n : ran)
      if (n != 1) wrong++;
    if (i < 0) wrong++;
  };
  attn::run_region({items, items / 3, scratch_bytes, first, second}, threads);
  for (int n : ran)
    if (n != 1) wrong++;
  return wrong == 0;
}

}  // namespace

int main() {
  std::atomic<bool> good{true};
  std::vector<std::thread> callers;
  for (int c = 0; c < 3; c++)
    callers.emplace_back([&good, c] {
      for (int i = 0; i < 60; i++)
        if (!region(1 + (i * 13 + c) % 40, 1 + (i + c) % 5, 64 + size_t(i) * 100, i % 4 == 0)) good = false;
    });
  for (auto& caller : callers) caller.join();
  std::puts(good ? "ok" : "wrong");
}
