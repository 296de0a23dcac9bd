// Rotary position embedding of a pair, and the Hadamard rotation of a row.
#pragma once

#include "../common/vectors.cuh"
#include "rope.h"

namespace rewright {

// Row of the table for a position: positions past it (masked tail rows) read its last row.
DEVICE int table_row(const RopeTable& table, i64 position) {
  return (int)max((i64)0, min(position, (i64)table.positions - 1));
}

// Pair `i` of those that turn, by the angles of a table row.
DEVICE float2 rope_pair(const RopeTable& table, int row, int i, float2 v, bool inverse = false) {
  const float c = ((const float*)row_of(table.cos, row, table.cos_pitch))[i];
  const float angle_sine = ((const float*)row_of(table.sin, row, table.sin_pitch))[i];
  const float s = inverse ? -angle_sine : angle_sine;
  return make_float2(v.x * c - v.y * s, v.x * s + v.y * c);
}

// Orthonormal Walsh-Hadamard transform of values[count] in shared memory, in natural order, by one warp;
// count is a power of two and scale its -1/2th power. Ends with the warp in step.
DEVICE void hadamard_warp(float* values, int count, float scale) {
  for (int width = 1; width < count; width *= 2) {
    __syncwarp();
    for (int i = lane_id(); i < count / 2; i += 32) {
      const int low = 2 * i - (i & (width - 1)), high = low + width;
      const float a = values[low], b = values[high];
      values[low] = a + b;
      values[high] = a - b;
    }
  }
  __syncwarp();
  for (int i = lane_id(); i < count; i += 32) values[i] *= scale;
  __syncwarp();
}

}  // namespace rewright
