// Attention of few queries over the window and the compressed entries: one vector is key and value.
//
// attention_split_D: the scores, on tensor cores, for heads of D = 128, 256 or 512. A block takes 16 heads of
// a token (the rows of one matrix instruction) and every key of its split, 32 keys a tile. Head norm and
// RoPE of the queries come first, while the first tile is under way. A tile's 16-byte chunks are moved by
// the low bits of the key's number, so that no read meets a bank twice. Each of 8 warps multiplies an eighth
// of the dims, added up over the warps in order; then each has two heads, whose scores and largest score of
// the tile go to memory. The grid is [token][split][group of heads], fixed when the plan is loaded; how many
// keys there are is known on the card, whose tiles the splits share evenly.
//
// attention_combine: the rest, for 64 dims of 16 heads of a token a block. The largest score of all keys is
// known before a weight is rounded to bf16, as in the op's reference. 128 keys at a time, of which a warp
// gives two heads their weights and multiplies eight dims; then the sink in the denominator, inverse RoPE,
// one rounding each. The grid is [token][group of heads][64 dims].
//
// Both are bound by latency: positions, list of entries, keys, one after the other.
//
// attention_any: the same from queries to result for any heads and f32 too, a block for a head of a token.
#include "attention.h"

#include "../common/order.cuh"

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

  const i64 first_tile = ((i64)row * groups + group) * p.tiles;
  // Keys of the next tile that has some, by lane; 0: there is none left. Tiles without are said to have none.
  const auto find = [&](const char*& key, int& number) {
    for (; next < end; ++next) {
      key = places.key(p, next * kKeysPerTile + lane);
      const u32 present = __ballot_sync(kAllLanes, key != nullptr);
      if (present) {
        number = next++;
        return present;
      }
      if (warp == 0 && lane < kHeadsPerBlock) p.tops[(first_tile + next) * kHeadsPerBlock + lane] = no_score();
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

  const char* key = nullptr;
  int tile_of = 0;  // number of the tile that is found
  u32 present = find(key, tile_of);
  if (!present) return;
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

  const int g = lane >> 2, t = lane & 3, half = (lane >> 3) & 1, quarter = lane >> 4, eighth = lane & 7;
  for (int stage = 0; present; stage ^= kStages - 1) {
    const uint4* const tile = tiles + stage * kKeysPerTile * kChunks;
    copy_wait<0>();
    __syncthreads();
    const u32 mine = present;
    const i64 number = first_tile + tile_of;
    present = 0;
    if (kStages > 1) {
      present = find(key, tile_of);
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
      p.scores[(number * kHeadsPerBlock + h) * kKeysPerTile + lane] = score;
      const float top = warp_max(score);
      if (lane == 0) p.tops[number * kHeadsPerBlock + h] = top;
    }
    __syncthreads();
  }
}

}  // namespace

KERNEL(attention_split_128, AttentionParams, 256, 2) {
  attention_split<128, 2>(p);
  end_block(p.order);
}
KERNEL(attention_split_256, AttentionParams, 256, 2) {
  attention_split<256, 2>(p);
  end_block(p.order);
}
KERNEL(attention_split_512, AttentionParams, 256, 2) {
  attention_split<512, 2>(p);
  end_block(p.order);
}
KERNEL(attention_tile_128, AttentionParams, 256, 2) {
  attention_split<128, 1>(p);
  end_block(p.order);
}
KERNEL(attention_tile_256, AttentionParams, 256, 2) {
  attention_split<256, 1>(p);
  end_block(p.order);
}
KERNEL(attention_tile_512, AttentionParams, 256, 2) {
  attention_split<512, 1>(p);
  end_block(p.order);
}

