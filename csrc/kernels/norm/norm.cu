// RMS norms, one op a launch.
//
// rms_norm: y = round(weight * (x * rsqrt(mean(x^2) + eps))), a block a row; bound by the latency of two
// reads of a row. head_rms_norm: the same without a weight, a warp a head, 8 heads a block; bound by memory.
#include "norm.cuh"

namespace rewright {

KERNEL(rms_norm, RmsNormParams, 256, 1) {
  __shared__ float scratch[33];
  rms_norm_row(p, blockIdx.x, scratch);
}

KERNEL(head_rms_norm, HeadRmsNormParams, 256, 1) {
  const int row = blockIdx.x * 8 + warp_id();
  if (row < p.rows) head_rms_norm_row(p, row);
}

}  // namespace rewright
