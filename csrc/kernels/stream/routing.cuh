// Choice of experts of a token, by a block; and the experts that the tokens of a step have chosen.
#pragma once

#include "stream.h"

#include "../common/numeric.cuh"

namespace rewright {

constexpr int kMostExperts = 384;

DEVICE float affinity_of(float logit) { return sqrtf(logit > 20.f ? logit : log1pf(expf(logit))); }
// Order of floats as order of integers; never 0.
DEVICE u32 ordered(float v) {
  const u32 u = __float_as_uint(v);
  return u & 0x80000000u ? ~u : u | 0x80000000u;
}

// By a block of kThreads: ids and weights of a token -> lanes 0 .. k-1 of warp 0. A masked token chooses
// nothing: id -1, weight 0.
template <int kThreads>
struct Choice {
  static constexpr int kEach = (kMostExperts + kThreads - 1) / kThreads;
  float logit[kEach], bias[kEach];  // of experts threadIdx.x + i * kThreads; by table: logit[0] of lane c's choice c
  int id;

  DEVICE void ask(const Routing& r, int row) {
    const float* logits = (const float*)((const char*)r.logits + row * r.logits_pitch);
    id = -1;
    if (r.kind == 2) {
      const int token = min(max(r.tokens[row], 0), r.vocabulary - 1), c = threadIdx.x;
      if (c < r.choices) {
        const i64 at = (i64)token * r.choices + c;
        id = r.table_i64 ? (int)((const i64*)r.table)[at] : ((const int*)r.table)[at];
        logit[0] = logits[id];
      }
      return;
    }
    UNROLL for (int i = 0; i < kEach; ++i) {
      const int e = threadIdx.x + i * kThreads;
      if (e < r.count) {
        logit[i] = logits[e];
        bias[i] = load_element(r.bias, e, r.bias_f32);
      }
    }
  }
  // `affinities` and `keys`: shared memory of kMostExperts each. Warp 0 returns with its result.
  DEVICE void finish(const Routing& r, bool masked, float* affinities, u32* keys, int& chosen, float& weight) {
    const int lane = lane_id();
    float mine = 0.f;
    if (r.kind == 2) {
      if ((int)threadIdx.x < r.choices) mine = affinity_of(logit[0]);
    } else {
      UNROLL for (int i = 0; i < kEach; ++i) {
        const int e = threadIdx.x + i * kThreads;
        if (e >= r.count) continue;
        affinities[e] = affinity_of(logit[i]);
        keys[e] = ordered(affinities[e] + bias[i]);
      }
      __syncthreads();
      if (warp_id() != 0) return;
#pragma unroll 1
      for (int c = 0; c < r.choices; ++c) {
        u32 best = 0;
        int at = 0;  // of equals the lower id
#pragma unroll 4
        for (int e = lane; e < r.count; e += 32) {
          const u32 key = keys[e];
          if (key > best) {
            best = key;
            at = e;
          }
        }
        const u32 most = warp_max_u32(best);
        const int winner = (int)~warp_max_u32(best == most ? ~(u32)at : 0u);
        if (lane == c) {
          id = winner;
          mine = affinities[winner];
        }
        if (lane == 0) keys[winner] = 0;
        __syncwarp();
      }
    }
    if (warp_id() != 0) return;
    float sum = 0.f;
    for (int c = 0; c < r.choices; ++c) sum += __shfl_sync(kAllLanes, mine, c);
    weight = masked ? 0.f : mine / sum * r.scale;
    chosen = masked ? -1 : id;
  }
};

// Experts of a step, each once, in the order of their first choice; and which choice of a token an expert is.
struct Chosen {
  int count;
  short expert[kMostPairs];
  signed char choice[kMostPairs][kMostTokens];  // -1: the token has not chosen it
};

// From ids [M,k] in shared memory, by one warp.
DEVICE void collect(Chosen& chosen, const int* ids, int tokens, int choices) {
  const int lane = lane_id(), pairs = tokens * choices;
  int count = 0;
  for (int base = 0; base < pairs; base += 32) {
    const int p = base + lane;
    bool is_first = p < pairs && ids[p] >= 0;
    for (int q = 0; is_first && q < p; ++q) is_first = ids[q] != ids[p];
    const u32 firsts = __ballot_sync(kAllLanes, is_first);
    if (is_first) chosen.expert[count + __popc(firsts & ((1u << lane) - 1))] = (short)ids[p];
    count += __popc(firsts);
  }
  __syncwarp();
  for (int e = 0; e < count; ++e) {
    if (lane < tokens) {
      int found = -1;
      for (int c = 0; c < choices; ++c) {
        if (ids[lane * choices + c] == chosen.expert[e]) found = c;
      }
      chosen.choice[e][lane] = (signed char)found;
    }
  }
  if (lane == 0) chosen.count = count;
  __syncwarp();
}

}  // namespace rewright
