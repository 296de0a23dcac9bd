// Attention of few queries over the window and the compressed entries: one vector is key and value.
//
// attention_split_D: what a part of the keys gives, on tensor cores, for heads of D = 128, 256 or 512. A
// block takes 16 heads of a token (the rows of one matrix instruction) and every key of its split, 32 keys
// a tile. Head norm and RoPE of the queries come first, while the first tile is under way. The tile
// [32][D] lies in shared memory once, its 16-byte chunks moved by the low bits of the key's number so that
// neither product meets a bank twice: read as it lies it is K^T, read transposed it is V. Each of 8 warps
// multiplies an eighth of the dims for the scores, which are added up over the warps in order; then each
// has two heads for the softmax; then each owns an eighth of the dims of the values. The maximum of a tile
// is known before its weights are rounded; of several tiles the sums are rescaled. The grid is
// [token][split][group of heads], fixed when the plan is loaded; how many keys there are is known on the
// card, whose tiles the splits share evenly, and splits without any end at once. Bound by latency: three
// dependent loads (position, list of entries, keys), two products, one store.
//
// attention_combine: the sum over splits with the sink in the denominator, inverse RoPE, one rounding each;
// a thread for four dims, a warp within one head, whose lane s holds the factor of split s. Bound by the
// latency of two loads.
//
// attention_any: the same from queries to result for any heads and f32 too, a block for a head of a token.
#include "attention.h"

#include "../common/numeric.cuh"
#include "../norm/head_norm.cuh"

namespace rewright {

namespace {

constexpr int kWarps = 8;

DEVICE float no_score() { return __uint_as_float(0xff800000u); }  // -inf

// The keys that a query sees, as places: its window, oldest first, and its entries.
struct Places {
  int batch, row, at, start, oldest, window, count, visible, slot;

  DEVICE Places(const AttentionParams& p, int b, int t) {
    batch = b;
    row = b * p.tokens + t;
    start = p.pos[b];
    at = start + t;
    slot = p.slot[b];
    oldest = max(0, at - p.window_keys + 1);
    window = at - oldest + 1;
    visible = p.compressed ? min((at + 1) / p.ratio, p.entries) : 0;
    count = window + (p.indices ? p.listed : visible);
  }

