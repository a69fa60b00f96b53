// Chain speculative sampling: bit for bit what attn_core.sampling documents. Ids are found in integer arithmetic,
// whose sums do not depend on their order, and random numbers are a function of (seed, offset, row, position).
#pragma once
#include "convert.h"

namespace attn {

struct Words {
  uint32_t x[4];
};

// Philox4x32-10 (Salmon, Moraes, Dror, Shaw, SC 2011).
ATTN_DEVICE Words philox(Words counter, uint64_t key) {
  uint32_t low = uint32_t(key), high = uint32_t(key >> 32);
  for (int round = 0; round < 10; round++) {
    const uint64_t a = uint64_t(0xD2511F53u) * counter.x[0], b = uint64_t(0xCD9E8D57u) * counter.x[2];
    const uint32_t first = uint32_t(b >> 32) ^ counter.x[1] ^ low, third = uint32_t(a >> 32) ^ counter.x[3] ^ high;
    counter = {{first, uint32_t(b), third, uint32_t(a)}};
    low += 0x9E3779B9u, high += 0xBB67AE85u;
  }
  return counter;
}

ATTN_DEVICE double uniform53(uint32_t high, uint32_t low) {
  return double(int64_t(high >> 5) * (int64_t(1) << 26) + (low >> 6)) * 0x1p-53;
}

ATTN_DEVICE double load_prob(const void* p, int64_t i, int dtype) {
  return dtype == kFloat64 ? static_cast<const double*>(p)[i] : double(load_element(p, i, dtype));
}

// The rows that the last token of one request is drawn from, as float.
struct LastRows {
  const SampleParams& p;
  int64_t target, draft;  // offsets of the rows
  bool residual;          // draw from max(0, target - draft), else from target

  ATTN_MEMBER float target_at(int64_t i) const { return float(load_prob(p.target_probs, target + i, p.target_dtype)); }
  ATTN_MEMBER float draft_at(int64_t i) const { return float(load_prob(p.draft_probs, draft + i, p.draft_dtype)); }
  ATTN_MEMBER float rest_at(int64_t i) const {
    const float rest = target_at(i) - draft_at(i);
    return rest > 0.f ? rest : 0.f;
  }
  ATTN_MEMBER float at(int64_t i) const { return residual ? rest_at(i) : target_at(i); }
};

ATTN_DEVICE bool is_weight(float x) { return x >= 0.f && x < kInfinity; }

constexpr float kLeastRest = 0x1p-119f;  // the smallest weight that does not truncate to 0 below

// The power of two that makes 40-bit integers of weights up to `top`.
ATTN_DEVICE float weight_scale(float top) {
  constexpr int bits = 40, least_exponent = -80;
  const int exponent = int(bits_as<uint32_t>(top) >> 23) - 127;
  const int scale_exponent = bits - 1 - most(exponent, least_exponent);
  return bits_as<float>(uint32_t(scale_exponent + 127) << 23);
}

// Index drawn with probability proportional to its weight, or -1 where none can be.
ATTN_DEVICE int draw(LastRows rows, bool rejected, double u) {
  const int64_t vocab = rows.p.vocab_size;
  float top = 0.f, top_rest = 0.f;
  for (int64_t i = 0; i < vocab; i++) {
    const float target = rows.target_at(i);
    if (!is_weight(target)) return -1;
    top = target > top ? target : top;
    if (!rejected) continue;
    if (!is_weight(rows.draft_at(i))) return -1;
    const float rest = rows.rest_at(i);
    top_rest = rest > top_rest ? rest : top_rest;
  }
  rows.residual = rejected && top_rest >= kLeastRest;
  const float scale = weight_scale(rows.residual ? top_rest : top);
  int64_t total = 0, running = 0;
  for (int64_t i = 0; i < vocab; i++) total += int64_t(rows.at(i) * scale);
  if (total == 0) return -1;
  const int64_t threshold = int64_t(u * double(total));
  for (int64_t i = 0; i < vocab; i++) {
    running += int64_t(rows.at(i) * scale);
    if (running > threshold) return int(i);
  }
  return -1;  // not reached: the threshold is below the total
}

ATTN_DEVICE bool passes(const SampleParams& p, int64_t request, int position, int64_t id, double u) {
  const int64_t draft = request * p.draft_stride_row + position * p.draft_stride_position + id;
  const int64_t target = request * p.target_stride_row + position * p.target_stride_position + id;
  const double q = load_prob(p.draft_probs, draft, p.draft_dtype);
  const double w = load_prob(p.target_probs, target, p.target_dtype);
  return q >= 0 && w > 0 && w < double(kInfinity) && (u * q < w || q <= w);
}

// Every thread of the caller's may do the same: `draw_last(rows, rejected, u)` draws, `writes` says who writes.
template <class Draw>
ATTN_DEVICE void sample_request(const SampleParams& p, int64_t request, bool writes, Draw draw_last) {
  const uint64_t seed = uint64_t(p.seed[p.num_seeds > 1 ? request : 0]);
  const uint64_t offset = uint64_t(p.offset[p.num_offsets > 1 ? request : 0]);
  const uint32_t row = p.num_seeds > 1 ? 0 : uint32_t(request);  // a seed per request replaces the row number
  const auto words = [&](int position) {
    return philox({{uint32_t(offset), uint32_t(offset >> 32), row, uint32_t(position + 1)}}, seed);
  };
  int drafts = 0, accepted = 0, emitted = 0;
  for (; drafts < p.num_drafts; drafts++) {
    const int64_t id = p.draft_ids[request * p.num_drafts + drafts];
    if (id < 0 || id >= p.vocab_size) break;
    const Words random = words(drafts);
    const bool passed = passes(p, request, drafts, id, uniform53(random.x[0], random.x[1]));
    if (passed && emitted == drafts) {
      if (writes) p.tokens[request * (p.num_drafts + 1) + emitted] = int32_t(id);
      emitted++;
    }
    accepted += passed;
  }
  const Words random = words(emitted);
  const LastRows rows = {p, request * p.target_stride_row + emitted * p.target_stride_position,
                         request * p.draft_stride_row + least(emitted, p.num_drafts - 1) * p.draft_stride_position,
                         false};
  const int last = draw_last(rows, emitted < drafts, uniform53(random.x[2], random.x[3]));
  if (!writes) return;
  int32_t* tokens = p.tokens + request * (p.num_drafts + 1);
  tokens[emitted] = last;
  for (int i = emitted + 1; i <= p.num_drafts; i++) tokens[i] = -1;
  p.accepted[request * p.accepted_stride] += accepted;
  p.emitted[request * p.emitted_stride] += emitted;
}

}  // namespace attn
