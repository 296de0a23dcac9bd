// Parameters of the kernels in norm.cu.
#pragma once

namespace rewright {

struct RmsNormParams {
  const void* x;       // [rows, columns], rows `x_pitch` bytes apart
  const void* weight;  // [columns]
  void* y;             // like x
  long long x_pitch, y_pitch;
  int columns, element, weight_element;  // Element
  float eps;
};

struct HeadRmsNormParams {
  const void* x;  // [rows, columns], a head a row
  void* y;        // like x
  long long x_pitch, y_pitch;
  const int* n_valid;
  int rows, columns, element;  // Element
  int heads, per_sequence;     // rows of a token, and of all tokens of a sequence
  float eps;
};

}  // namespace rewright
