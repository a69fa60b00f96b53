// The attention kernel: prefill, verify and decode, every target.
//
// A tile type T holds the query rows of one work item as units: a unit is what one wave of a GPU, or one pass of a
// CPU thread, computes at a time. T knows how queries, keys and values are laid out; this file knows attention.
#pragma once
#include "logits.h"
#include "softmax.h"

namespace attn {

template <class T>
ATTN_DEVICE void attend(const AttendParams& p, const WorkItem& item, T& tile) {
  const Rows rows = rows_of(p, item.request, item.q_tile);
  const Keys keys = keys_of_tile(p, rows, item, T::kKeys);
  const float scale = logit_scale(p), left = scale_left<T>(p, scale);
  tile.open(p, item, rows);
  for (int kv = keys.begin; kv < keys.end; kv += T::kKeys) {
    const int n = least(T::kKeys, keys.end - kv);
    tile.seek(kv, n, keys.end);
    for (int h = 0; h < tile.heads(); h++) {
      tile.stage(h);
      ATTN_UNROLL_LANE
      for (int u = 0; u < tile.units(); u++) {
        typename T::Unit& unit = tile.unit(h, u);
        if (!T::kNeverIdle && !sees_any(unit.facts, kv, n)) continue;
        typename T::Scores s = tile.scores(unit, kv);  // q k^T
        finish_logits<T>(T::late(p), rows, unit.facts, s, kv, scale);
        if constexpr (T::kPatient) {
          tile.soften_and_add(unit, s, left);
        } else {
          typename T::Row fade[T::kRows];
          soften<T>(unit.state, s, fade, left);
          tile.accumulate(unit, fade, s);  // out = out * fade + weights v
        }
      }
    }
  }
  tile.close(output_scale(p));
}

}  // namespace attn
