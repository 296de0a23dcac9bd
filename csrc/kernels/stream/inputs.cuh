// Makes one row of an input: what lies between the products of a decode step (norms, collapse of the
// streams, gating, quantisation). A whole block works on it; every thread returns with its part written.
#pragma once

#include "stream.h"

#include "../common/numeric.cuh"

namespace rewright {

constexpr int kScratchFloats = 40 + 32 * kPartialColumns;

// Eight consecutive values of a row.
struct Eight {
  float v[8];
};

DEVICE Eight unpack_bf16(const uint4& w) {
  return {{bf16_low(w.x), bf16_high(w.x), bf16_low(w.y), bf16_high(w.y), bf16_low(w.z), bf16_high(w.z), bf16_low(w.w), bf16_high(w.w)}};
}
DEVICE Eight load_bf16(const void* row, int k) { return unpack_bf16(*(const uint4*)((const u16*)row + k)); }
DEVICE void store_bf16(void* row, int k, const Eight& e) {
  *(uint4*)((u16*)row + k) = make_uint4(pack_bf16(e.v[0], e.v[1]), pack_bf16(e.v[2], e.v[3]), pack_bf16(e.v[4], e.v[5]), pack_bf16(e.v[6], e.v[7]));
}
DEVICE void round_bf16(Eight& e) {
  UNROLL for (int i = 0; i < 8; i += 2) {
    const u32 pair = round_bf16x2(e.v[i], e.v[i + 1]);
    e.v[i] = bf16_low(pair);
    e.v[i + 1] = bf16_high(pair);
  }
}

// Mixing logits of a row -> lane m of every warp its logit m, from what the launch before left: plain
// logits, or a part from each of its blocks. In two steps, as everything here: a launch asks for all that
// its inputs need, starts its stream of weights, and then computes. Asked for behind the stream, each load
// would wait for everything that the stream has asked for.
template <int kWarps>
struct Logits {
  float part[(kPartialBlocks + kWarps - 1) / kWarps];

