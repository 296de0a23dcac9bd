// Choice of experts of a token, by one warp; and the experts that the tokens of a step have chosen.
#pragma once

#include "stream.h"

#include "../common/numeric.cuh"

namespace rewright {

constexpr int kExpertsPerLane = 12;  // 384 experts

DEVICE float affinity_of(float logit) { return sqrtf(logit > 20.f ? logit : log1pf(expf(logit))); }
// Order of floats as order of integers; never 0.
DEVICE u32 ordered(float v) {
  const u32 u = __float_as_uint(v);
  return u & 0x80000000u ? ~u : u | 0x80000000u;
}

// By one warp: ids and weights of a token -> lanes 0 .. k-1. A masked token chooses nothing: id -1, weight 0.
struct Choice {
  float logit[kExpertsPerLane], bias[kExpertsPerLane];
  int id;

  DEVICE void ask(const Routing& r, int row) {
    const int lane = lane_id();
    const float* logits = (const float*)((const char*)r.logits + row * r.logits_pitch);
    id = -1;
    if (r.kind == 2) {
      const int token = min(max(r.tokens[row], 0), r.vocabulary - 1);
      if (lane < r.choices) {
        const i64 at = (i64)token * r.choices + lane;
        id = r.table_i64 ? (int)((const i64*)r.table)[at] : ((const int*)r.table)[at];
        logit[0] = logits[id];
      }
      return;
    }
    UNROLL for (int i = 0; i < kExpertsPerLane; ++i) {
      const int e = lane + 32 * i;
      if (e < r.count) {
        logit[i] = logits[e];
        bias[i] = load_element(r.bias, e, r.bias_f32);
      }
    }
  }
  DEVICE void finish(const Routing& r, bool masked, int& chosen, float& weight) {
    const int lane = lane_id();
    float mine = 0.f;
    if (r.kind == 2) {
      if (lane < r.choices) mine = affinity_of(logit[0]);
    } else {
      u32 key[kExpertsPerLane];
      UNROLL for (int i = 0; i < kExpertsPerLane; ++i) {
        key[i] = 0;
        if (lane + 32 * i < r.count) {
          logit[i] = affinity_of(logit[i]);
          key[i] = ordered(logit[i] + bias[i]);
        }
      }
#pragma unroll 1
      for (int c = 0; c < r.choices; ++c) {
        u32 best = 0;
        UNROLL for (int i = 0; i < kExpertsPerLane; ++i) best = max(best, key[i]);
        best = warp_max_u32(best);
        u32 first = 0;  // the lower id among equals: the largest complement
        UNROLL for (int i = 0; i < kExpertsPerLane; ++i) {
          if (key[i] == best) first = max(first, ~(u32)(lane + 32 * i));
        }
        const int winner = (int)~warp_max_u32(first);
        float a = 0.f;
        UNROLL for (int i = 0; i < kExpertsPerLane; ++i) {
          if (winner == lane + 32 * i) {
            a = logit[i];
            key[i] = 0;
          }
        }
        a = __shfl_sync(kAllLanes, a, winner & 31);
        if (lane == c) {
          id = winner;
          mine = a;
        }
      }
    }
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
