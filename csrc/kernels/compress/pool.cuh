// Pooling of one entry: each channel is the mean of its window's rows, weighted by the channel's own softmax
// of the gate scores over tokens.
#pragma once

#include <cmath>

#include "../common/vectors.cuh"
#include "../state/state.cuh"
#include "compress.h"

namespace rewright {

DEVICE int valid_tokens(const PoolParams& p, int b) { return min(p.n_valid[b], p.tokens); }
DEVICE int first_entry(const PoolParams& p, int b) { return p.pos[b] / p.ratio; }
DEVICE int finished_entries(const PoolParams& p, int b) {
  return (p.pos[b] + valid_tokens(p, b)) / p.ratio - first_entry(p, b);
}

// Softmax-weighted sum of one channel so far: largest score, denominator, numerator.
struct Pooled {
  float most = -INFINITY, total = 0.f, sum = 0.f;
};
// exp(z - most), where scores that do not exist are -infinity.
DEVICE float pool_weight(float z, float most) { return z == -INFINITY ? 0.f : expf(z - most); }
// Adds N rows.
template <int N>
DEVICE void pool_rows(Pooled& to, const float (&z)[N], const float (&k)[N]) {
  float most = to.most;
  UNROLL for (int i = 0; i < N; ++i) most = fmaxf(most, z[i]);
  const float kept = pool_weight(to.most, most);
  to.total *= kept;
  to.sum *= kept;
  to.most = most;
  UNROLL for (int i = 0; i < N; ++i) {
    const float weight = pool_weight(z[i], most);
    to.total += weight;
    to.sum += weight * k[i];
  }
}
DEVICE void pool_merge(Pooled& to, const Pooled& other) {
  const float most = fmaxf(to.most, other.most);
  const float mine = pool_weight(to.most, most), theirs = pool_weight(other.most, most);
  to.total = to.total * mine + other.total * theirs;
  to.sum = to.sum * mine + other.sum * theirs;
  to.most = most;
}

// Rows first, first + step, .. of the window of `entry` for one pair of channels.
DEVICE void pool_pair(const PoolParams& p, int b, int entry, int pair, int first, int step, Pooled& low, Pooled& high) {
  constexpr int kRows = 8;  // on their way at once
  const int overlap = p.window - p.ratio, begin = entry * p.ratio - overlap, past = p.pos[b];
  const int oldest = (begin % p.ring + p.ring) % p.ring;  // (begin is negative for the first entry)
  const i64 ring = state_row(p.slots, p.ring, p.slot[b], 0), chunk = (i64)b * p.tokens - past;
  for (int start = first; start < p.window; start += kRows * step) {
    float zx[kRows], zy[kRows], kx[kRows], ky[kRows];
    UNROLL for (int i = 0; i < kRows; ++i) {
      const int r = start + i * step, position = begin + r;
      float2 z = make_float2(-INFINITY, -INFINITY), k = make_float2(0.f, 0.f);
      if (r < p.window && position >= 0) {  // nothing precedes entry 0
        const bool late = r >= overlap;     // the entry's own tokens: the last channels of a row
        const int at = pair + (late ? (p.width - p.channels) / 2 : 0);
        if (position < past) {
          const int turn = oldest + r;
          const i64 row = ring + (turn >= p.ring ? turn - p.ring : turn);
          z = ((const float2*)row_of(p.gate_ring, row, p.gate_ring_pitch))[at];
          k = ((const float2*)row_of(p.kv_ring, row, p.kv_ring_pitch))[at];
        } else {
          z = ((const float2*)row_of(p.gate, chunk + position, p.gate_pitch))[at];
          k = ((const float2*)row_of(p.kv, chunk + position, p.kv_pitch))[at];
          if (p.ape) {
            const float2 bias = load_pair(row_of(p.ape, late ? r - overlap : r, p.ape_pitch), at, p.ape_element);
            z = make_float2(z.x + bias.x, z.y + bias.y);
          }
        }
      }
      zx[i] = z.x, zy[i] = z.y, kx[i] = k.x, ky[i] = k.y;
    }
    pool_rows(low, zx, kx);
    pool_rows(high, zy, ky);
  }
}

// Pools an entry by the whole block: store(pair, value) is called with each pair of channels, pair i by thread
// i % blockDim.x. Where there are fewer pairs than threads, groups of threads share the window's rows out;
// their sums meet in `parts`, kPoolShared * blockDim.x floats of shared memory, group by group.
template <typename Store>
DEVICE void pool_entry(const PoolParams& p, int b, int entry, float* parts, Store store) {
  const int pairs = p.channels / 2, threads = blockDim.x, thread = threadIdx.x;
  const int groups = max(1, threads / pairs), across = groups > 1 ? pairs : threads;
  const int group = groups > 1 ? thread / across : 0;
  for (int pair = groups > 1 ? thread % across : thread; pair < pairs; pair += across) {
    Pooled low, high;
    if (group < groups) pool_pair(p, b, entry, pair, group, groups, low, high);
    if (groups == 1) {
      store(pair, make_float2(low.sum / low.total, high.sum / high.total));
      continue;
    }
    // (One turn of the loop: every thread comes here.)
    parts[thread] = low.most, parts[threads + thread] = low.total, parts[2 * threads + thread] = low.sum;
    parts[3 * threads + thread] = high.most, parts[4 * threads + thread] = high.total;
    parts[5 * threads + thread] = high.sum;
    __syncthreads();
    if (group == 0) {
      for (int g = 1; g < groups; ++g) {
        const int from = g * across + pair;
        Pooled other;
        other.most = parts[from], other.total = parts[threads + from], other.sum = parts[2 * threads + from];
        pool_merge(low, other);
        other.most = parts[3 * threads + from], other.total = parts[4 * threads + from];
        other.sum = parts[5 * threads + from];
        pool_merge(high, other);
      }
      store(pair, make_float2(low.sum / low.total, high.sum / high.total));
    }
    __syncthreads();
  }
}

}  // namespace rewright