  DEVICE void ask(const Input& p, int row) {
    if (!p.partials) {
      part[0] = lane_id() < p.logits ? *(const float*)((const char*)p.mix + row * p.mix_pitch + lane_id() * 4) : 0.f;
      return;
    }
    const float* from = p.mix + (i64)row * kPartialColumns + lane_id();
    const i64 step = (i64)p.rows * kPartialColumns;
    UNROLL for (int i = 0; i < (kPartialBlocks + kWarps - 1) / kWarps; ++i) {
      const int b = warp_id() + i * kWarps;
      part[i] = b < kPartialBlocks ? from[b * step] : 0.f;
    }
  }
  DEVICE float finish(const Input& p, float* scratch) const {
    if (!p.partials) return part[0];
    float sum[4] = {0.f, 0.f, 0.f, 0.f};
    UNROLL for (int i = 0; i < (kPartialBlocks + kWarps - 1) / kWarps; ++i) sum[i & 3] += part[i];
    scratch[warp_id() * kPartialColumns + lane_id()] = (sum[0] + sum[1]) + (sum[2] + sum[3]);
    __syncthreads();
    float total = 0.f;
    UNROLL for (int w = 0; w < kWarps; ++w) total += scratch[w * kPartialColumns + lane_id()];
    const float squares = __shfl_sync(kAllLanes, total, kPartialColumns - 1), eps = __shfl_sync(kAllLanes, total, kEpsColumn);
    return total * rsqrtf(squares / (float)(p.streams * p.columns) + eps);
  }
};

DEVICE float sigmoid(float x) { return 1.f / (1.f + expf(-x)); }

// Coefficients that put a sub-block's output back (hc_split), by one warp: lane j < n*n holds an element of
// comb; lane m gives logit m. The steps: ir/ops/hyper_connection.py.
DEVICE void put_back_coefficients(const Input& p, int row, float logit) {
  const int n = p.streams, lane = lane_id();
  const auto scale = [&](int i) { return load_element(p.mix_scale, i, p.scale_f32); };
  const auto base = [&](int i) { return load_element(p.mix_base, i, p.base_f32); };
  const auto logits = [&](int i) { return __shfl_sync(kAllLanes, logit, i); };
  const float mine = logits(n + (lane < n ? lane : 0));
  if (lane < n) {
    if (p.pre) *(float*)((char*)p.pre + row * p.pre_pitch + lane * 4) = sigmoid(logit * scale(0) + base(lane)) + p.hc_eps;
    if (p.post) *(float*)((char*)p.post + row * p.post_pitch + lane * 4) = 2.f * sigmoid(mine * scale(1) + base(n + lane));
  }
  if (p.comb == nullptr) return;
  const int j = lane < n * n ? lane : 0, r = j / n, c = j % n;
  const auto over_row = [&](float v, bool largest) {
    float sum = __shfl_sync(kAllLanes, v, r * n);
    for (int i = 1; i < n; ++i) {
      const float other = __shfl_sync(kAllLanes, v, r * n + i);
      sum = largest ? fmaxf(sum, other) : sum + other;
    }
    return sum;
  };
  const auto over_column = [&](float v) {
    float sum = __shfl_sync(kAllLanes, v, c);
    for (int i = 1; i < n; ++i) sum += __shfl_sync(kAllLanes, v, i * n + c);
    return sum;
  };
  float v = logits(2 * n + j) * scale(2) + base(2 * n + j);
  v = expf(v - over_row(v, true));
  v = v / over_row(v, false) + p.hc_eps;
  v = v / (over_column(v) + p.hc_eps);
  for (int i = 1; i < p.iterations; ++i) {
    v = v / (over_row(v, false) + p.hc_eps);
    v = v / (over_column(v) + p.hc_eps);
  }
  if (lane < n * n) *(float*)((char*)p.comb + (row * n + r) * p.comb_pitch + c * 4) = v;
}

// Codes of eight bf16 values whose block of 128 is spread over 16 lanes -> fp16 values and codes.
DEVICE void quantise_eight(Eight e, int k, const Input& p, const Prepared& to, int row) {
  u32 exponent;
  if (p.calibrated) {
    exponent = p.fixed[k >> 7];
    const float most = kE4m3Most * e8m0_to_float(exponent);
    UNROLL for (int i = 0; i < 8; ++i) e.v[i] = fminf(fmaxf(e.v[i], -most), most);
  } else {
    float amax = 0.f;
    UNROLL for (int i = 0; i < 8; ++i) amax = fmaxf(amax, fabsf(e.v[i]));
    UNROLL for (int d = 8; d; d >>= 1) amax = fmaxf(amax, __shfl_xor_sync(kAllLanes, amax, d));
    exponent = scale_code(amax, 1.f / kE4m3Most, 1e-4f);
  }
  const float inverse = __uint_as_float((254u - exponent) << 23);
  // 2^-8 times a bf16 value is an fp16 value where it is a normal one, and a code's 2^-8 fold is the fp16 of
  // three bits' mantissa: one rounding, of two at once. No value exceeds 448 times the scale.
  u32 w[4];
  bool small = false;
  UNROLL for (int i = 0; i < 4; ++i) {
    const float low = e.v[2 * i] * inverse * 0.00390625f, high = e.v[2 * i + 1] * inverse * 0.00390625f;
    small |= (fabsf(low) < 6.103515625e-5f && low != 0.f) || (fabsf(high) < 6.103515625e-5f && high != 0.f);
    const u32 both = round_f16x2(low, high);
    w[i] = (both + 0x003f003fu + (both >> 7 & 0x00010001u)) & 0xff80ff80u;
  }
  if (small) {  // some lie below the normal ones
    UNROLL for (int i = 0; i < 4; ++i) {
      const u32 low = e4m3_code(round_to_e4m3(e.v[2 * i] * inverse)), high = e4m3_code(round_to_e4m3(e.v[2 * i + 1] * inverse));
      w[i] = e4m3_to_f16_bits(low) | e4m3_to_f16_bits(high) << 16;
    }
  }
  if (to.values) *(uint4*)((char*)to.values + row * to.values_pitch + k * 2) = make_uint4(w[0], w[1], w[2], w[3]);
  if (to.codes) {
    u32 code[4];
    UNROLL for (int i = 0; i < 4; ++i) code[i] = (w[i] >> 7 & 0x7fu) | (w[i] >> 8 & 0x80u) | (w[i] >> 15 & 0x7f00u) | (w[i] >> 16 & 0x8000u);
    *(uint2*)(to.codes + row * to.codes_pitch + k) = make_uint2(code[0] | code[1] << 16, code[2] | code[3] << 16);
  }
  if (to.exponents && (lane_id() & 15) == 0) to.exponents[row * to.exponents_pitch + (k >> 7)] = (u8)exponent;
}

// Eight elements of a norm's weight.
DEVICE Eight load_gamma(const void* gamma, int f32, int k) {
  if (!f32) return load_bf16(gamma, k);
  const float4 a = *(const float4*)((const float*)gamma + k), b = *(const float4*)((const float*)gamma + k + 4);
  return {{a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w}};
}

// Where a piece of an input goes: bf16, and quantised. Whole warps take part; `mine` is false beyond the row's end.
DEVICE void put(const Eight& e, bool mine, int k, const Input& p, const Prepared& to, int row) {
  if (to.bf16 && mine) store_bf16((char*)to.bf16 + row * to.bf16_pitch, k, e);
  if (to.values || to.codes) {  // (the same for all threads; the quantisation shuffles)
    Prepared target = to;
    if (!mine) target = Prepared{};
    quantise_eight(e, k, p, target, row);
  }
}

// Each of the following makes rows of one kind of input, eight values a piece, kPieces of them asked for at
// a time by each of kWarps * 32 threads; what is wider takes more rounds.

// e4m3 codes and their scales.
template <int kWarps, int kPieces = 2>
struct Codes {
  uint2 codes[kPieces];
  u8 scale;

