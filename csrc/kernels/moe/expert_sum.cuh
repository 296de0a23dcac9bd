// The sum over a token's experts.
#pragma once

#include "../common/vectors.cuh"
#include "expert_sum.h"

namespace rewright {

// order[i]: which of the k ids is the i-th in ascending order, equal ones as they stand. Thread `at` < k of a
// block or warp writes its own place; k is at most kMostSummed.
DEVICE void expert_order(const int* ids, int k, int at, int* order) {
  if (at >= k) return;
  const int mine = ids[at];
  int place = 0;
  for (int j = 0; j < k; ++j) place += ids[j] < mine || (ids[j] == mine && j < at);
  order[place] = at;
}

// Columns 4 quad .. of a row of the op in that order, the shared expert last; not yet rounded.
DEVICE float4 expert_sum_four(const ExpertSumParams& p, int row, int quad, const int* order) {
  float4 rows[kMostSummed];  // all on their way at once
  UNROLL for (int i = 0; i < kMostSummed; ++i) {
    if (i < p.k) rows[i] = load_four(row_of(p.routed, (i64)row * p.k + order[i], p.routed_pitch), quad, p.routed_element);
  }
  float4 total = rows[0];
  UNROLL for (int i = 1; i < kMostSummed; ++i) {
    if (i < p.k) total = add_four(total, rows[i]);
  }
  return add_four(total, load_four(row_of(p.shared, row, p.shared_pitch), quad, p.element));
}

}  // namespace rewright
