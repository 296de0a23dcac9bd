// swiglu: silu(gate) * up with both clamped, times the routing weight where there is one; fp32, rounded once.
// Four columns a thread, 1024 a block; bound by memory.
#include "swiglu.cuh"

namespace rewright {

KERNEL(swiglu, SwigluParams, 256, 1) {
  const int row = blockIdx.x / p.parts, quad = blockIdx.x % p.parts * 256 + threadIdx.x;
  if (quad < p.columns / 4) store_four(row_of(p.y, row, p.y_pitch), quad, p.element, swiglu_four(p, row, quad));
}

}  // namespace rewright
