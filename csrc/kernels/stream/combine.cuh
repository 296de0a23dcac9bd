// What lies behind the output projection of a sub-block: the next residual streams, and a block's part of
// the next mixing logits.
//
// A block's tiles are put aside in shared memory as they are done; when all are, every warp of the block
// takes part. What is read here lies there since long before the launch: it is fetched with the first
// weights, ahead of everything that waits.
#pragma once

#include "stream.h"

#include "../common/numeric.cuh"

namespace rewright {

// A block's memory for the tiles that it has; tile s of the block is number `first + s * step`.
struct Kept {
  float* y;              // [slots][tokens][16], rounded to bf16
  float* next;           // [slots][tokens][4][16] the streams behind
  const u16* before;     // [slots][tokens][4][16], or null: where they are
  const float* weights;  // [tokens][4 + 16] post and comb, with `before`
  const float* fn;       // [slots][logits][n][16], or null
  int slots, first, step;
};

// The memory at `shared`, of kept_bytes.
DEVICE Kept kept_in(const Combine& c, char* shared, int slots, int first, int step, int tokens) {
  Kept k;
  k.slots = slots;
  k.first = first;
  k.step = step;
  float* at = (float*)shared;
  k.y = at;
  k.next = at += c.slots * tokens * 16;
  at += c.slots * tokens * kStreamRow;
  k.before = (const u16*)at;
  at += c.slots * tokens * kStreamRow / 2;
  k.weights = at;
  k.fn = c.fetches_fn && c.fn ? at + (tokens * kKeptWeights + 3) / 4 * 4 : nullptr;
  if (c.before == nullptr) k.before = nullptr;
  return k;
}

// Starts the copies of what `combine` reads; the caller waits for them.
DEVICE void fetch_kept(const Combine& c, const Kept& k, int tokens) {
  const int n = c.streams;
  if (k.before) {
    for (int i = threadIdx.x; i < k.slots * tokens * n * 2; i += blockDim.x) {
      const int piece = i & 1, row = i / 2 % (tokens * n), slot = i / 2 / (tokens * n), m = row / n, j = row % n;
      const char* from = (const char*)c.before + (i64)row * c.before_pitch + (k.first + slot * k.step) * 32 + piece * 16;
      copy_async((char*)k.before + (((slot * tokens + m) * 4 + j) * 16 + piece * 8) * 2, from);
    }
    for (int i = threadIdx.x; i < tokens * (n + n * n); i += blockDim.x) {
      const int m = i / (n + n * n), w = i % (n + n * n), r = (w - n) / n, j = (w - n) % n;
      const void* from = w < n ? (const char*)c.post + m * c.post_pitch + w * 4 : (const char*)c.comb + (i64)(m * n + r) * c.comb_pitch + j * 4;
      copy_async_word((float*)k.weights + m * kKeptWeights + (w < n ? w : 4 + r * 4 + j), from);
    }
  }
  if (k.fn) {
    const int rows = c.logits * n;
    for (int i = threadIdx.x; i < k.slots * rows * 4; i += blockDim.x) {
      const int slot = i / (rows * 4), row = i / 4 % rows, piece = i & 3;
      copy_async((float*)k.fn + (slot * rows + row) * 16 + piece * 4, c.fn + (i64)row * c.dim + (k.first + slot * k.step) * 16 + piece * 4);
    }
  }
}

// Rows of a tile as fragments of C (row g and g+8, columns 2t and 2t+1 are tokens; of one token all columns
// are equal) -> y.
DEVICE void keep_tile(const Kept& k, int slot, const float (&sum)[4], int tokens) {
  const int g = lane_id() >> 2, t = lane_id() & 3;
  UNROLL for (int i = 0; i < 4; ++i) {
    const int m = 2 * t + (i & 1), row = g + (i >> 1) * 8;
    if (m < tokens) k.y[(slot * tokens + m) * 16 + row] = round_to_bf16(sum[i]);
  }
}

// X' = post y + comb X of all tiles of the block, and their part of the dot products with `fn` and of the
// sum of squares. Without streams before, at the start of a model, every stream is y. Called by the whole
// block, whose copies have arrived; `blocks` of the launch do so.
DEVICE void combine(const Combine& c, const Kept& k, int tokens, int blocks) {
  const int n = c.streams;
  __syncthreads();
  for (int i = threadIdx.x; i < k.slots * tokens * 16; i += blockDim.x) {
    const int r = i & 15, at = i >> 4, m = at % tokens, slot = at / tokens;
    const float value = k.y[i];
    const float* w = k.weights + m * kKeptWeights;
    float x[4];
    UNROLL for (int j = 0; j < 4; ++j) x[j] = j < n && k.before ? bf16_to_float(k.before[(at * 4 + j) * 16 + r]) : 0.f;
    UNROLL for (int j = 0; j < 4; ++j) {
      float next = 0.f;
      if (j < n) {
        float mixed = 0.f;
        UNROLL for (int s = 0; s < 4; ++s) {
          if (s < n && k.before) mixed += w[4 + s * 4 + j] * x[s];
        }
        const u16 rounded = float_to_bf16(k.before ? w[j] * value + mixed : value);
        ((u16*)((char*)c.after + (i64)(m * n + j) * c.after_pitch))[(k.first + slot * k.step) * 16 + r] = rounded;
        next = bf16_to_float(rounded);
      }
      k.next[(at * 4 + j) * 16 + r] = next;
    }
  }
  if (c.fn == nullptr) return;
  __syncthreads();

  // A warp has every so many logits; what it needs of `fn` is asked for at once.
  constexpr int kAtOnce = 2, kSlots = 1;  // logits of a warp, slots
  const int warps = blockDim.x >> 5, lane = lane_id();
  for (int first = warp_id(); first < kPartialColumns; first += kAtOnce * warps) {
    for (int m = 0; m < tokens; ++m) {
      float sum[kAtOnce] = {};
      for (int base = 0; base < k.slots; base += kSlots) {
        float f[kSlots][2][kAtOnce], x[kSlots][2];
        UNROLL for (int s = 0; s < kSlots; ++s) {
          UNROLL for (int h = 0; h < 2; ++h) {  // places of the streams' 64
            const int slot = base + s, place = lane + 32 * h, j = place >> 4, r = place & 15;
            x[s][h] = slot < k.slots ? k.next[(slot * tokens + m) * kStreamRow + place] : 0.f;
            UNROLL for (int i = 0; i < kAtOnce; ++i) {
              const int l = first + i * warps;
              f[s][h][i] = 0.f;
              if (slot >= k.slots || j >= n || l >= c.logits) continue;
              f[s][h][i] = k.fn ? k.fn[((slot * c.logits + l) * n + j) * 16 + r] : c.fn[((i64)l * n + j) * c.dim + (k.first + slot * k.step) * 16 + r];
            }
          }
        }
        UNROLL for (int s = 0; s < kSlots; ++s) {
          UNROLL for (int h = 0; h < 2; ++h) {
            UNROLL for (int i = 0; i < kAtOnce; ++i) sum[i] += (first + i * warps == kPartialColumns - 1 ? x[s][h] : f[s][h][i]) * x[s][h];
          }
        }
      }
      UNROLL for (int d = 16; d; d >>= 1) {
        UNROLL for (int i = 0; i < kAtOnce; ++i) sum[i] += __shfl_xor_sync(kAllLanes, sum[i], d);
      }
      UNROLL for (int i = 0; i < kAtOnce; ++i) {
        const int l = first + i * warps;
        if (l >= kPartialColumns || lane) continue;
        const float mine = l == kEpsColumn && blockIdx.x == 0 ? c.eps : sum[i];  // (the reader learns eps there)
        // (the parts of blocks that the launch has not are zero)
        for (int b = blockIdx.x; b < kPartialBlocks; b += blocks) c.partials[((i64)b * tokens + m) * kPartialColumns + l] = b == (int)blockIdx.x ? mine : 0.f;
      }
    }
  }
}

}  // namespace rewright
