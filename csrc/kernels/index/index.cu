// The lightning indexer.
//
// index_query: RoPE, Hadamard rotation and rounding of index queries, a warp for a head, in shared memory;
// every step rounded as if it had been stored. Bound by the latency of its steps.
//
// index_score_128: scores of compressed entries on tensor cores: 64 entries a block at a time, 16 a warp, and
// all heads, 16 of them the rows of a matrix instruction. Fragments come straight from memory, 16 bytes a
// lane: both operands number the dims in the same order, which is not theirs, so a sum is the same. Dot,
// scaled weight, product and sum over heads are rounded to bf16 each, which decides ties; the sums are fp32.
// The grid is [token][block], fixed when the plan is loaded; blocks stride over the entries that the token
// sees. Bound by the latency of position and keys for few entries, by the products for many.
// index_score_any: the same for other widths and for f32, a thread for an entry.
//
// index_topk_bf16, index_topk_f32: the k best of a row, a block of 1024 threads for a row. Scores become
// integers of the same order; histograms of 11 bits at a time give the least of the chosen ones and how many
// of its equals are chosen. Those are gathered by prefix sums in the order of their indices, and sorted by
// score, then index. A row of 8192 bf16 scores stays in registers; a longer one is read once for each
// histogram and once more. Bound by the latency of about twenty barriers.
#include "index.h"

#include "../common/numeric.cuh"

