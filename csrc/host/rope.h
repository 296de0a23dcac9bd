// Rotary position embedding and Hadamard rotation of fp32 rows, for the kernels that have them inside.
#pragma once

#include "../runtime/kernel.h"

namespace rewright {

// Turns pairs (x[2i], x[2i+1]) of the last 2 * pairs elements of a row by the angles of a position, back
// where `inverse`. Products are rounded before they are added.
void rope_row(float* row_tail, const float* cos, const float* sin, int64_t pairs, bool inverse);

// Orthonormal Walsh-Hadamard transform of x[count] in natural order; count is a power of two.
void hadamard_row(float* x, int64_t count);

bool is_power_of_two(int64_t count);

// The tables f32[N,R] of cosines and sines by position.
class RopeTables {
 public:
  // Throws PlanError for tables that do not fit rows of `columns` elements.
  RopeTables(const CallSite& site, const Tensor& cos, const Tensor& sin, int64_t columns);

  int64_t pairs() const { return cos_.cols(); }
  // Positions past the table read its last row.
  const float* cos(int64_t position) const { return cos_.row<float>(clamped(position)); }
  const float* sin(int64_t position) const { return sin_.row<float>(clamped(position)); }
  // Turns a row of `columns` elements at a position.
  void turn(float* row, int64_t columns, int64_t position, bool inverse = false) const {
    rope_row(row + columns - 2 * pairs(), cos(position), sin(position), pairs(), inverse);
  }

 private:
  int64_t clamped(int64_t position) const;

  Tensor cos_, sin_;
};

}  // namespace rewright