  // The key at a place, null where there is none.
  DEVICE const char* key(const AttentionParams& p, int place) const {
    if (place < window) {
      const int position = oldest + place;
      if (p.kv && position >= start) return (const char*)p.kv + ((i64)batch * p.tokens + position - start) * p.kv_pitch;
      return (const char*)p.window + ((i64)slot * p.window_keys + position % p.window_keys) * p.window_pitch;
    }
    if (place >= count) return nullptr;
    int entry = place - window;
    if (p.indices) entry = *(const int*)((const char*)p.indices + row * p.index_pitch + entry * 4ll);
    if (entry < 0 || entry >= visible) return nullptr;
    return (const char*)p.compressed + ((i64)slot * p.slot_entries + entry) * p.compressed_pitch;
  }
};

// Adjacent values turned by an angle; products and sum rounded one by one, as on a CPU.
DEVICE void turn(float& even, float& odd, float c, float s) {
  const float e = even, o = odd;
  even = __fadd_rn(__fmul_rn(e, c), -__fmul_rn(o, s));
  odd = __fadd_rn(__fmul_rn(e, s), __fmul_rn(o, c));
}

DEVICE const float* table_row(const AttentionParams& p, const float* table, i64 pitch, int position) {
  return (const float*)((const char*)table + min(position, p.table_rows - 1) * pitch);
}

// 8 dims of a query: norm by `scale`, then RoPE if they are among those that turn.
DEVICE uint4 prepared(uint4 raw, float scale, bool turned, float4 c, float4 s) {
  u32 words[4] = {raw.x, raw.y, raw.z, raw.w};
  const float cos[4] = {c.x, c.y, c.z, c.w}, sin[4] = {s.x, s.y, s.z, s.w};
  UNROLL for (int i = 0; i < 4; ++i) {
    float even = round_to_bf16(bf16_low(words[i]) * scale), odd = round_to_bf16(bf16_high(words[i]) * scale);
    if (turned) turn(even, odd, cos[i], sin[i]);
    words[i] = pack_bf16(even, odd);
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

// kStages: tiles in shared memory, 2 where a split may have several.
template <int D, int kStages>
DEVICE void attention_split(const AttentionParams& p) {
  constexpr int kChunks = D / 8;        // 16-byte chunks of a head or key
  constexpr int kOwn = kChunks / kWarps;  // of which one warp multiplies so many
  constexpr int kPerLane = kChunks < 32 ? 1 : kChunks / 32;
  constexpr int kPartRow = kKeysPerTile + 8;  // banks of eight rows of pairs differ
  DYNAMIC_SHARED(queries);                                // [16][kChunks]
  uint4* const tiles = queries + kHeadsPerBlock * kChunks;  // [stages][32][kChunks]
  __shared__ float2 parts[kWarps][kHeadsPerBlock][kPartRow / 2];
  __shared__ uint4 weights[kHeadsPerBlock][5];  // bf16 by head and key; 80 bytes a row
  __shared__ float corrections[kHeadsPerBlock];

  const int groups = (p.heads + kHeadsPerBlock - 1) / kHeadsPerBlock;
  const int group = blockIdx.x % groups, split = blockIdx.x / groups % p.splits, row = blockIdx.x / groups / p.splits;
  const int batch = row / p.tokens, token = row % p.tokens;
  const int lane = lane_id(), warp = warp_id(), head = group * kHeadsPerBlock + 2 * warp;

  // The queries depend on nothing: ask for them first.
  uint4 raw[2][kPerLane];
  UNROLL for (int i = 0; i < 2; ++i) {
    UNROLL for (int j = 0; j < kPerLane; ++j) {
      const int chunk = lane + 32 * j;
      raw[i][j] = make_uint4(0, 0, 0, 0);
      if (head + i < p.heads && chunk < kChunks) {
        raw[i][j] = *(const uint4*)((const char*)p.q + row * p.q_pitch + (head + i) * p.q_head + chunk * 16);
      }
    }
  }

  if (token >= p.n_valid[batch]) return;
  const Places places(p, batch, token);
  const int all = (places.count + kKeysPerTile - 1) / kKeysPerTile, share = (all + p.splits - 1) / p.splits;
  const int end = min(all, (split + 1) * share);
  int next = split * share;  // the tile to fetch

  // Keys of the next tile that has some, by lane; 0: there is none left.
  const auto find = [&](const char*& key) {
    for (; next < end; ++next) {
      key = places.key(p, next * kKeysPerTile + lane);
      const u32 present = __ballot_sync(kAllLanes, key != nullptr);
      if (present) {
        ++next;
        return present;
      }
    }
    return 0u;
  };
  // Four keys a warp.
  const auto fetch = [&](const char* key, uint4* tile) {
    UNROLL for (int i = 0; i < kKeysPerTile / kWarps * kChunks / 32; ++i) {
      const int at = i * 32 + lane, k = warp * (kKeysPerTile / kWarps) + at / kChunks, chunk = at % kChunks;
      const char* from = (const char*)__shfl_sync(kAllLanes, (u64)key, k);
      uint4* to = tile + k * kChunks + (chunk ^ (k & 7));
      if (from) copy_async(to, from + chunk * 16);
      else *to = make_uint4(0, 0, 0, 0);
    }
    copy_commit();
  };

  // Angles of the chunks that turn, the same for both heads of a warp.
  float4 cos[kPerLane], sin[kPerLane];
  bool turned[kPerLane];
  UNROLL for (int j = 0; j < kPerLane; ++j) {
    const int chunk = lane + 32 * j, pair = (chunk * 8 - (D - 2 * p.pairs)) / 2;
    cos[j] = sin[j] = make_float4(0.f, 0.f, 0.f, 0.f);
    turned[j] = p.cos && chunk < kChunks && chunk * 8 >= D - 2 * p.pairs;
    if (turned[j]) {
      cos[j] = *(const float4*)(table_row(p, p.cos, p.cos_pitch, places.at) + pair);
      sin[j] = *(const float4*)(table_row(p, p.sin, p.sin_pitch, places.at) + pair);
    }
  }

  float* const norms = p.norms + ((i64)row * p.splits + split) * p.heads * 2;
  const char* key = nullptr;
  u32 present = find(key);
  if (!present) {
    if (lane < 2 && head + lane < p.heads) {
      norms[2 * (head + lane)] = no_score();
      norms[2 * (head + lane) + 1] = 0.f;
    }
    return;
  }
  fetch(key, tiles);

  UNROLL for (int i = 0; i < 2; ++i) {
    float scale = 1.f;
    if (p.cos) {
      float sum = 0.f;
      UNROLL for (int j = 0; j < kPerLane; ++j) {
        const u32 words[4] = {raw[i][j].x, raw[i][j].y, raw[i][j].z, raw[i][j].w};
        UNROLL for (int w = 0; w < 4; ++w) {
          const float low = bf16_low(words[w]), high = bf16_high(words[w]);
          sum += head_square(low, kBf16) + head_square(high, kBf16);
        }
      }
      const bool beyond = beyond_vectors(token * p.heads + head + i, p.n_valid[batch] * p.heads);
      scale = head_scale(warp_sum(sum), D, p.eps, kBf16, beyond);
    }
    UNROLL for (int j = 0; j < kPerLane; ++j) {
      const int chunk = lane + 32 * j, h = 2 * warp + i;
      if (chunk >= kChunks) continue;
      queries[h * kChunks + (chunk ^ (h & 7))] = p.cos ? prepared(raw[i][j], scale, turned[j], cos[j], sin[j]) : raw[i][j];
    }
  }

  float top[2] = {no_score(), no_score()}, total[2] = {0.f, 0.f};  // of this warp's heads
  float values[kOwn][4];                                          // of this warp's dims
  UNROLL for (int n = 0; n < kOwn; ++n) {
    UNROLL for (int i = 0; i < 4; ++i) values[n][i] = 0.f;
  }
  const int g = lane >> 2, t = lane & 3, half = (lane >> 3) & 1, quarter = lane >> 4, eighth = lane & 7;
  for (int stage = 0; present; stage ^= kStages - 1) {
    const uint4* const tile = tiles + stage * kKeysPerTile * kChunks;
    copy_wait<0>();
    __syncthreads();
    const u32 mine = present;
    present = 0;
    if (kStages > 1) {
      present = find(key);
      if (present) fetch(key, tiles + (stage ^ 1) * kKeysPerTile * kChunks);
    }

    float scores[4][4];
    UNROLL for (int n = 0; n < 4; ++n) {
      UNROLL for (int i = 0; i < 4; ++i) scores[n][i] = 0.f;
    }
    UNROLL for (int k = 0; k < kOwn / 2; ++k) {
      const int chunk = warp * kOwn + 2 * k;
      const int h = eighth + 8 * half;
      u32 a[4];
      load_matrices(a, queries + h * kChunks + ((chunk + quarter) ^ eighth));
      UNROLL for (int n = 0; n < 2; ++n) {
        u32 b[4];
        load_matrices(b, tile + (n * 16 + eighth + 8 * quarter) * kChunks + ((chunk + half) ^ eighth));
        mma_bf16(scores[2 * n], a, b[0], b[1]);
        mma_bf16(scores[2 * n + 1], a, b[2], b[3]);
      }
    }
    UNROLL for (int n = 0; n < 4; ++n) {
      parts[warp][g][n * 4 + t] = make_float2(scores[n][0], scores[n][1]);
      parts[warp][g + 8][n * 4 + t] = make_float2(scores[n][2], scores[n][3]);
    }
    __syncthreads();

    UNROLL for (int i = 0; i < 2; ++i) {
      const int h = 2 * warp + i;
      float score = 0.f;
      UNROLL for (int w = 0; w < kWarps; ++w) score += ((const float*)parts[w][h])[lane];
      score = mine >> lane & 1 ? score * p.scale : no_score();
      const float higher = fmaxf(top[i], warp_max(score));
      const float weight = expf(score - higher), correction = expf(top[i] - higher);
      top[i] = higher;
      total[i] = total[i] * correction + warp_sum(weight);
      ((u16*)weights[h])[lane] = float_to_bf16(weight);
      if (lane == 0) corrections[h] = correction;
    }
    __syncthreads();

    if (kStages > 1) {
      const float low = corrections[g], high = corrections[g + 8];
      UNROLL for (int n = 0; n < kOwn; ++n) {
        values[n][0] *= low;
        values[n][1] *= low;
        values[n][2] *= high;
        values[n][3] *= high;
      }
    }
    UNROLL for (int k = 0; k < 2; ++k) {
      u32 a[4];
      load_matrices(a, &weights[eighth + 8 * half][2 * k + quarter]);
      UNROLL for (int n = 0; n < kOwn / 2; ++n) {
        u32 b[4];
        load_matrices_trans(b, tile + (k * 16 + eighth + 8 * half) * kChunks + ((warp * kOwn + 2 * n + quarter) ^ eighth));
        mma_bf16(values[2 * n], a, b[0], b[1]);
        mma_bf16(values[2 * n + 1], a, b[2], b[3]);
      }
    }
  }

  float* const partial = p.partial + ((i64)row * p.splits + split) * p.heads * D + warp * (D / kWarps) + 2 * t;
  const int low = group * kHeadsPerBlock + g, high = low + 8;
  UNROLL for (int n = 0; n < kOwn; ++n) {
    if (low < p.heads) *(float2*)(partial + low * D + n * 8) = make_float2(values[n][0], values[n][1]);
    if (high < p.heads) *(float2*)(partial + high * D + n * 8) = make_float2(values[n][2], values[n][3]);
  }
  if (lane < 2 && head + lane < p.heads) {
    *(float2*)(norms + 2 * (head + lane)) = lane ? make_float2(top[1], total[1]) : make_float2(top[0], total[0]);
  }
}

}  // namespace

KERNEL(attention_split_128, AttentionParams, 256, 2) { attention_split<128, 2>(p); }
KERNEL(attention_split_256, AttentionParams, 256, 2) { attention_split<256, 2>(p); }
KERNEL(attention_split_512, AttentionParams, 256, 2) { attention_split<512, 2>(p); }
KERNEL(attention_tile_128, AttentionParams, 256, 2) { attention_split<128, 1>(p); }
KERNEL(attention_tile_256, AttentionParams, 256, 2) { attention_split<256, 1>(p); }
KERNEL(attention_tile_512, AttentionParams, 256, 2) { attention_split<512, 1>(p); }

KERNEL(attention_combine, AttentionParams, 64, 1) {
  constexpr int kAtOnce = 8;  // splits whose values are under way
  const int all = p.heads * p.dim, blocks = (all + 255) / 256;
  const int row = blockIdx.x / blocks, flat = blockIdx.x % blocks * 256 + threadIdx.x * 4;
  const int batch = row / p.tokens, token = row % p.tokens;
  if (flat >= all) return;  // whole warps: a head has a multiple of 128 dims
  const int head = flat / p.dim, dim = flat % p.dim, lane = lane_id();
  float2 mine = make_float2(no_score(), 0.f);
  if (lane < p.splits) mine = *(const float2*)(p.norms + (((i64)row * p.splits + lane) * p.heads + head) * 2);
  const float* partial = p.partial + (i64)row * p.splits * all + flat;
  float4 loaded[kAtOnce];
  UNROLL for (int i = 0; i < kAtOnce; ++i) {
    if (i < p.splits) loaded[i] = *(const float4*)(partial + (i64)i * all);
  }
  const float sink = load_element(p.sink, head, p.sink_element);
  if (token >= p.n_valid[batch]) return;
  const int at = p.pos[batch] + token;
  const int pair = (dim - (p.dim - 2 * p.pairs)) / 2;
  float2 c = make_float2(1.f, 1.f), s = make_float2(0.f, 0.f);
  const bool turned = p.cos && dim >= p.dim - 2 * p.pairs;
  if (turned) {
    c = *(const float2*)(table_row(p, p.cos, p.cos_pitch, at) + pair);
    s = *(const float2*)(table_row(p, p.sin, p.sin_pitch, at) + pair);
  }

  const float top = warp_max(mine.x);
  const float factor = mine.y > 0.f ? expf(mine.x - top) : 0.f;
  const float denominator = warp_sum(factor * mine.y) + expf(sink - top);
  float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
  for (int first = 0; first < p.splits; first += kAtOnce) {
    if (first) {
      UNROLL for (int i = 0; i < kAtOnce; ++i) {
        if (first + i < p.splits) loaded[i] = *(const float4*)(partial + (i64)(first + i) * all);
      }
    }
    UNROLL for (int i = 0; i < kAtOnce; ++i) {
      const float f = __shfl_sync(kAllLanes, factor, (first + i) & 31);
      if (first + i >= p.splits || f == 0.f) continue;  // (a split without keys has left no values)
      sum.x += f * loaded[i].x;
      sum.y += f * loaded[i].y;
      sum.z += f * loaded[i].z;
      sum.w += f * loaded[i].w;
    }
  }
  float o[4] = {sum.x / denominator, sum.y / denominator, sum.z / denominator, sum.w / denominator};
  UNROLL for (int i = 0; i < 4; ++i) o[i] = round_to_bf16(o[i]);
  if (turned) {
    turn(o[0], o[1], c.x, -s.x);
    turn(o[2], o[3], c.y, -s.y);
  }
  const i64 place = (i64)row * p.heads + head;
  char* y = (char*)p.y + place / p.y_heads * p.y_pitch + (place % p.y_heads * p.dim + dim) * 2;
  *(uint2*)y = make_uint2(pack_bf16(o[0], o[1]), pack_bf16(o[2], o[3]));
}

KERNEL(attention_any, AttentionParams, 128, 1) {
  DYNAMIC_SHARED(dynamic);
  float* const q = (float*)dynamic;  // [dim]
  float* const o = q + p.dim;        // [dim]
  __shared__ const char* keys[128];
  __shared__ float weights[128], scratch[33], tops[4];
  const int row = blockIdx.x / p.heads, head = blockIdx.x % p.heads, me = threadIdx.x;
  const int batch = row / p.tokens, token = row % p.tokens, tail = p.dim - 2 * p.pairs;
  if (token >= p.n_valid[batch]) return;
  const Places places(p, batch, token);
  const char* from = (const char*)p.q + row * p.q_pitch + head * p.q_head;
  float sum = 0.f;
  for (int d = me; d < p.dim; d += 128) {
    q[d] = load_element(from, d, p.element);
    o[d] = 0.f;
    sum += head_square(q[d], p.element);
  }
  const bool beyond = beyond_vectors(token * p.heads + head, p.n_valid[batch] * p.heads);
  const float norm = p.cos ? head_scale(block_sum(sum, scratch), p.dim, p.eps, p.element, beyond) : 1.f;
  for (int d = me; d < p.dim; d += 128) q[d] = round_to(q[d] * norm, p.element);
  __syncthreads();
  const auto rotate = [&](float* x, float sign) {
    const float* cos = table_row(p, p.cos, p.cos_pitch, places.at);
    const float* sin = table_row(p, p.sin, p.sin_pitch, places.at);
    for (int i = me; i < p.pairs; i += 128) {
      float even = x[tail + 2 * i], odd = x[tail + 2 * i + 1];
      turn(even, odd, cos[i], sign * sin[i]);
      x[tail + 2 * i] = round_to(even, p.element);
      x[tail + 2 * i + 1] = round_to(odd, p.element);
    }
  };
  if (p.cos) rotate(q, 1.f);

  float top = no_score(), total = 0.f;
  for (int first = 0; first < places.count; first += 128) {
    __syncthreads();
    const char* key = places.key(p, first + me);
    float score = no_score();
    if (key) {
      score = 0.f;
      for (int d = 0; d < p.dim; ++d) score += q[d] * load_element(key, d, p.element);
      score *= p.scale;
    }
    const float highest = warp_max(score);
    if (lane_id() == 0) tops[warp_id()] = highest;
    __syncthreads();
    const float higher = fmaxf(fmaxf(fmaxf(tops[0], tops[1]), fmaxf(tops[2], tops[3])), top);
    if (higher == no_score()) continue;
    const float weight = key ? expf(score - higher) : 0.f, correction = expf(top - higher);
    keys[me] = key;
    weights[me] = round_to(weight, p.element);
    total = total * correction + block_sum(weight, scratch);
    top = higher;
    for (int d = me; d < p.dim; d += 128) {
      float value = o[d] * correction;
      for (int k = 0; k < 128; ++k) {
        if (keys[k]) value += weights[k] * load_element(keys[k], d, p.element);
      }
      o[d] = value;
    }
  }
  const float denominator = total + expf(load_element(p.sink, head, p.sink_element) - top);
  for (int d = me; d < p.dim; d += 128) o[d] = round_to(o[d] / denominator, p.element);
  __syncthreads();
  if (p.cos) rotate(o, -1.f);
  __syncthreads();
  const i64 place = (i64)row * p.heads + head;
  char* y = (char*)p.y + place / p.y_heads * p.y_pitch;
  for (int d = me; d < p.dim; d += 128) store_element(y, place % p.y_heads * p.dim + d, p.element, o[d]);
}

}  // namespace rewright
