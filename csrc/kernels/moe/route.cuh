// Choice of the experts of one token, by one warp.
#pragma once

#include "../common/vectors.cuh"
#include "route.h"

namespace rewright {

// sqrt(softplus(logit)); from 20 on softplus is the logit itself, as the reference has it.
DEVICE float affinity_of(float logit) { return sqrtf(logit > 20.f ? logit : log1pf(expf(logit))); }

// Larger floats have larger keys, NaN the largest; no key is 0.
DEVICE u32 order_key(float v) {
  const u32 u = __float_as_uint(v);
  if ((u & 0x7fffffffu) > 0x7f800000u) return 0xffffffffu;
  return u & 0x80000000u ? ~u : u | 0x80000000u;
}

// Lane j < k: the j-th choice and its weight; id -1 and weight 0 for the others, and for masked tokens.
struct Choice {
  int id;
  float weight;
};

// The k largest of affinity + bias, equal ones by ascending id. Lane l holds the experts l * per .. of which it
// offers the best one, so that the first lane with the largest key has the lowest id.
DEVICE Choice route_by_score(const float* logits, const void* bias, int bias_element, int experts, int k, float scale) {
  constexpr int kHeld = kMostExperts / 32;
  const int lane = lane_id(), per = (experts + 31) / 32, first = lane * per;
  float affinity[kHeld];
  u32 keys[kHeld];  // 0: chosen before, or no expert
  UNROLL for (int i = 0; i < kHeld; ++i) {
    const int id = first + i;
    const bool there = i < per && id < experts;
    affinity[i] = there ? affinity_of(logits[id]) : 0.f;
    keys[i] = there ? order_key(affinity[i] + load_element(bias, id, bias_element)) : 0u;
  }
  Choice mine = {-1, 0.f};
  float sum = 0.f;
  for (int j = 0; j < k; ++j) {
    u32 best = 0;
    int at = 0;
    float value = 0.f;
    UNROLL for (int i = 0; i < kHeld; ++i) {
      if (keys[i] > best) {
        best = keys[i];
        at = i;
        value = affinity[i];
      }
    }
    const u32 most = warp_max_u32(best);
    const int owner = __ffs(__ballot_sync(kAllLanes, best == most)) - 1;
    if (lane == owner) {
      UNROLL for (int i = 0; i < kHeld; ++i) {
        if (i == at) keys[i] = 0;
      }
    }
    const int id = __shfl_sync(kAllLanes, first + at, owner);
    value = __shfl_sync(kAllLanes, value, owner);
    sum += value;
    if (lane == j) mine = {id, value};
  }
  if (lane < k) mine.weight = mine.weight / sum * scale;
  return mine;
}

// The experts that row `row` of a table of ids names, i64 or i32.
DEVICE Choice route_by_table(const float* logits, const void* row, bool wide, int experts, int k, float scale) {
  const int lane = lane_id();
  Choice mine = {-1, 0.f};
  if (lane < k) {
    const i64 id = wide ? ((const i64*)row)[lane] : (i64)((const int*)row)[lane];
    mine.id = (int)max((i64)0, min(id, (i64)experts - 1));
    mine.weight = affinity_of(logits[mine.id]);
  }
  float sum = 0.f;
  for (int j = 0; j < k; ++j) sum += __shfl_sync(kAllLanes, mine.weight, j);
  if (lane < k) mine.weight = mine.weight / sum * scale;
  return mine;
}

// Row r = b * tokens + t of the op, whose logits[experts] may lie in any memory.
DEVICE Choice route_token(const RouteParams& p, int row, const float* logits) {
  const int b = row / p.tokens, t = row % p.tokens;
  if (t >= p.n_valid[b]) return {-1, 0.f};
  if (p.bias) return route_by_score(logits, p.bias, p.bias_element, p.experts, p.k, p.scale);
  const int id = ((const int*)row_of(p.ids, b, p.ids_pitch))[t];
  const void* named = row_of(p.table, max(0, min(id, p.vocabulary - 1)), p.table_pitch);
  return route_by_table(logits, named, p.wide_ids, p.experts, p.k, p.scale);
}

// The same, stored.
DEVICE void route_row(const RouteParams& p, int row) {
  const Choice choice = route_token(p, row, (const float*)row_of(p.logits, row, p.logits_pitch));
  if (lane_id() >= p.k) return;
  ((int*)row_of(p.chosen, row, p.chosen_pitch))[lane_id()] = choice.id;
  ((float*)row_of(p.weights, row, p.weights_pitch))[lane_id()] = choice.weight;
}

}  // namespace rewright