namespace rewright {

namespace {

DEVICE float hidden() { return __uint_as_float(0xff800000u); }  // -inf

DEVICE int visible(const int* pos, int batch, int tokens, int ratio, int entries) {
  return min((pos[batch] + tokens) / ratio, entries);
}

}  // namespace

KERNEL(index_query, IndexQueryParams, 128, 1) {
  DYNAMIC_SHARED(dynamic);
  const int lane = lane_id(), item = blockIdx.x * 4 + warp_id();
  if (item >= p.rows * p.heads) return;
  const int row = item / p.heads, head = item % p.heads, tail = p.dim - 2 * p.pairs;
  float* const x = (float*)dynamic + warp_id() * p.dim;
  const char* from = (const char*)p.x + row * p.x_pitch;
  for (int i = lane; i < p.dim; i += 32) x[i] = load_element(from, (i64)head * p.dim + i, p.element);
  __syncwarp();
  const int position = min(p.pos[row / p.tokens] + row % p.tokens, p.table_rows - 1);
  const float* cos = (const float*)((const char*)p.cos + position * p.cos_pitch);
  const float* sin = (const float*)((const char*)p.sin + position * p.sin_pitch);
  for (int i = lane; i < p.pairs; i += 32) {
    const float even = x[tail + 2 * i], odd = x[tail + 2 * i + 1], c = cos[i], s = sin[i];
    x[tail + 2 * i] = round_to(__fadd_rn(__fmul_rn(even, c), -__fmul_rn(odd, s)), p.element);
    x[tail + 2 * i + 1] = round_to(__fadd_rn(__fmul_rn(even, s), __fmul_rn(odd, c)), p.element);
  }
  __syncwarp();
  for (int width = 1; width < p.dim; width *= 2) {
    for (int i = lane; i < p.dim / 2; i += 32) {
      const int low = (i & ~(width - 1)) * 2 + (i & (width - 1));
      const float a = x[low], b = x[low + width];
      x[low] = a + b;
      x[low + width] = a - b;
    }
    __syncwarp();
  }
  for (int i = lane; i < p.dim; i += 32) x[i] = round_to(x[i] * p.root, p.element);
  __syncwarp();
  char* y = (char*)p.y + (i64)item * p.y_pitch;
  if (!p.block) {
    for (int i = lane; i < p.dim; i += 32) store_element(y, i, p.result_element, x[i]);
    return;
  }
  for (int first = 0; first < p.dim; first += p.block) {
    float amax = 0.f;
    for (int i = lane; i < p.block; i += 32) amax = fmaxf(amax, fabsf(x[first + i]));
    amax = warp_max(amax);
    const float most = p.e4m3 ? kE4m3Most : kE2m1Most;
    const u32 code = scale_code(amax, 1.f / most, p.e4m3 ? 1e-4f : 6.f * 1.17549435e-38f);
    const float scale = e8m0_to_float(code), inverse = e8m0_to_float(254 - code);
    for (int i = lane; i < p.block; i += 32) {
      const float v = fminf(fmaxf(__fmul_rn(x[first + i], inverse), -most), most);
      const float rounded = p.e4m3 ? round_to_e4m3(v) : e2m1_to_float(e2m1_code(v));
      store_element(y, first + i, p.result_element, rounded * scale);
    }
  }
}

KERNEL(index_score_128, IndexScoreParams, 128, 4) {
  constexpr int kEntries = 64;  // of a block at a time
  DYNAMIC_SHARED(dynamic);
  float* const weights = (float*)dynamic;  // [heads, padded to 16]
  const int row = blockIdx.x / p.blocks, block = blockIdx.x % p.blocks;
  const int batch = row / p.tokens, token = row % p.tokens;
  if (token >= p.n_valid[batch]) return;
  const int seen = visible(p.pos, batch, token + 1, p.ratio, p.entries);
  u16* const scores = (u16*)((char*)p.scores + row * p.scores_pitch);
  const int padded = (p.heads + 15) / 16 * 16;
  if (block * kEntries < seen) {
    for (int h = threadIdx.x; h < padded; h += 128) {
      weights[h] = h < p.heads ? round_to_bf16(load_element((const char*)p.weights + row * p.weights_pitch, h, kBf16) * p.weight_scale)
                               : 0.f;
    }
  }
  __syncthreads();
  const int lane = lane_id(), g = lane >> 2, t = lane & 3;
  const char* const keys = (const char*)p.keys + (i64)p.slot[batch] * p.slot_entries * p.keys_pitch + t * 16;
  const char* const q = (const char*)p.q + (i64)row * p.heads * p.q_pitch + t * 16;
  const uint4 none = make_uint4(0, 0, 0, 0);
  for (int first = block * kEntries + warp_id() * 16; first < seen; first += p.blocks * kEntries) {
    uint4 b[2][4];
    UNROLL for (int n = 0; n < 2; ++n) {
      const int entry = first + n * 8 + g;
      UNROLL for (int i = 0; i < 4; ++i) b[n][i] = entry < seen ? *(const uint4*)(keys + entry * p.keys_pitch + i * 64) : none;
    }
    float sums[2][2] = {};
    for (int m = 0; m < padded; m += 16) {
      const int low = m + g, high = low + 8;
      float c[2][4] = {};
      UNROLL for (int i = 0; i < 4; ++i) {
        const uint4 l = low < p.heads ? *(const uint4*)(q + low * p.q_pitch + i * 64) : none;
        const uint4 h = high < p.heads ? *(const uint4*)(q + high * p.q_pitch + i * 64) : none;
        const u32 a0[4] = {l.x, h.x, l.y, h.y}, a1[4] = {l.z, h.z, l.w, h.w};
        UNROLL for (int n = 0; n < 2; ++n) {
          mma_bf16(c[n], a0, b[n][i].x, b[n][i].y);
          mma_bf16(c[n], a1, b[n][i].z, b[n][i].w);
        }
      }
      UNROLL for (int n = 0; n < 2; ++n) {
        UNROLL for (int j = 0; j < 4; ++j) {
          const float dot = round_to_bf16(c[n][j]);
          sums[n][j & 1] += round_to_bf16((dot < 0.f ? 0.f : dot) * weights[j < 2 ? low : high]);
        }
      }
    }
    UNROLL for (int n = 0; n < 2; ++n) {
      UNROLL for (int j = 0; j < 2; ++j) {
        UNROLL for (int d = 4; d < 32; d *= 2) sums[n][j] += __shfl_xor_sync(kAllLanes, sums[n][j], d);
        const int entry = first + n * 8 + 2 * t + j;
        if (g == 0 && entry < seen) scores[entry] = float_to_bf16(sums[n][j]);
      }
    }
  }
  if (!p.fill) return;
  for (int i = max(seen, 0) + block * 128 + threadIdx.x; i < p.entries; i += p.blocks * 128) scores[i] = 0xff80;
}

KERNEL(index_score_any, IndexScoreParams, 128, 1) {
  const int row = blockIdx.x / p.blocks, block = blockIdx.x % p.blocks;
  const int batch = row / p.tokens, token = row % p.tokens;
  if (token >= p.n_valid[batch]) return;
  const int seen = visible(p.pos, batch, token + 1, p.ratio, p.entries);
  char* const scores = (char*)p.scores + row * p.scores_pitch;
  const char* const weights = (const char*)p.weights + row * p.weights_pitch;
  for (int entry = block * 128 + threadIdx.x; entry < (p.fill ? p.entries : seen); entry += p.blocks * 128) {
    float sum = hidden();
    if (entry < seen) {
      sum = 0.f;
      const char* key = (const char*)p.keys + ((i64)p.slot[batch] * p.slot_entries + entry) * p.keys_pitch;
      for (int h = 0; h < p.heads; ++h) {
        const char* q = (const char*)p.q + ((i64)row * p.heads + h) * p.q_pitch;
        float dot = 0.f;
        for (int d = 0; d < p.dim; ++d) dot += load_element(q, d, p.element) * load_element(key, d, p.element);
        dot = round_to(dot, p.element);
        const float weight = round_to(__fmul_rn(load_element(weights, h, p.element), p.weight_scale), p.element);
        sum = __fadd_rn(sum, round_to(__fmul_rn(dot < 0.f ? 0.f : dot, weight), p.element));
      }
    }
    store_element(scores, entry, p.element, sum);
  }
}

namespace {

constexpr int kThreads = 1024, kBins = 2048;

// Integers of the order of scores; -0 is 0, NaN the largest.
DEVICE u32 ordered(float v) {
  u32 bits = __float_as_uint(v);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0xffffffffu;
  if (bits == 0x80000000u) bits = 0;
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// Sum over the threads before this one, and over all; scratch: 33 words, read until the next barrier.
DEVICE u32 block_prefix(u32 v, u32* scratch, u32& all) {
  const int lane = lane_id(), warp = warp_id();
  u32 sum = v;
  UNROLL for (int d = 1; d < 32; d *= 2) {
    const u32 other = __shfl_up_sync(kAllLanes, sum, d);
    if (lane >= d) sum += other;
  }
  if (lane == 31) scratch[warp] = sum;
  __syncthreads();
  if (warp == 0) {
    const u32 mine = scratch[lane];
    u32 before = mine;
    UNROLL for (int d = 1; d < 32; d *= 2) {
      const u32 other = __shfl_up_sync(kAllLanes, before, d);
      if (lane >= d) before += other;
    }
    scratch[lane] = before - mine;
    if (lane == 31) scratch[32] = before;
  }
  __syncthreads();
  all = scratch[32];
  return scratch[warp] + sum - v;
}

// The list in order, largest first; exchanges within a warp go through registers.
DEVICE void sort_list(u64* list, int count) {
  const int i = threadIdx.x;
  if (count <= kThreads) {
    u64 mine = i < count ? list[i] : 0;
    for (int size = 2; size <= count; size *= 2) {
      for (int stride = size / 2; stride; stride /= 2) {
        u64 other;
        if (stride >= 32) {
          __syncthreads();
          if (i < count) list[i] = mine;
          __syncthreads();
          other = i < count ? list[i ^ stride] : 0;
        } else {
          other = __shfl_xor_sync(kAllLanes, mine, stride);
        }
        const bool larger = ((i & stride) == 0) == ((i & size) == 0);
        mine = (mine > other) == larger ? mine : other;
      }
    }
    __syncthreads();
    if (i < count) list[i] = mine;
    __syncthreads();
    return;
  }
  for (int size = 2; size <= count; size *= 2) {
    for (int stride = size / 2; stride; stride /= 2) {
      for (int j = i; j < count / 2; j += kThreads) {
        const int low = (j & ~(stride - 1)) * 2 + (j & (stride - 1));
        const u64 a = list[low], b = list[low + stride];
        if ((a < b) == ((low & size) == 0)) {
          list[low] = b;
          list[low + stride] = a;
        }
      }
      __syncthreads();
    }
  }
}

template <typename Score>
DEVICE void index_topk(const IndexTopkParams& p) {
  constexpr int kOwn = 16 / sizeof(Score), kPass = kThreads * kOwn, kLevels = sizeof(Score) == 2 ? 2 : 3;
  DYNAMIC_SHARED(dynamic);
  u64* const list = (u64*)dynamic;  // [sorted]
  __shared__ u32 bins[kBins], scratch[2][33], found[3];
  const int row = blockIdx.x, batch = row / p.tokens, token = row % p.tokens, me = threadIdx.x;
  const char* const scores = (const char*)p.scores + row * p.scores_pitch;

  // Keys of this thread's entries, from me * kOwn on in each pass. (Scores do not depend on the position:
  // those of the first pass are asked for before it is there.)
  u32 keys[kOwn];
  const auto load = [&](int pass) {
    const int first = pass * kPass + me * kOwn;
    if (p.vector) {
      const uint4 v = first < p.entries ? *(const uint4*)(scores + (i64)first * sizeof(Score)) : make_uint4(0, 0, 0, 0);
      const u32 words[4] = {v.x, v.y, v.z, v.w};
      UNROLL for (int i = 0; i < kOwn; ++i) {
        if (sizeof(Score) == 4) keys[i] = words[i % 4];
        else keys[i] = i & 1 ? words[i / 2] & 0xffff0000u : words[i / 2] << 16;
      }
    } else {
      UNROLL for (int i = 0; i < kOwn; ++i) {
        keys[i] = 0;
        if (first + i < p.entries) keys[i] = __float_as_uint(load_element(scores, first + i, sizeof(Score) == 4));
      }
    }
    // (The low half of a negative bf16 is all ones now: what no level looks at must be equal.)
    UNROLL for (int i = 0; i < kOwn; ++i) keys[i] = ordered(__uint_as_float(keys[i])) & (sizeof(Score) == 2 ? 0xffff0000u : ~0u);
  };
  load(0);
  for (int i = me; i < kBins; i += kThreads) bins[i] = 0;
  for (int i = me; i < p.sorted; i += kThreads) list[i] = 0;
  const int valid = p.n_valid[batch];
  if (token >= valid) return;
  const int limit = visible(p.pos, batch, token + 1, p.ratio, p.entries);
  const int count = p.own ? limit : visible(p.pos, batch, valid, p.ratio, p.entries);
  const int passes = (count + kPass - 1) / kPass;
  __syncthreads();

  // Chosen are keys above `least` and the first `ties` of its equals.
  u32 least = 0, ties = 0;
  if (count > p.k) {
    u32 prefix = 0, known = 0, need = p.k;
    for (int level = 0; level < kLevels; ++level) {
      const int shift = level == 0 ? 21 : level == 1 ? 10 : 0;
      for (int pass = 0; pass < passes; ++pass) {
        if (passes > 1) load(pass);
        const int first = pass * kPass + me * kOwn;
        UNROLL for (int i = 0; i < kOwn; ++i) {
          if (first + i < count && (keys[i] & known) == prefix) atomicAdd(&bins[keys[i] >> shift & (kBins - 1)], 1u);
        }
      }
      __syncthreads();
      // From the largest bin down, two to a thread: the one in which the last of `need` lies.
      const int bin = kBins - 1 - 2 * me;
      const u32 high = bins[bin], low = bins[bin - 1];
      bins[bin] = bins[bin - 1] = 0;
      u32 all;
      const u32 before = block_prefix(high + low, scratch[level & 1], all);
      if (before < need && need <= before + high + low) {
        const bool first = need <= before + high;
        found[0] = first ? bin : bin - 1;
        found[1] = need - before - (first ? 0 : high);
        found[2] = first ? high : low;
      }
      __syncthreads();
      prefix |= found[0] << shift;
      known |= (shift ? kBins - 1 : 1023u) << shift;
      need = found[1];
      const bool whole = found[2] == need;
      least = prefix;
      ties = need;
      if (whole) {
        --least;
        ties = 0;
        break;
      }
      __syncthreads();
    }
  }

  // In the order of indices: first those above, then the equals.
  u32 above = 0, equal = 0;
  const u32 others = min((u32)p.k, (u32)max(count, 0)) - ties;
  for (int pass = 0; pass < passes; ++pass) {
    if (passes > 1) load(pass);
    const int first = pass * kPass + me * kOwn;
    u32 mine = 0;  // above, and equals in the high half
    UNROLL for (int i = 0; i < kOwn; ++i) {
      if (first + i < count) mine += keys[i] > least ? 1u : keys[i] == least ? 0x10000u : 0u;
    }
    u32 all;
    const u32 before = block_prefix(mine, scratch[pass & 1], all);
    u32 at = above + (before & 0xffff), tie = equal + (before >> 16);
    UNROLL for (int i = 0; i < kOwn; ++i) {
      if (first + i >= count) continue;
      const u64 item = (u64)keys[i] << 32 | (u32)~(first + i);
      if (keys[i] > least) list[at++] = item;
      else if (keys[i] == least && tie++ < ties) list[others + tie - 1] = item;
    }
    above += all & 0xffff;
    equal += all >> 16;
  }
  __syncthreads();
  sort_list(list, p.sorted);
  int* const chosen = (int*)((char*)p.chosen + row * p.chosen_pitch);
  for (int i = me; i < p.k; i += kThreads) chosen[i] = i < min(limit, count) ? (int)~(u32)list[i] : -1;
}

}  // namespace

KERNEL(index_topk_bf16, IndexTopkParams, 1024, 1) { index_topk<u16>(p); }
KERNEL(index_topk_f32, IndexTopkParams, 1024, 1) { index_topk<float>(p); }

}  // namespace rewright
