// The gated activation between an expert's products.
#pragma once

#include "../common/vectors.cuh"
#include "swiglu.h"

namespace rewright {

// silu(min(gate, limit)) * clamp(up, -limit, limit), not yet rounded; NaN stays NaN.
DEVICE float swiglu_value(float gate, float up, float limit) {
  const float g = gate > limit ? limit : gate, above = up < -limit ? -limit : up;
  return g / (1.f + expf(-g)) * (above > limit ? limit : above);
}

// Columns 4 quad .. of a row of the op, not yet rounded.
DEVICE float4 swiglu_four(const SwigluParams& p, int row, int quad) {
  const float4 gate = load_four(row_of(p.gate, row, p.gate_pitch), quad, p.element);
  const float4 up = load_four(row_of(p.up, row, p.up_pitch), quad, p.element);
  float4 y = make_float4(swiglu_value(gate.x, up.x, p.limit), swiglu_value(gate.y, up.y, p.limit),
                         swiglu_value(gate.z, up.z, p.limit), swiglu_value(gate.w, up.w, p.limit));
  if (p.weights) {
    const float weight = ((const float*)row_of(p.weights, row / p.per, p.weights_pitch))[row % p.per];
    y = make_float4(y.x * weight, y.y * weight, y.z * weight, y.w * weight);
  }
  return y;
}

}  // namespace rewright
