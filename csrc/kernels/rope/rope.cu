// Rotary position embedding and the Hadamard rotation, one op a launch.
//
// rope: the last 2R elements of every row turned by the angles of its position, rounded once, the others as
// they are; a warp a row, 8 rows a block. hadamard: n^(-1/2) times the Sylvester matrix, rounded once; a warp
// a row, 4 rows a block. Both bound by memory: each row is read and written once.
#include "rope.cuh"

namespace rewright {

KERNEL(rope, RopeParams, 256, 1) {
  const int row = blockIdx.x * 8 + warp_id();
  if (row >= p.rows) return;
  const int token = row / p.inner, batch = token / p.tokens;
  const i64 position = (p.pos[batch] / p.stride + token % p.tokens) * p.stride;
  const int angles = table_row(p.table, position), pairs = p.columns / 2, kept = pairs - p.table.pairs;
  const void* x = row_of(p.x, row, p.x_pitch);
  void* y = row_of(p.y, row, p.y_pitch);
  for (int i = lane_id(); i < pairs; i += 32) {
    float2 v = load_pair(x, i, p.element);
    if (i >= kept) v = rope_pair(p.table, angles, i - kept, v, p.inverse);
    store_pair(y, i, p.element, v);
  }
}

constexpr int kHadamardMost = 512;

KERNEL(hadamard, HadamardParams, 128, 1) {
  __shared__ float rows[4][kHadamardMost];
  const int row = blockIdx.x * 4 + warp_id();
  if (row >= p.rows) return;
  float* values = rows[warp_id()];
  const void* x = row_of(p.x, row, p.x_pitch);
  void* y = row_of(p.y, row, p.y_pitch);
  for (int i = lane_id(); i < p.columns; i += 32) values[i] = load_element(x, i, p.element);
  hadamard_warp(values, p.columns, p.scale);
  for (int i = lane_id(); i < p.columns; i += 32) store_element(y, i, p.element, values[i]);
}

}  // namespace rewright
