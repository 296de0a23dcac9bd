// Parameters of the kernels in rope.cu.
#pragma once

namespace rewright {

// Cosines and sines f32[positions, pairs] by position.
struct RopeTable {
  const float *cos, *sin;
  long long cos_pitch, sin_pitch;
  int positions, pairs;
};

struct RopeParams {
  const void* x;  // [B, tokens, inner, columns]
  void* y;        // like x
  RopeTable table;
  const int* pos;  // [B]
  long long x_pitch, y_pitch, stride;
  int rows, tokens, inner, columns, element, inverse;
};

struct HadamardParams {
  const void* x;  // [rows, columns], columns a power of two
  void* y;        // like x
  long long x_pitch, y_pitch;
  int rows, columns, element;
  float scale;  // columns^(-1/2)
};

}  // namespace rewright
