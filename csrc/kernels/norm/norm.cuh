// RMS norms of one row.
#pragma once

#include "head_norm.cuh"
#include "../common/vectors.cuh"
#include "norm.h"

namespace rewright {

// What a row is multiplied with, from the sum of its squares.
DEVICE float rms_scale(float sum, int columns, float eps) { return rsqrtf(sum / (float)columns + eps); }

DEVICE float2 normed_pair(float2 v, float scale, float2 weight) {
  return make_float2(weight.x * (v.x * scale), weight.y * (v.y * scale));
}

// One row by the whole block; `scratch` is shared memory of 33 floats.
DEVICE void rms_norm_row(const RmsNormParams& p, int row, float* scratch) {
  const void* x = row_of(p.x, row, p.x_pitch);
  void* y = row_of(p.y, row, p.y_pitch);
  const int pairs = p.columns / 2;
  float sum = 0.f;
  for (int i = threadIdx.x; i < pairs; i += blockDim.x) {
    const float2 v = load_pair(x, i, p.element);
    sum += v.x * v.x + v.y * v.y;
  }
  const float scale = rms_scale(block_sum(sum, scratch), p.columns, p.eps);
  for (int i = threadIdx.x; i < pairs; i += blockDim.x) {
    const float2 weight = load_pair(p.weight, i, p.weight_element);
    store_pair(y, i, p.element, normed_pair(load_pair(x, i, p.element), scale, weight));
  }
}

// One head by one warp.
DEVICE void head_rms_norm_row(const HeadRmsNormParams& p, int row) {
  const void* x = row_of(p.x, row, p.x_pitch);
  void* y = row_of(p.y, row, p.y_pitch);
  const int pairs = p.columns / 2;
  float sum = 0.f;
  for (int i = lane_id(); i < pairs; i += 32) {
    const float2 v = load_pair(x, i, p.element);
    sum += head_square(v.x, p.element) + head_square(v.y, p.element);
  }
  const int batch = row / p.per_sequence;
  const bool beyond = beyond_vectors(row % p.per_sequence, p.n_valid[batch] * p.heads);
  const float scale = head_scale(warp_sum(sum), p.columns, p.eps, p.element, beyond);
  for (int i = lane_id(); i < pairs; i += 32) {
    const float2 v = load_pair(x, i, p.element);
    store_pair(y, i, p.element, make_float2(v.x * scale, v.y * scale));
  }
}

}  // namespace rewright
