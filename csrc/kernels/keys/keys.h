// Parameters of the kernels in keys.cu, and what rows of keys and compressed entries go through.
#pragma once

#include "../rope/rope.h"

namespace rewright {

// Elements of a row at most, and the floats of shared memory that its form takes: the row, 33 for sums.
constexpr int kMostRow = 512;
constexpr int kRowShared = kMostRow + 36;

// Norm, RoPE, Hadamard rotation and rounding of a row, each rounded to `element` as if it had been stored.
struct RowForm {
  const void* weight;  // of the norm
  RopeTable table;
  int columns, element, weight_element, y_element;  // y_element: of the result
  int rotate;                                       // whether the row is Hadamard-rotated
  int format, block, start, stop;                   // CodeFormat, and the columns that are rounded to it
  float eps, rotation_scale;                        // rotation_scale: columns^(-1/2)
};

struct KvParams {
  const void* x;  // [B, tokens, columns]
  void* y;        // kv_rows: like x; kv_write: the window [slots, window, columns]
  RowForm form;
  const int *pos, *n_valid, *slot;
  long long x_pitch, y_pitch;
  int tokens, slots, window;
};

}  // namespace rewright
