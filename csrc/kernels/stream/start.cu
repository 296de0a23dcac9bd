// The residual streams of a step's tokens: rows of the embedding table, copied to every stream, and the parts
// of the first mixing logits. Grid: a block for eight tiles of 16 columns, a warp each. Bound by latency.
#include "start.h"

#include "combine.cuh"

namespace rewright {

KERNEL(start, StartParams, 256, 1) {
  __shared__ float dots[8 * kMostTokens * kPartialColumns];
  const int lane = lane_id(), g = lane >> 2, t = lane & 3, tiles = p.combine.dim / 16;
  const int tile = blockIdx.x * 8 + warp_id();
  if (tile < tiles) {
    float y[4];
    UNROLL for (int i = 0; i < 4; ++i) {
      const int m = 2 * t + (i & 1), d = tile * 16 + g + (i >> 1) * 8;
      y[i] = 0.f;
      if (m >= p.rows) continue;
      const int token = min(max(p.tokens[m], 0), p.vocabulary - 1);
      y[i] = bf16_to_float(((const u16*)((const char*)p.table + token * p.pitch))[d]);
    }
    combine_tile(p.combine, tile, y, p.rows, dots + warp_id() * p.rows * kPartialColumns, nullptr);
  }
  __syncthreads();
  const int warps = min(8, tiles - (int)blockIdx.x * 8);
  for (int i = threadIdx.x; i < p.rows * kPartialColumns; i += blockDim.x) {
    const int column = i % kPartialColumns;
    float total = 0.f;
    if (column < p.combine.logits || column == kPartialColumns - 1) {
      for (int w = 0; w < warps; ++w) total += dots[w * p.rows * kPartialColumns + i];
    }
    for (int b = blockIdx.x; b < kPartialBlocks; b += gridDim.x) {
      if (column == kEpsColumn && b == 0) total = p.combine.eps;
      p.combine.partials[(i64)b * p.rows * kPartialColumns + i] = b == (int)blockIdx.x ? total : 0.f;
    }
  }
}

}  // namespace rewright