DEVICE void combine_heads(const AttentionParams& p) {
  constexpr int kKeys = 128, kTiles = kKeys / kKeysPerTile, kPieces = kDimsPerBlock / 8;  // of 16 bytes
  __shared__ uint4 values[2][kKeys][kPieces];
  __shared__ uint4 weights[kHeadsPerBlock][kKeys / 8 + 1];  // bf16 by head and key; banks of eight rows differ
  __shared__ float denominators[kHeadsPerBlock];
  const int slices = p.dim / kDimsPerBlock, groups = (p.heads + kHeadsPerBlock - 1) / kHeadsPerBlock;
  const int slice = blockIdx.x % slices, group = blockIdx.x / slices % groups, row = blockIdx.x / slices / groups;
  const int batch = row / p.tokens, token = row % p.tokens;
  const int lane = lane_id(), warp = warp_id(), g = lane >> 2, t = lane & 3, half = (lane >> 3) & 1, quarter = lane >> 4;
  const bool valid = token < p.n_valid[batch];
  const Places places(p, batch, token);
  const int tiles = (places.count + kKeysPerTile - 1) / kKeysPerTile;
  const i64 first_tile = ((i64)row * groups + group) * p.tiles;

  // Sixteen keys a warp.
  const auto fetch = [&](int first, uint4 (*to)[kPieces]) {
    const char* key = places.key(p, first + warp * 16 + (lane & 15));
    UNROLL for (int i = 0; i < 16 * kPieces / 32; ++i) {
      const int at = i * 32 + lane, k = at / kPieces, piece = at % kPieces;
      const char* from = (const char*)__shfl_sync(kAllLanes, (u64)key, k);
      uint4* place = &to[warp * 16 + k][piece ^ (k & 7)];
      if (from) copy_async(place, from + (slice * kPieces + piece) * 16);
      else *place = make_uint4(0, 0, 0, 0);
    }
    copy_commit();
  };
  if (valid) fetch(0, values[0]);
  if (p.order.before) await(p.order.before, p.order.blocks);  // (keys were there before the scores)
  if (!valid) return;

  // Scores of this warp's heads are asked for a round ahead, and with them whether their tile has any.
  float score[2][kTiles], most[2][kTiles];
  const auto ask = [&](int first) {
    UNROLL for (int i = 0; i < 2; ++i) {
      UNROLL for (int n = 0; n < kTiles; ++n) {
        const i64 tile = first_tile + min(first / kKeysPerTile + n, tiles - 1);
        score[i][n] = p.scores[(tile * kHeadsPerBlock + 2 * warp + i) * kKeysPerTile + lane];
        most[i][n] = first / kKeysPerTile + n < tiles ? p.tops[tile * kHeadsPerBlock + 2 * warp + i] : no_score();
      }
    }
  };
  ask(0);
  float top[2], total[2] = {0.f, 0.f};  // of this warp's heads
  UNROLL for (int i = 0; i < 2; ++i) {
    top[i] = no_score();
    for (int n = lane; n < tiles; n += 32) top[i] = fmaxf(top[i], p.tops[(first_tile + n) * kHeadsPerBlock + 2 * warp + i]);
    top[i] = warp_max(top[i]);
  }
  float sum[4] = {0.f, 0.f, 0.f, 0.f};
  for (int first = 0, stage = 0; first < places.count; first += kKeys, stage ^= 1) {
    if (first + kKeys < places.count) fetch(first + kKeys, values[stage ^ 1]);
    else copy_commit();
    UNROLL for (int i = 0; i < 2; ++i) {
      UNROLL for (int n = 0; n < kTiles; ++n) {
        // (the one key that always is there gives a top)
        const float weight = most[i][n] > no_score() ? expf(score[i][n] - top[i]) : 0.f;
        total[i] += weight;
        ((u16*)weights[2 * warp + i])[n * kKeysPerTile + lane] = float_to_bf16(weight);
      }
    }
    if (first + kKeys < places.count) ask(first + kKeys);
    copy_wait<1>();
    __syncthreads();
    UNROLL for (int k = 0; k < kTiles; ++k) {
      u32 a[4], b[4];
      const int key = k * kKeysPerTile + lane;
      load_matrices_trans(b, &values[stage][key][warp ^ (key & 7)]);
      load_matrices(a, &weights[(lane & 7) + 8 * half][k * 4 + quarter]);
      mma_bf16(sum, a, b[0], b[1]);
      load_matrices(a, &weights[(lane & 7) + 8 * half][k * 4 + 2 + quarter]);
      mma_bf16(sum, a, b[2], b[3]);
    }
    __syncthreads();
  }
  UNROLL for (int i = 0; i < 2; ++i) {
    const int h = 2 * warp + i, head = group * kHeadsPerBlock + h;
    const float whole = warp_sum(total[i]);
    if (lane == 0 && head < p.heads) denominators[h] = whole + expf(load_element(p.sink, head, p.sink_element) - top[i]);
  }
  __syncthreads();

  const int dim = slice * kDimsPerBlock + warp * 8 + 2 * t, pair = (dim - (p.dim - 2 * p.pairs)) / 2;
  const bool turned = p.cos && dim >= p.dim - 2 * p.pairs;
  const float c = turned ? table_row(p, p.cos, p.cos_pitch, places.at)[pair] : 1.f;
  const float s = turned ? table_row(p, p.sin, p.sin_pitch, places.at)[pair] : 0.f;
  UNROLL for (int i = 0; i < 2; ++i) {
    const int h = g + 8 * i, head = group * kHeadsPerBlock + h;
    if (head >= p.heads) continue;
    float even = round_to_bf16(sum[2 * i] / denominators[h]), odd = round_to_bf16(sum[2 * i + 1] / denominators[h]);
    if (turned) turn(even, odd, c, -s);
    const i64 place = (i64)row * p.heads + head;
    *(u32*)((char*)p.y + place / p.y_heads * p.y_pitch + (place % p.y_heads * p.dim + dim) * 2) = pack_bf16(even, odd);
  }
}

KERNEL(attention_combine, AttentionParams, 256, 2) {
  combine_heads(p);
  end_block(p.order);
}

DEVICE void attend(const AttentionParams& p) {
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

KERNEL(attention_any, AttentionParams, 128, 1) {
  attend(p);
  end_block(p.order);
}

}  // namespace rewright
