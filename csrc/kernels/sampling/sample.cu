// The next token of each row, as csrc/runtime/sampler.cpp chooses it, and the inputs of the step that
// feeds it: a decode loop needs the host for nothing but reading tokens.
//
// sample: a block a row. It is bound by reading the logits with one multiprocessor: once for the largest
// (0.5 MB of 129,280 tokens), three times for a token of all, 24 times for one of the most likely.
//
// Weights are exp((logit - largest) / temperature) in fixed point, 2^45 being 1, so that sums do not depend
// on their order. Against sums of doubles a boundary between two tokens moves by at most 2^-45 for each
// token of the vocabulary: the host's sampler draws another token with a probability below 4e-9.
//
// A row that draws one of its stop tokens, or its last, masks itself (n_valid 0): steps that the host has
// launched beyond leave its state as it is.
#include "sample.h"

#include "../common/cuda.cuh"

namespace rewright {

constexpr int kThreads = 1024, kWarps = kThreads / 32;
constexpr double kOne = 35184372088832.0;  // 2^45
constexpr u32 kNaN = 0xffffffffu;          // beyond the order of every number

struct Scratch {
  u64 sums[kWarps][8];
  u64 totals[8];
  int found;
};

// A number that is larger for a larger logit; +0 and -0 have one.
DEVICE u32 order_of(float logit) {
  const u32 bits = __float_as_uint(logit + 0.f);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
DEVICE float logit_of(u32 order) { return __uint_as_float(order & 0x80000000u ? order & 0x7fffffffu : ~order); }

// Philox 4x32-10 as in csrc/runtime/sampler.cpp: uniform in [0, 1), 53 bits.
DEVICE double uniform(u64 seed, u64 draw) {
  u32 x0 = (u32)draw, x1 = (u32)(draw >> 32), x2 = 0, x3 = 0;
  u32 k0 = (u32)seed, k1 = (u32)(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const u64 a = (u64)0xD2511F53u * x0, b = (u64)0xCD9E8D57u * x2;
    x0 = (u32)(b >> 32) ^ x1 ^ k0;
    x1 = (u32)b;
    x2 = (u32)(a >> 32) ^ x3 ^ k1;
    x3 = (u32)a;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return (double)(((u64)x0 << 32 | x1) >> 11) * (1.0 / 9007199254740992.0);
}

// The larger of two keys (order of a logit, complement of its token): of equal logits the lower token, and
// a NaN before every number.
DEVICE u64 largest(const float* logits, int count, Scratch& s) {
  u64 best = 0;
  for (int i = threadIdx.x; i < count; i += kThreads) {
    const float v = logits[i];
    const u64 key = (u64)(v != v ? kNaN : order_of(v)) << 32 | (u32)~i;
    if (key > best) best = key;
  }
  UNROLL for (int d = 16; d; d >>= 1) {
    const u64 other = __shfl_xor_sync(kAllLanes, best, d);
    if (other > best) best = other;
  }
  if (lane_id() == 0) s.sums[warp_id()][0] = best;
  __syncthreads();
  for (int w = 0; w < kWarps; ++w) {
    if (s.sums[w][0] > best) best = s.sums[w][0];
  }
  __syncthreads();
  return best;
}

DEVICE u64 weight_of(float logit, float most, double temperature) {
  return (u64)(exp(((double)logit - (double)most) / temperature) * kOne + 0.5);
}

// Writes the weight of every token; returns their sum.
DEVICE u64 write_weights(u64* weights, const float* logits, int count, float most, double temperature, Scratch& s) {
  u64 sum = 0;
  for (int i = threadIdx.x; i < count; i += kThreads) {
    const u64 weight = weight_of(logits[i], most, temperature);
    weights[i] = weight;
    sum += weight;
  }
  sum = warp_sum(sum);
  if (lane_id() == 0) s.sums[warp_id()][0] = sum;
  __syncthreads();
  u64 total = 0;
  for (int w = 0; w < kWarps; ++w) total += s.sums[w][0];
  __syncthreads();
  return total;
}

// The lowest token at which the sum of `value` over it and those before exceeds `target`, which is less than
// the whole sum.
template <typename Value>
DEVICE int first_beyond(u64 target, int count, Scratch& s, Value value) {
  const int span = (count + kThreads - 1) / kThreads * 32;  // of a warp
  const int begin = warp_id() * span, end = begin + span < count ? begin + span : count;
  u64 mine = 0;
  for (int i = begin + lane_id(); i < end; i += 32) mine += value(i);
  mine = warp_sum(mine);
  if (lane_id() == 0) s.sums[warp_id()][0] = mine;
  __syncthreads();
  u64 before = 0;
  for (int w = 0; w < warp_id(); ++w) before += s.sums[w][0];
  if (before <= target && target < before + mine) {  // in one warp only
    for (int i = begin; i < end; i += 32) {
      u64 sum = i + lane_id() < end ? value(i + lane_id()) : 0;
      UNROLL for (int d = 1; d < 32; d <<= 1) {
        const u64 below = __shfl_up_sync(kAllLanes, sum, d);
        if (lane_id() >= d) sum += below;
      }
      const u32 beyond = __ballot_sync(kAllLanes, before + sum > target);
      if (beyond) {
        if (lane_id() == 0) s.found = i + __ffs(beyond) - 1;
        break;
      }
      before += __shfl_sync(kAllLanes, sum, 31);
    }
  }
  __syncthreads();
  return s.found;
}

// Where the sum of weights from the largest logit down exceeds a target.
struct Crossing {
  u32 order;   // of the logit at which it does
  u64 before;  // sum of all larger logits' weights
};

// Three bits of the order at a time, the highest first.
DEVICE Crossing crossing(u64 target, const u64* weights, const float* logits, int count, Scratch& s) {
  u32 prefix = 0;
  u64 before = 0;
  for (int shift = 30; shift >= 0; shift -= 3) {
    u64 sums[8] = {};
    for (int i = threadIdx.x; i < count; i += kThreads) {
      const u32 order = order_of(logits[i]);
      if (shift < 30 && order >> (shift + 3) != prefix) continue;
      const u32 digit = order >> shift & 7;
      const u64 weight = weights[i];
      UNROLL for (u32 d = 0; d < 8; ++d) sums[d] += digit == d ? weight : 0;
    }
    UNROLL for (int d = 0; d < 8; ++d) {
      const u64 sum = warp_sum(sums[d]);
      if (lane_id() == 0) s.sums[warp_id()][d] = sum;
    }
    __syncthreads();
    if (threadIdx.x < 8) {
      u64 total = 0;
      for (int w = 0; w < kWarps; ++w) total += s.sums[w][threadIdx.x];
      s.totals[threadIdx.x] = total;
    }
    __syncthreads();
    u32 digit = 7;
    while (digit > 0 && before + s.totals[digit] <= target) before += s.totals[digit--];
    prefix = prefix << 3 | digit;
    __syncthreads();
  }
  return {prefix, before};
}

// The part `share` of a sum, less than all of it.
DEVICE u64 part_of(double share, u64 whole) {
  const u64 part = (u64)(share * (double)whole);
  return part < whole ? part : whole - 1;
}

DEVICE int draw(const SampleRow& row, const float* logits, u64* weights, int count, float most, Scratch& s) {
  const double temperature = row.temperature, top_p = row.top_p, share = uniform(row.seed, row.draw);
  u64 total = write_weights(weights, logits, count, most, temperature, s);
  if (top_p >= 1) {
    return first_beyond(part_of(share, total), count, s, [&](int i) { return weights[i]; });
  }
  // The fewest of the most likely tokens that reach top_p: all above the crossing, and of the equal ones
  // there as many as it takes.
  const double wanted = top_p * (double)total;
  const u64 floor = part_of(top_p, total);
  const u64 short_of_it = floor && (double)floor == wanted ? floor - 1 : floor;  // sums beyond this reach it
  Crossing at = crossing(short_of_it, weights, logits, count, s);
  u64 weight = weight_of(logit_of(at.order), most, temperature);
  const u64 kept = at.before + ((short_of_it - at.before) / weight + 1) * weight;
  const u64 target = part_of(share, kept);
  at = crossing(target, weights, logits, count, s);
  weight = weight_of(logit_of(at.order), most, temperature);
  return first_beyond((target - at.before) / weight, count, s, [&](int i) { return (u64)(order_of(logits[i]) == at.order); });
}

KERNEL(sample, SampleParams, 1024, 1) {
  __shared__ Scratch s;
  const int at = blockIdx.x, count = p.vocabulary;
  if (p.n_valid[at] == 0) return;
  const float* logits = (const float*)((const char*)p.logits + at * p.pitch);
  SampleRow& row = p.rows[at];
  const u64 best = largest(logits, count, s);
  int token = (int)~(u32)best, code = token;
  const u32 order = (u32)(best >> 32);
  const float most = logit_of(order);
  if (order == kNaN) {
    code = kNaNFirst - token;
  } else if (most - most != 0.f) {  // infinite
    code = kNoneFinite;
  } else if (row.temperature != 0) {
    code = token = draw(row, logits, p.weights + (i64)at * count, count, most, s);
  }
  __syncthreads();  // everybody has read the row
  if (threadIdx.x) return;
  bool ends = code < 0 || --row.left <= 0;
  for (int i = 0; i < row.stops; ++i) ends |= token == row.stop[i];
  if (ends) {
    p.n_valid[at] = 0;
  } else {
    p.ids[at] = token;
    p.pos[at] += 1;
  }
  ++row.draw;
  store_volatile(p.ring + (i64)(row.step++ % (u32)p.ring_length) * p.ring_rows + at, code);
}

}  // namespace rewright
