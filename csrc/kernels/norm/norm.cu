// RMS norms, one op a launch.
//
// rms_norm: y = round(weight * (x * rsqrt(mean(x^2) + eps))), a block a row; bound by the latency of two
// reads of a row.
#include "norm.h"

#include "../common/numeric.cuh"

namespace rewright {

KERNEL(rms_norm, RmsNormParams, 256, 1) {
  __shared__ float scratch[33];
  const char* x = (const char*)p.x + blockIdx.x * p.x_pitch;
  char* y = (char*)p.y + blockIdx.x * p.y_pitch;
  float sum = 0.f;
  for (int i = threadIdx.x; i < p.columns; i += blockDim.x) {
    const float v = load_element(x, i, p.element);
    sum += v * v;
  }
  const float scale = rsqrtf(block_sum(sum, scratch) / (float)p.columns + p.eps);
  for (int i = threadIdx.x; i < p.columns; i += blockDim.x) {
    const float v = load_element(x, i, p.element);
    store_element(y, i, p.element, load_element(p.weight, i, p.weight_element) * (v * scale));
  }
}

}  // namespace rewright
