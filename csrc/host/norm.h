// Normalisation of fp32 rows, for the kernels that have one inside.
#pragma once

#include <vector>

#include "../runtime/kernel.h"

namespace rewright {

// x[count] -> weight * (x * rsqrt(mean(x^2) + eps)), in place and not yet rounded.
void rms_norm_row(float* x, int64_t count, const float* weight, float eps);

// Heads that the reference normalises in one step of its vector loop.
constexpr int64_t kHeadNormLanes = 32;

// One head x[count] -> x * rsqrt(mean(x^2) + eps), in place, rounded to `dtype`, which x is of.
//
// On bf16 the reference is a chain of bf16 operations, each of which rounds: square, mean, + eps (itself
// rounded), rsqrt, product. Its rsqrt rounds once in its vector loop and, in the scalar loop over the heads
// that fill no whole vector, twice: the root, then its inverse. `tail` says that this head is one of those:
// head i of the count heads of all tokens of one sequence is if i >= count / kHeadNormLanes * kHeadNormLanes.
// docs/numerics.md tells why that is kept.
void head_norm_row(float* x, int64_t count, float eps, DType dtype, bool tail);

// A norm's weight as fp32, read when the plan is loaded.
class NormWeight {
 public:
  NormWeight(const CallSite& site, const Tensor& weight, int64_t count);
  const float* data() const { return values_.data(); }

 private:
  std::vector<float> values_;
};

}  // namespace rewright
