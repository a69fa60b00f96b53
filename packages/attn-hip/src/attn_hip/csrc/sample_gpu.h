// Chain speculative sampling by a block: sample.h for threads side by side. Maxima and integer sums do not depend on
// their order, so the result is bit for bit that of one thread.
#pragma once
#include "sample.h"
#if ATTN_AMD
#include "fragment_amd.h"
#else
#include "fragment_nvidia.h"
#endif

namespace attn {

template <int Waves>
class BlockDraw {
 public:
  static constexpr int kSharedBytes = Waves * 16;

  ATTN_MEMBER BlockDraw(const LastRows& rows, Shared shared) : rows_(rows), shared_(shared) {}

  // What draw() in sample.h returns, to every thread.
  ATTN_MEMBER int index(bool rejected, double u) {
    if (!scan_weights(rejected)) return -1;
    const float top = rows_.residual ? top_rest_ : top_;
    scale_ = weight_scale(top);
    int64_t begin = 0, end = rows_.p.vocab_size, before = 0, threshold = -1;
    // Each round keeps the one of Waves parts in which the running sum passes the threshold.
    for (;;) {
      const int64_t part = (end - begin + Waves - 1) / Waves, from = begin + wave_index() * part;
      publish(sum(from, from + part < end ? from + part : end), 0);
      if (threshold < 0) {
        const int64_t total = total_of_waves();
        if (total == 0) return -1;
        threshold = int64_t(u * double(total));
      }
      for (int w = 0; w < Waves; w++) {
        const int64_t with = before + published(w, 0);
        if (with > threshold) {
          end = begin + part < end ? begin + part : end;
          break;
        }
        before = with, begin += part;
      }
      barrier();
      if (end - begin <= 1) return int(begin);
    }
  }

 private:
  ATTN_MEMBER void publish(int64_t x, int word) {
    if (lane_index() == 0) {
      const uint64_t bits = uint64_t(x);
      write_word(shared_ + wave_index() * 16 + word * 8, uint32_t(bits));
      write_word(shared_ + wave_index() * 16 + word * 8 + 4, uint32_t(bits >> 32));
    }
    barrier();
  }
  ATTN_MEMBER int64_t published(int wave, int word) const {
    const Shared at = shared_ + wave * 16 + word * 8;
    return int64_t(uint64_t(read_word(at)) | uint64_t(read_word(at + 4)) << 32);
  }
  ATTN_MEMBER int64_t total_of_waves() const {
    int64_t total = 0;
    for (int w = 0; w < Waves; w++) total += published(w, 0);
    return total;
  }

  ATTN_MEMBER int64_t sum(int64_t begin, int64_t end) const {
    int64_t n = 0;
    for (int64_t i = begin + lane_index(); i < end; i += kWave) n += int64_t(rows_.at(i) * scale_);
    for (int mask = 1; mask < kWave; mask *= 2) n += exchange(n, mask);
    return n;
  }

  ATTN_MEMBER float largest(float x) {
    for (int mask = 1; mask < kWave; mask *= 2) {
      const float other = exchange(x, mask);
      x = other > x ? other : x;
    }
    publish(int64_t(bits_as<uint32_t>(x)), 1);
    uint32_t top = 0;
    for (int w = 0; w < Waves; w++) {
      const uint32_t bits = uint32_t(published(w, 1));  // of floats >= 0: in their order
      top = bits > top ? bits : top;
    }
    barrier();
    return bits_as<float>(top);
  }

  // Finds the largest weights; false where a weight is none.
  ATTN_MEMBER bool scan_weights(bool rejected) {
    float top = 0.f, top_rest = 0.f, bad = 0.f;
    for (int64_t i = thread_index(); i < rows_.p.vocab_size; i += Waves * kWave) {
      const float target = rows_.target_at(i);
      bad = is_weight(target) ? bad : 1.f;
      top = target > top ? target : top;
      if (!rejected) continue;
      bad = is_weight(rows_.draft_at(i)) ? bad : 1.f;
      const float rest = rows_.rest_at(i);
      top_rest = rest > top_rest ? rest : top_rest;
    }
    if (largest(bad) != 0.f) return false;
    top_ = largest(top), top_rest_ = largest(top_rest);
    rows_.residual = rejected && top_rest_ >= kLeastRest;
    return true;
  }

  LastRows rows_;
  Shared shared_;
  float top_, top_rest_, scale_;
};

}  // namespace attn
