// Mixing logits of Hyper-Connections.
//
// hc_mix: (fn . x) * rsqrt(mean(x^2) + eps) with x the flattened streams of a token; a block a token, every
// sum in a fixed order: a thread's columns, lanes of a warp, warps. Bound by fn, which every token reads from
// the L2 cache.
#include "../common/vectors.cuh"
#include "streams.h"

namespace rewright {

KERNEL(hc_mix, HcMixParams, 256, 1) {
  __shared__ float parts[8][kMostLogits + 1];  // of each warp: dots, and the sum of squares last
  const int row = blockIdx.x, quads = p.columns / 4;
  float dots[kMostLogits], squares = 0.f;
  UNROLL for (int m = 0; m < kMostLogits; ++m) dots[m] = 0.f;
  for (int j = 0; j < p.streams; ++j) {
    const void* x = row_of(p.x, (i64)row * p.streams + j, p.x_pitch);
    for (int quad = threadIdx.x; quad < quads; quad += 256) {
      const float4 v = load_four(x, quad, p.element);
      squares += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
      UNROLL for (int m = 0; m < kMostLogits; ++m) {
        if (m >= p.logits) break;
        const float4 w = load_four(row_of(p.fn, m, p.fn_pitch), j * quads + quad, p.fn_element);
        dots[m] += v.x * w.x + v.y * w.y + v.z * w.z + v.w * w.w;
      }
    }
  }
  UNROLL for (int m = 0; m < kMostLogits; ++m) {
    const float dot = warp_sum(dots[m]);
    if (lane_id() == 0) parts[warp_id()][m] = dot;
  }
  squares = warp_sum(squares);
  if (lane_id() == 0) parts[warp_id()][kMostLogits] = squares;
  __syncthreads();
  const int m = threadIdx.x;
  if (m >= p.logits) return;
  float dot = 0.f, sum = 0.f;
  for (int w = 0; w < 8; ++w) {
    dot += parts[w][m];
    sum += parts[w][kMostLogits];
  }
  const float count = (float)p.streams * (float)p.columns;
  ((float*)row_of(p.y, row, p.y_pitch))[m] = dot * rsqrtf(sum / count + p.eps);
}

}  // namespace rewright
