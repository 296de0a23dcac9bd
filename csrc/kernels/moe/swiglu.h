// Parameters of the kernel in swiglu.cu.
#pragma once

namespace rewright {

struct SwigluParams {
  const void *gate, *up;  // [rows, columns]
  const float* weights;   // [rows / per, per], a factor a row; null: none
  void* y;                // like gate
  long long gate_pitch, up_pitch, weights_pitch, y_pitch;
  int columns, per, element, parts;  // parts: blocks of a row
  float limit;
};

}  // namespace rewright