  DEVICE void ask(const Input& p, int row, int base = 0) {
    UNROLL for (int n = 0; n < kPieces; ++n) {
      const int i = base + threadIdx.x + n * kWarps * 32;
      if (i < p.columns / 8) codes[n] = *(const uint2*)((const u8*)p.x + row * p.x_pitch + i * 8);
    }
    if (base == 0 && (int)threadIdx.x < p.columns / 128) scale = p.scale[row * p.scale_pitch + threadIdx.x];
  }
  DEVICE void finish(const Input& p, int row, const Prepared& to) {
    const auto pair = [](u32 w) { return e4m3_to_f16_bits(w & 255u) | e4m3_to_f16_bits(w >> 8 & 255u) << 16; };
    if ((int)threadIdx.x < p.columns / 128) to.exponents[row * to.exponents_pitch + threadIdx.x] = scale;
#pragma unroll 1
    for (int base = 0; base < p.columns / 8; base += kPieces * kWarps * 32) {
      if (base) ask(p, row, base);
      UNROLL for (int n = 0; n < kPieces; ++n) {
        const int i = base + threadIdx.x + n * kWarps * 32;
        const uint2 c = codes[n];
        if (i < p.columns / 8) {
          *(uint4*)((char*)to.values + row * to.values_pitch + i * 16) = make_uint4(pair(c.x), pair(c.x >> 16), pair(c.y), pair(c.y >> 16));
        }
      }
    }
  }
};

// Rows [first, first + count): silu(gate) * up, times the route's weight: of one row, or of several in `routes`.
template <int kWarps, int kPieces>
struct Gated {
  uint4 gate[kPieces], up[kPieces];
  float route;

