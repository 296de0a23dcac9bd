// What rows of keys and compressed entries go through before they are stored.
#pragma once

#include "../norm/norm.cuh"
#include "../quantize/quantize.cuh"
#include "../rope/rope.cuh"
#include "keys.h"

namespace rewright {

// Norm, RoPE at `position`, rotation and rounding of shared[columns], then the row `y`; by the whole block.
// `shared` is kRowShared floats, 16-byte aligned, whose values have been rounded to the form's element; pair i
// was written by thread i % blockDim.x, so that no barrier is needed before. Ends with a barrier.
DEVICE void finish_row(const RowForm& form, float* shared, i64 position, void* y) {
  float2* values = (float2*)shared;
  const int pairs = form.columns / 2, kept = pairs - form.table.pairs;
  const int angles = table_row(form.table, position);
  float sum = 0.f;
  for (int i = threadIdx.x; i < pairs; i += blockDim.x) {
    const float2 v = values[i];
    sum += v.x * v.x + v.y * v.y;
  }
  const float scale = rms_scale(block_sum(sum, shared + kMostRow), form.columns, form.eps);
  for (int i = threadIdx.x; i < pairs; i += blockDim.x) {
    const float2 weight = load_pair(form.weight, i, form.weight_element);
    float2 v = round_pair(normed_pair(values[i], scale, weight), form.element);
    if (i >= kept) v = round_pair(rope_pair(form.table, angles, i - kept, v), form.element);
    values[i] = v;
  }
  if (form.rotate) {
    __syncthreads();
    if (warp_id() == 0) {
      hadamard_warp(shared, form.columns, form.rotation_scale);
      for (int i = lane_id(); i < form.columns; i += 32) shared[i] = round_to(shared[i], form.element);
    }
  }
  __syncthreads();
  if (form.format != kNoCodes) {
    const int warps = blockDim.x / 32;
    for (int at = form.start + warp_id() * form.block; at < form.stop; at += warps * form.block) {
      round_block(shared + at, form.block, form.format);
    }
    __syncthreads();
  }
  for (int i = threadIdx.x; i < pairs; i += blockDim.x) store_pair(y, i, form.y_element, values[i]);
  __syncthreads();
}

}  // namespace rewright
