// What lies behind the output projection of a sub-block: the next residual streams, and the part that a
// tile's rows have in the next mixing logits.
#pragma once

#include "stream.h"

#include "../common/numeric.cuh"

namespace rewright {

constexpr int kHalfLogits = 12;

// Rows 16 tile .. of y, as fragments of C (row g and g+8, columns 2t and 2t+1 are tokens; of one token all
// columns are equal), rounded to bf16 -> X' and, into dots[token][32], the tile's part of the dot products
// with `fn` and, at column 31, of the sum of squares. By one warp: lane = row, and half of the logits.
// Without streams before, at the start of a model, every stream is y. `ready` is the tile's part of `fn` in
// shared memory, or null.
DEVICE void combine_tile(const Combine& c, int tile, const float (&y)[4], int tokens, float* dots, const float* ready) {
  const int lane = lane_id(), r = lane & 15, half = lane >> 4, d = tile * 16 + r, n = c.streams;
  const int per_half = (c.logits + 1) / 2, first = half * per_half;
  // 0 where there is no such logit or stream; the address is legal all the same, so that no load waits for a
  // branch.
  const float* from = ready ? ready + r : c.fn + d;
  const i64 row = ready ? 16 : c.dim;
  const auto fn = [&](int i, int j) {
    const bool have = i < per_half && first + i < c.logits && j < n;
    return have ? from[(have ? (i64)(first + i) * n + j : 0) * row] : 0.f;
  };
  for (int m = 0; m < tokens; ++m) {
    const int owner = (r & 7) * 4 + (m >> 1);
    const float even_high = __shfl_sync(kAllLanes, y[2], owner), odd_high = __shfl_sync(kAllLanes, y[3], owner);
    const float even_low = __shfl_sync(kAllLanes, y[0], owner), odd_low = __shfl_sync(kAllLanes, y[1], owner);
    const float value = m & 1 ? (r < 8 ? odd_low : odd_high) : (r < 8 ? even_low : even_high);
    float x[4], squares = 0.f, next[4];
    UNROLL for (int i = 0; i < 4; ++i) {
      x[i] = i < n && c.before ? bf16_to_float(((const u16*)((const char*)c.before + (i64)(m * n + i) * c.before_pitch))[d]) : 0.f;
    }
    UNROLL for (int j = 0; j < 4; ++j) {
      next[j] = 0.f;
      if (j >= n) continue;
      const float post = c.before ? *(const float*)((const char*)c.post + m * c.post_pitch + j * 4) : 1.f;
      float mixed = 0.f;
      UNROLL for (int i = 0; i < 4; ++i) {
        if (i < n && c.before) mixed += *(const float*)((const char*)c.comb + (i64)(m * n + i) * c.comb_pitch + j * 4) * x[i];
      }
      const u16 rounded = float_to_bf16(post * value + mixed);
      if (half == 0) ((u16*)((char*)c.after + (i64)(m * n + j) * c.after_pitch))[d] = rounded;
      next[j] = bf16_to_float(rounded);
      squares += next[j] * next[j];
    }
    if (c.fn == nullptr) continue;
    float part[kHalfLogits];
    UNROLL for (int i = 0; i < kHalfLogits; ++i) {
      part[i] = 0.f;
      UNROLL for (int j = 0; j < 4; ++j) part[i] += fn(i, j) * next[j];
    }
    UNROLL for (int s = 8; s; s >>= 1) {
      UNROLL for (int i = 0; i < kHalfLogits; ++i) part[i] += __shfl_xor_sync(kAllLanes, part[i], s);
      squares += __shfl_xor_sync(kAllLanes, squares, s);
    }
    if (r == 0) {
      UNROLL for (int i = 0; i < kHalfLogits; ++i) {
        if (i < per_half && first + i < c.logits) dots[m * kPartialColumns + first + i] = part[i];
      }
      if (half == 0) dots[m * kPartialColumns + kPartialColumns - 1] = squares;
    }
  }
}

// Starts the copy of a tile's part of `fn`, f32[logits][n][16], to shared memory, by the lanes of `warps`
// warps of which this is number `warp`. (Asked for at the end, it would wait behind the other blocks' weights.)
DEVICE void fetch_fn(const Combine& c, int tile, float* to, int warp, int warps) {
  const int rows = c.logits * c.streams;
  for (int i = warp * 32 + lane_id(); i < rows * 4; i += warps * 32) {
    copy_async(to + i * 4, c.fn + (i64)(i >> 2) * c.dim + tile * 16 + (i & 3) * 4);
  }
}
constexpr int kFnFloats = 24 * 4 * 16;

// The tiles' parts in shared memory -> this block's part of the mixing logits. The groups of a block take
// every (groups * streamers)-th tile. Places of blocks that the launch has not are zero.
DEVICE void sum_dots(const Combine& c, const float* dots, int groups, int streamers, int tiles, int tokens) {
  __syncthreads();
  const int step = groups * streamers;
  for (int i = threadIdx.x; i < tokens * kPartialColumns; i += blockDim.x) {
    const int column = i % kPartialColumns;
    float total = 0.f;
    if (column < c.logits || column == kPartialColumns - 1) {
      for (int g = 0; g < groups; ++g) {
        for (int n = 0, tile = g * streamers + blockIdx.x; tile < tiles; ++n, tile += step) {
          total += dots[(g * kTilesPerGroup + n) * tokens * kPartialColumns + i];
        }
      }
    }
    for (int b = blockIdx.x; b < kPartialBlocks; b += streamers) {  // (column 30 tells the reader eps)
      if (column == kEpsColumn && b == 0) total = c.eps;
      c.partials[(i64)b * tokens * kPartialColumns + i] = b == (int)blockIdx.x ? total : 0.f;
    }
  }
}

}  // namespace rewright