  DEVICE void ask(const Input& p, int first, int count, int base = 0) {
    const int per_row = p.columns / 8, all = count * per_row;
    UNROLL for (int n = 0; n < kPieces; ++n) {
      const int i = base + threadIdx.x + n * kWarps * 32;
      if (i - lane_id() >= all) break;
      const int at = min(i, all - 1), row = first + at / per_row, k = at % per_row * 8;
      gate[n] = *(const uint4*)((const char*)p.x + row * p.x_pitch + k * 2);
      up[n] = *(const uint4*)((const char*)p.up + row * p.up_pitch + k * 2);
    }
    route = p.route && count == 1 ? p.route[first] : 1.f;
  }
  DEVICE void finish(const Input& p, int first, int count, const Prepared& to, const float* routes = nullptr) {
    const int per_row = p.columns / 8, all = count * per_row;
#pragma unroll 1
    for (int base = 0; base < all; base += kPieces * kWarps * 32) {
      if (base) ask(p, first, count, base);
#pragma unroll 1
      for (int n = 0; n < kPieces; ++n) {
        const int i = base + threadIdx.x + n * kWarps * 32;
        if (i - lane_id() >= all) break;  // whole warps stay together
        const float weight = routes ? routes[min(i, all - 1) / per_row] : route;
        const Eight g = unpack_bf16(gate[0]), u = unpack_bf16(up[0]);
        Eight e;
        UNROLL for (int j = 0; j < 8; ++j) {
          const float a = fminf(g.v[j], p.limit), y = __fdividef(a, 1.f + __expf(-a)) * fminf(fmaxf(u.v[j], -p.limit), p.limit);
          e.v[j] = y * weight;
        }
        round_bf16(e);
        put(e, i < all, i % per_row * 8, p, to, first + i / per_row);
        UNROLL for (int m = 0; m + 1 < kPieces; ++m) {  // the next piece moves up: one copy of the code serves all
          gate[m] = gate[m + 1];
          up[m] = up[m + 1];
        }
      }
    }
  }
};

// A bf16 row, or collapsed streams; normed where `gamma` is given. Wider rows than a round keep their values
// in `keep`, memory of columns bf16 values, between the passes.
template <bool kStreamed, int kWarps, int kPieces>
struct Row {
  uint4 x[kPieces][kStreamed ? 4 : 1], gamma[kPieces];
  Logits<kWarps> logits;

