// The query of a GPU tile: from memory, rotated where asked, into the order of the product.
#pragma once
#include "tile_gpu.h"

namespace attn {

// An element of a query head, rotated where RoPE asks for it; 0 behind its last dim.
template <class E, int D, int Blocks, int Waves, int KeyGroups, bool General, bool Fp8>
ATTN_MEMBER uint16_t GpuTile<E, D, Blocks, Waves, KeyGroups, General, Fp8>::query_element(
    const uint16_t* q, int query, int d) const {
  if (!General) return q[d];
  if (d >= p_.head_dim_qk) return 0;
  if (p_.position != kPositionRope) return q[d];
  const AttendParams& p = late(p_);
  const int half = p.head_dim_qk / 2, i = d < half ? d : d - half;
  const float turn = turn_of(p.rope_turns[i], rows_.kv_len - rows_.q_len + query);
  const float x = E::widen(q[d]), other = E::widen(q[d < half ? d + half : i]);
  const float sine = d < half ? -sin_turn(turn) : sin_turn(turn);
  return uint16_t(E::pair(x * cos_turn(turn) + other * sine, 0.f));
}

template <class E, int D, int Blocks, int Waves, int KeyGroups, bool General, bool Fp8>
ATTN_MEMBER Line GpuTile<E, D, Blocks, Waves, KeyGroups, General, Fp8>::query_line(
    int packed, int line, bool aligned) const {
  const AttendParams& p = late(p_);
  const uint16_t* q = static_cast<const uint16_t*>(p.q) +
                      row_offset(p, rows_, packed, item_.kv_head, p.q_stride_row, p.q_stride_head);
  const char* at = reinterpret_cast<const char*>(q + line * 8);
  if constexpr (!General) return aligned ? load_line(at) : load_elements(at, 8, 2);
  Line x;
  ATTN_UNROLL
  for (int w = 0; w < 4; w++) {
    const int d = line * 8 + w * 2, query = packed / p.group;
    x.x[w] = query_element(q, query, d) | uint32_t(query_element(q, query, d + 1)) << 16;
  }
  return x;
}

// Into shared memory line by line, and from there in the order of the product.
template <class E, int D, int Blocks, int Waves, int KeyGroups, bool General, bool Fp8>
ATTN_MEMBER void GpuTile<E, D, Blocks, Waves, KeyGroups, General, Fp8>::load_query() {
  constexpr int lines = (kSharesQuery ? Waves / KeyGroups : 1) * Blocks * 16 * (D / 8), step = kSharesQuery ? kThreads : kWave;
  const int start = kSharesQuery ? thread_index() : lane_index();
  const uint64_t bits = reinterpret_cast<uint64_t>(p_.q) | uint64_t(p_.q_stride_row | p_.q_stride_head) * 2;
  if (!General && (kLoadsAnywhere || bits % 16 == 0)) {
    ATTN_UNROLL_BY(kSharesQuery ? 2 : 16)
    for (int i = 0; i < lines / step; i++) put_query(start + i * step, true);
  } else {
    ATTN_ROLL
    for (int i = start; i < lines; i += step) put_query(i, false);
  }
  if constexpr (kTogether) Group::show();
  if constexpr (kSharesQuery) barrier();
  else wave_barrier();
  if constexpr (kKeepsQuery) {
    ATTN_UNROLL
    for (int b = 0; b < kUnitBlocks; b++) {
      ATTN_UNROLL
      for (int k = 0; k < kQueryFrags; k++) {
        const int line = Stage::kDirect ? Stage::direct_line(k) : Frags::query_line(k);
        units_[0].q[b][k] = Frags::read_query(queries(), b * 16, line);
      }
    }
    if constexpr (!kSharesQuery) stage_.join();
  }
}

template <class E, int D, int Blocks, int Waves, int KeyGroups, bool General, bool Fp8>
ATTN_MEMBER void GpuTile<E, D, Blocks, Waves, KeyGroups, General, Fp8>::put_query(int i, bool aligned) {
  const int row = i / (D / 8), line = i % (D / 8), first = kSharesQuery ? rows_.first : first_;
  const Line one[1] = {query_line(least(first + row, last_), line, aligned)};
  Frags::put_keys(kSharesQuery ? shared_ + kQueryAt : queries(), row, line, one);
}

}  // namespace attn
