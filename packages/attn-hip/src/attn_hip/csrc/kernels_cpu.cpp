// The CPU build: which tile serves which item, and the entry points of kernels.h.
#include "kernels.h"

#include <cmath>

#include "append.h"
#include "merge.h"
#include "sample.h"
#include "tile_bf16.h"
#include "tile_dims.h"
#include "tile_rows.h"

namespace attn {
namespace {

template <class Tile>
void run(const AttendParams& p, const WorkItem& item, void* scratch) {
  Tile tile{Arena(scratch)};
  attend<Tile>(p, item, tile);
}

bool whole_vectors(const AttendParams& p) { return p.head_dim_qk % kWide == 0 && p.head_dim_vo % kWide == 0; }

#if defined(__AVX512BF16__)
bool takes_pairs(const AttendParams& p) {
  return p.q_dtype == kBFloat16 && p.kv_dtype == kBFloat16 && p.position != kPositionRope &&
         p.head_dim_qk % 32 == 0 && p.head_dim_vo % 32 == 0;
}
#endif

template <int R>
void attend_dims(const AttendParams& p, const WorkItem& item, void* scratch) {
#if defined(__AVX512BF16__)
  if (takes_pairs(p)) return run<DotDimTile<R>>(p, item, scratch);
#endif
  const bool staged = p.position == kPositionRope || !whole_vectors(p);
  if (staged) return run<DimTile<R, float, true>>(p, item, scratch);
  switch (p.kv_dtype) {
    case kFloat32: return run<DimTile<R, float, false>>(p, item, scratch);
    case kFloat16: return run<DimTile<R, Half, false>>(p, item, scratch);
    case kBFloat16: return run<DimTile<R, BFloat, false>>(p, item, scratch);
    case kFloat8E4M3FN: return run<DimTile<R, Fp8<kFloat8E4M3FN>, false>>(p, item, scratch);
    case kFloat8E4M3FNUZ: return run<DimTile<R, Fp8<kFloat8E4M3FNUZ>, false>>(p, item, scratch);
    case kFloat8E5M2: return run<DimTile<R, Fp8<kFloat8E5M2>, false>>(p, item, scratch);
    default: return run<DimTile<R, Fp8<kFloat8E5M2FNUZ>, false>>(p, item, scratch);
  }
}

template <int W, int N, int Step>
void attend_rows(const AttendParams& p, const WorkItem& item, void* scratch) {
#if defined(__AVX512BF16__)
  if (takes_pairs(p)) return run<DotRowTile<W, N, Step>>(p, item, scratch);
#endif
  // A long step passes over its rows many times, so a copy with a kind stride pays whatever the type.
  if (Step == kLongStep || p.position == kPositionRope || p.kv_dtype != kFloat32)
    return run<RowTile<W, N, true, Step>>(p, item, scratch);
  if constexpr (Step == kShortStep) return run<RowTile<W, N, false, Step>>(p, item, scratch);
}

// Packed rows of a request up to which it is a decode: bound by reading, not by arithmetic.
constexpr int kFewRows = 16;

struct RowMerge {
  float* row;
  int dims;
  static float max(float a, float b) { return greater(a, b); }
  static float exp2(float x) { return attn::exp2(x); }
  void add(float weight, const float* out) {
    for (int d = 0; d < dims; d++) row[d] += weight * out[d];
  }
};

}  // namespace

const char* isa_name() {
#if defined(__AVX512BF16__)
  return "avx512bf16";
#elif defined(__AVX512F__)
  return "avx512";
#elif defined(__AVX2__)
  return "avx2";
#else
  return "generic";
#endif
}

int kv_tile() { return kLongStep; }

int tile_q_for(int rows) {
  int tile = 4;
  while (tile < rows && tile < 64) tile *= 2;
  return tile;
}

size_t attend_scratch_bytes(const AttendParams& p, int num_heads) { return tile_bytes(p, num_heads); }

void attend_item(const AttendParams& p, const WorkItem& item, void* scratch) {
  const Rows rows = rows_of(p, item.request, item.q_tile);
  if (rows.count <= 0) return;
  // The kind of tile decides bits, so it must follow from the request alone, not from the cut into tiles.
  const int total = rows.q_len * p.group;
  switch (total) {
    case 1: return attend_dims<1>(p, item, scratch);
    case 2: return attend_dims<2>(p, item, scratch);
    case 3:
    case 4: return attend_dims<4>(p, item, scratch);
#if defined(__AVX512F__)
    // Sixteen lanes of dims in two passes still beat sixteen lanes of which rows fill half.
    case 5:
    case 6:
    case 7:
    case 8: return attend_dims<4>(p, item, scratch);
#endif
  }
#if defined(__AVX512F__)
  if (total <= kFewRows) return attend_rows<16, 1, kShortStep>(p, item, scratch);
  if (rows.count <= 16) return attend_rows<16, 1, kLongStep>(p, item, scratch);
  return attend_rows<16, 2, kLongStep>(p, item, scratch);
#elif defined(__AVX2__)
  if (total > kFewRows) return attend_rows<8, 2, kLongStep>(p, item, scratch);
  if (rows.count > 8) return attend_rows<8, 2, kShortStep>(p, item, scratch);
  return attend_rows<8, 1, kShortStep>(p, item, scratch);
#else
  if (total > kFewRows) return attend_rows<4, 2, kLongStep>(p, item, scratch);
  return attend_rows<4, 2, kShortStep>(p, item, scratch);
#endif
}

void merge_item(const AttendParams& p, const MergeItem& item) {
  const Rows rows = rows_of(p, item.request, item.q_tile);
  const WorkItem whole = {item.request, item.q_tile, item.kv_head, 1, 0, rows.kv_len, -1, 0};
  alignas(64) float row[kMostDims];
  for (int i = 0; i < rows.count; i++) {
    RowMerge merge{row, p.head_dim_vo};
    std::memset(row, 0, size_t(p.head_dim_vo) * sizeof(float));
    const float top = merged_top<RowMerge>(p, item, i);
    const float sum = merge_row(p, item, i, top, merge);
    if (sum != 0.f)  // also for a NaN
      for (int d = 0; d < p.head_dim_vo; d++) row[d] /= sum;
    store_result(sink_of(p, rows, whole, rows.first + i, item.kv_head), row, p.head_dim_vo, top + log2(sum));
  }
}

void append_rows(const AppendParams& p, int64_t begin, int64_t end) {
  const int size = element_size(p.dtype);
  const auto copy = [&](void* cache, int64_t cache_at, const void* rows, int64_t row_at, int n) {
    std::memcpy(static_cast<char*>(cache) + cache_at * size, static_cast<const char*>(rows) + row_at * size,
                size_t(n) * size_t(size));
  };
  for (int64_t i = begin; i < end; i++) {
    const Slot slot = slot_of(p, i);
    if (!slot.exists) continue;
    for (int h = 0; h < p.num_kv_heads; h++) {
      copy(p.k, slot.k + h * p.k_stride_head, p.key, i * p.key_stride_row + h * p.key_stride_head, p.head_dim_qk);
      copy(p.v, slot.v + h * p.v_stride_head, p.value, i * p.value_stride_row + h * p.value_stride_head, p.head_dim_vo);
    }
  }
}

void sample_requests(const SampleParams& p, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; i++) sample_request(p, i, true, draw);
}

void rope_turns(int head_dim, double theta, double scale, double* out) {
  const double pi = 3.14159265358979323846;
  for (int i = 0; i < head_dim / 2; i++) out[i] = std::pow(theta, -2.0 * i / head_dim) / scale / (2 * pi);
}

void alibi_slopes(int num_heads, float* out) {
  int near = 1;
  while (near * 2 <= num_heads) near *= 2;
  for (int i = 0; i < num_heads; i++)
    out[i] = float(i < near ? std::pow(2.0, -8.0 * (i + 1) / near) : std::pow(2.0, -4.0 * (2 * (i - near) + 1) / near));
}

}  // namespace attn