  DEVICE static const void* source(const Input& p, int row, int stream, int k) {
    return (const char*)p.x + (kStreamed ? row * p.streams + stream : row) * p.x_pitch + k * 2;
  }
  DEVICE void ask_values(const Input& p, int row, int base) {
    const int pieces = p.columns / 8;
    UNROLL for (int n = 0; n < kPieces; ++n) {
      const int i = base + threadIdx.x + n * kWarps * 32;
      if (i - lane_id() >= pieces) break;
      const int k = min(i, pieces - 1) * 8;
      if (!kStreamed) {
        x[n][0] = *(const uint4*)source(p, row, 0, k);
      } else {
        UNROLL for (int s = 0; s < 4; ++s) x[n][s] = *(const uint4*)source(p, row, min(s, p.streams - 1), k);
      }
    }
  }
  DEVICE void ask(const Input& p, int row) {
    if (kStreamed) logits.ask(p, row);
    ask_values(p, row, 0);
    if (p.gamma == nullptr || p.gamma_f32) return;
    UNROLL for (int n = 0; n < kPieces; ++n) {
      const int i = threadIdx.x + n * kWarps * 32;
      if (i < p.columns / 8) gamma[n] = *(const uint4*)((const u16*)p.gamma + i * 8);
    }
  }
  // Lane m of every warp gets mixing logit m.
  DEVICE float finish(const Input& p, int row, const Prepared& to, u16* keep, float* scratch) {
    constexpr int kThreads = kWarps * 32;
    const int pieces = p.columns / 8;
    const bool wide = pieces > kPieces * kThreads, normed = p.gamma != nullptr;
    float logit = 0.f, pre[4] = {1.f, 1.f, 1.f, 1.f};
    if (kStreamed) {
      logit = logits.finish(p, scratch);
      const int lane = min(lane_id(), p.streams - 1);
      const float mine = sigmoid(logit * load_element(p.mix_scale, 0, p.scale_f32) + load_element(p.mix_base, lane, p.base_f32)) + p.hc_eps;
      UNROLL for (int s = 0; s < 4; ++s) {
        pre[s] = __shfl_sync(kAllLanes, mine, s);
        if (s >= p.streams) pre[s] = 0.f;
      }
    }
    float squares = 0.f;
    Eight value[kPieces];
    const auto collapse = [&](int base) {
      UNROLL for (int n = 0; n < kPieces; ++n) {
        const int i = base + threadIdx.x + n * kThreads;
        if (i - lane_id() >= pieces) break;
        value[n] = unpack_bf16(x[n][0]);
        if (kStreamed) {
          UNROLL for (int j = 0; j < 8; ++j) value[n].v[j] *= pre[0];
          UNROLL for (int s = 1; s < 4; ++s) {
            const Eight e = unpack_bf16(x[n][s]);
            UNROLL for (int j = 0; j < 8; ++j) value[n].v[j] += e.v[j] * pre[s];
          }
          round_bf16(value[n]);
        }
        if (i < pieces) {
          UNROLL for (int j = 0; j < 8; ++j) squares += value[n].v[j] * value[n].v[j];
        }
      }
    };
    collapse(0);
    if (wide) {
#pragma unroll 1
      for (int base = 0; base < pieces; base += kPieces * kThreads) {
        if (base) {
          ask_values(p, row, base);
          collapse(base);
        }
        UNROLL for (int n = 0; n < kPieces; ++n) {
          const int i = base + threadIdx.x + n * kThreads;
          if (i < pieces) store_bf16(keep, i * 8, value[n]);
        }
      }
    }
    float scale = 1.f;
    if (normed) {
      squares = warp_sum(squares);
      float* sums = scratch + 32 * kPartialColumns;
      if (lane_id() == 0) sums[warp_id()] = squares;
      __syncthreads();
      float total = 0.f;
      UNROLL for (int w = 0; w < kWarps; ++w) total += sums[w];
      scale = rsqrtf(total / (float)p.columns + p.eps);
    }
#pragma unroll 1
    for (int n = 0; threadIdx.x - lane_id() + n * kThreads < (unsigned)pieces; ++n) {
      const int i = threadIdx.x + n * kThreads, k = min(i, pieces - 1) * 8;
      Eight e = wide ? load_bf16(keep, k) : value[0];
      if (normed) {
        const Eight factor = p.gamma_f32 || n >= kPieces ? load_gamma(p.gamma, p.gamma_f32, k) : unpack_bf16(gamma[0]);
        UNROLL for (int j = 0; j < 8; ++j) e.v[j] = factor.v[j] * (e.v[j] * scale);
        round_bf16(e);
      }
      put(e, i < pieces, k, p, to, row);
      UNROLL for (int m = 0; m + 1 < kPieces; ++m) {
        value[m] = value[m + 1];
        gamma[m] = gamma[m + 1];
      }
    }
    return logit;
  }
};

// Any input, asked for and made at once.
template <int kWarps>
DEVICE float prepare(const Input& p, int row, const Prepared& to, u16* keep, float* scratch) {
  switch (p.kind) {
    case kStreams: {
      Row<true, kWarps, 2> streams;
      streams.ask(p, row);
      return streams.finish(p, row, to, keep, scratch);
    }
    case kCodes: {
      Codes<kWarps> codes;
      codes.ask(p, row);
      codes.finish(p, row, to);
      return 0.f;
    }
    case kGated: {
      Gated<kWarps, 2> gated;
      gated.ask(p, row, 1);
      gated.finish(p, row, 1, to);
      return 0.f;
    }
  }
  Row<false, kWarps, 2> plain;
  plain.ask(p, row);
  return plain.finish(p, row, to, keep, scratch);
}

}  // namespace rewright
