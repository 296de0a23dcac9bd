// What kernels that address states check of their operands, and where rows of states lie.
#pragma once

#include <algorithm>

#include "../runtime/kernel.h"

namespace rewright {

// pos, n_valid and slot are the step's own vectors: the program has checked what they hold.
inline void require_step_vector(const CallSite& site, const Tensor& tensor, const int32_t* vector) {
  site.require(tensor.data == vector, "pos, n_valid or slot is not that of the step");
}

// A tensor [B,T,c] of the step.
inline void require_tokens(const CallSite& site, const Tensor& tensor) {
  site.require(tensor && tensor.rank() == 3 && tensor.dim(0) == site.step->batch && tensor.dim(1) == site.step->tokens,
               "an operand is not [B,T,c]");
}

// A state [S,R,c] and its next value, which lies where it lies.
inline void require_state(const CallSite& site, const Tensor& state, const Tensor& next) {
  site.require(state && state.rank() == 3 && state.dim(0) > 0 && state.dim(1) > 0, "a state is not [S,R,c]");
  site.require(next.data == state.data && next.dtype == state.dtype && next.shape == state.shape && next.pitch == state.pitch,
               "a state and its next value lie apart");
}

// Row `index` of a slot of a state [S,R,c]. (A slot is clamped only where a plan keeps a "state" elsewhere
// than among its states.)
inline int64_t state_row(const Tensor& state, int64_t slot, int64_t index) {
  return std::min(slot, state.dim(0) - 1) * state.dim(1) + index;
}

// Row of a ring [S,R,c] that holds a position.
inline int64_t ring_row(const Tensor& ring, int64_t slot, int64_t position) {
  return state_row(ring, slot, position % ring.dim(1));
}

// First of n_valid tokens whose row a ring keeps.
inline int64_t first_kept(const Tensor& ring, int64_t n_valid) { return std::max<int64_t>(0, n_valid - ring.dim(1)); }

}  // namespace rewright
