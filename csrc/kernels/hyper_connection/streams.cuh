// The residual streams of Hyper-Connections: four columns of one token.
#pragma once

#include "../common/vectors.cuh"
#include "streams.h"

namespace rewright {

// Columns 4 quad .. of sum_j pre_j X_j, not yet rounded; pre[streams] in any memory.
DEVICE float4 hc_collapse_four(const HcCollapseParams& p, int row, int quad, const float* pre) {
  float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
  UNROLL for (int j = 0; j < kMostStreams; ++j) {
    if (j >= p.streams) break;
    sum = add_scaled(sum, pre[j], load_four(row_of(p.x, (i64)row * p.streams + j, p.x_pitch), quad, p.element));
  }
  return sum;
}

// Columns 4 quad .. of X'_k = post_k y + sum_j comb_jk X_j for every k: store(k, value), not yet rounded. post and
// comb in any memory, rows of comb comb_step floats apart.
template <typename Store>
DEVICE void hc_combine_four(const HcCombineParams& p, int row, int quad, float4 y, const float* post, const float* comb,
                            i64 comb_step, Store store) {
  float4 x[kMostStreams];
  UNROLL for (int j = 0; j < kMostStreams; ++j) {
    if (j < p.streams) x[j] = load_four(row_of(p.x, (i64)row * p.streams + j, p.x_pitch), quad, p.element);
  }
  for (int k = 0; k < p.streams; ++k) {
    float4 mixed = make_float4(0.f, 0.f, 0.f, 0.f);
    UNROLL for (int j = 0; j < kMostStreams; ++j) {
      if (j < p.streams) mixed = add_scaled(mixed, comb[j * comb_step + k], x[j]);
    }
    store(k, add_scaled(mixed, post[k], y));
  }
}

}  // namespace rewright
