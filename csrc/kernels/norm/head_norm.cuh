// The norm of a head as the reference computes it: a chain of bf16 operations on bf16 values.
//
// Square, mean, + eps (itself rounded), rsqrt and product each round. The reference's rsqrt rounds once in its
// vector loop over the heads of a sequence's tokens and, for the heads that fill no whole vector, twice: the
// root, then its inverse. docs/numerics.md tells why that is kept; csrc/host/norm.h has the same in C++.
#pragma once

#include "../common/numeric.cuh"

namespace rewright {

constexpr int kHeadNormLanes = 32;  // heads of a step of the reference's vector loop

// Whether head `place` of the `count` heads of all tokens of a sequence fills no whole vector.
DEVICE bool beyond_vectors(int place, int count) { return place >= count / kHeadNormLanes * kHeadNormLanes; }

// A term of the sum of squares.
DEVICE float head_square(float v, int element) { return round_to(v * v, element); }

// The factor of a head whose squares' sum is given.
DEVICE float head_scale(float sum, int columns, float eps, int element, bool beyond) {
  if (element == kF32) return 1.f / sqrtf(sum / (float)columns + eps);
  const float mean = round_to_bf16(sum / (float)columns);
  float root = sqrtf(round_to_bf16(mean + round_to_bf16(eps)));
  if (beyond) root = round_to_bf16(root);
  return round_to_bf16(1.f / root);
}

}  // namespace rewright
