// Mixing logits of Hyper-Connections to coefficients, by one warp a token.
#pragma once

#include "../common/vectors.cuh"
#include "split.h"

namespace rewright {

DEVICE float sigmoid_of(float x) { return 1.f / (1.f + expf(-x)); }

// Logits in the form "hc_partials" (ir/carried.py): partials f32[kPartialBlocks][rows][kPartialColumns], dots
// in the first columns, the sum of squares of `count` elements in the last one.
constexpr int kPartialBlocks = 132, kPartialColumns = 32;

// Logit m of a row: lane m of the warp asks for its own, the last lane for the sum of squares. Blocks are
// added in order, 33 on their way at once.
DEVICE float mix_from_partials(const float* partials, int rows, int row, int m, int count, float eps) {
  constexpr int kAtOnce = 33;
  const float* column = partials + (i64)row * kPartialColumns + m;
  const i64 step = (i64)rows * kPartialColumns;
  float sum = 0.f;
  for (int first = 0; first < kPartialBlocks; first += kAtOnce) {
    float part[kAtOnce];
    UNROLL for (int i = 0; i < kAtOnce; ++i) part[i] = __ldcg(column + (first + i) * step);
    UNROLL for (int i = 0; i < kAtOnce; ++i) sum += part[i];
  }
  const float squares = __shfl_sync(kAllLanes, sum, kPartialColumns - 1);
  return sum * rsqrtf(squares / (float)count + eps);
}

// Sum over i < n of what lanes first + i * step hold, in order.
template <int N>
DEVICE float lanes_sum(float v, int n, int first, int step) {
  float sum = __shfl_sync(kAllLanes, v, first);
  if (N) {
    UNROLL for (int i = 1; i < N; ++i) sum += __shfl_sync(kAllLanes, v, first + i * step);
  } else {
    for (int i = 1; i < n; ++i) sum += __shfl_sync(kAllLanes, v, (first + i * step) & 31);
  }
  return sum;
}

// Element (lane / n, lane % n) of the doubly stochastic matrix of `logit`; N is n, or 0 for any.
template <int N>
DEVICE float sinkhorn(float logit, int streams, int iters, float eps) {
  const int n = N ? N : streams, lane = lane_id() < n * n ? lane_id() : 0, row = lane / n * n, column = lane % n;
  float most = __shfl_sync(kAllLanes, logit, row);
  for (int i = 1; i < n; ++i) most = fmaxf(most, __shfl_sync(kAllLanes, logit, row + i));
  float v = expf(logit - most);
  v = v / lanes_sum<N>(v, n, row, 1) + eps;
  v = v / (lanes_sum<N>(v, n, column, n) + eps);
  for (int i = 1; i < iters; ++i) {
    v = v / (lanes_sum<N>(v, n, row, 1) + eps);
    v = v / (lanes_sum<N>(v, n, column, n) + eps);
  }
  return v;
}

// Coefficients of one token by one warp: logits[(2 + n) n] -> pre[n], post[n], and rows of comb[n][n] that lie
// comb_step floats apart. All may lie in global or shared memory; logits were written before the warp was last
// in step.
DEVICE void hc_split_warp(const HcSplitParams& p, const float* logits, float* pre, float* post, float* comb,
                          i64 comb_step) {
  const int n = p.streams, lane = lane_id();
  const auto logit = [&](int i, int part) {
    return logits[i] * load_element(p.scale, part, p.scale_element) + load_element(p.base, i, p.base_element);
  };
  if (lane < n) pre[lane] = sigmoid_of(logit(lane, 0)) + p.eps;
  else if (lane < 2 * n) post[lane - n] = 2.f * sigmoid_of(logit(lane, 1));
  const float mine = logit(2 * n + (lane < n * n ? lane : 0), 2);
  float v;
  if (n == 4) v = sinkhorn<4>(mine, n, p.iters, p.eps);
  else if (n == 2) v = sinkhorn<2>(mine, n, p.iters, p.eps);
  else v = sinkhorn<0>(mine, n, p.iters, p.eps);
  if (lane < n * n) comb[lane / n * comb_step + lane % n] = v;
}

// Row r of the op.
DEVICE void hc_split_row(const HcSplitParams& p, int row) {
  hc_split_warp(p, (const float*)row_of(p.mix, row, p.mix_pitch), (float*)row_of(p.pre, row, p.pre_pitch),
                (float*)row_of(p.post, row, p.post_pitch),
                (float*)row_of(p.comb, (i64)row * p.streams, p.comb_pitch), p.comb_pitch / 4);
}

// Coefficient j of the final collapse.
DEVICE float hc_head_coefficient(const HcHeadSplitParams& p, float logit, int j) {
  const float scaled = logit * load_element(p.scale, 0, p.scale_element);
  return sigmoid_of(scaled + load_element(p.base, j, p.base_element)) + p.eps;
}

}  // namespace rewright
