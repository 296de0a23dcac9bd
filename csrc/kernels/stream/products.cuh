// Products of one block of weights with the tokens of a step.
//
// Weights are operand A of m16n8k16 (16 output rows), tokens operand B (8 columns): the same instructions
// serve one token and eight. The layouts give lane 4g + t eight consecutive columns of the input at a time,
// which is one load of 16 bytes for two instructions.
#pragma once

#include "dequantise.cuh"
#include "ring.cuh"

#include "../common/numeric.cuh"

namespace rewright {

// The input of a tile as a warp reads it. One token lies in shared memory and is every column; of several,
// column g is token g, in global memory.
template <bool kOne>
struct Operand {
  const char* row;             // of this lane's column, at the tile's first input column; null: no such token
  const u8 *even, *odd;        // scales of the tokens in columns 2t and 2t + 1, null: no such token

  // Columns k + 8t .. k + 8t + 7.
  DEVICE uint4 load(int k, int t) const {
    if (kOne) return *(const uint4*)(row + (k + 8 * t) * 2);
    if (row == nullptr) return make_uint4(0, 0, 0, 0);
    return *(const uint4*)(row + (k + 8 * t) * 2);  // (not the read-only path: the launch before may write it)
  }
  // Scales of block b of the tokens in columns 2t and 2t + 1.
  DEVICE void scales(int b, float& first, float& second) const {
    if (kOne) {
      first = second = e8m0_to_float(even[b]);
      return;
    }
    first = even ? e8m0_to_float(even[b]) : 0.f;
    second = odd ? e8m0_to_float(odd[b]) : 0.f;
  }
};

DEVICE void scaled_add(float (&sum)[4], const float (&c)[4], float even, float odd) {
  sum[0] = fmaf(c[0], even, sum[0]);
  sum[1] = fmaf(c[1], odd, sum[1]);
  sum[2] = fmaf(c[2], even, sum[2]);
  sum[3] = fmaf(c[3], odd, sum[3]);
}

// 128 columns of e4m3 weights in a slot times `v`; `weight_scale` is the factor of all of them, `even` and
// `odd` those of the tokens in columns 2t and 2t + 1. kPlain: they are bf16 and have none.
template <bool kPlain>
DEVICE void multiply_e4m3(float (&sum)[4], const char* slot, float weight_scale, const uint4 (&v)[4], float even, float odd, int lane) {
  float c[4], d[4];  // two chains of dependent instructions in place of one
  UNROLL for (int j = 0; j < 4; ++j) {
    const uint4 w = *(const uint4*)(slot + j * 512 + lane * 16);
    u32 a[4], b[4];
    widen8(w.x, a[0], a[1]);
    widen8(w.y, a[2], a[3]);
    widen8(w.z, b[0], b[1]);
    widen8(w.w, b[2], b[3]);
    if (kPlain) {
      UNROLL for (int i = 0; i < 4; ++i) {
        a[i] = to_bf16_8(a[i]);
        b[i] = to_bf16_8(b[i]);
      }
      if (j == 0) {
        mma_bf16_first(c, a, v[j].x, v[j].y);
        mma_bf16_first(d, b, v[j].z, v[j].w);
      } else {
        mma_bf16(c, a, v[j].x, v[j].y);
        mma_bf16(d, b, v[j].z, v[j].w);
      }
    } else if (j == 0) {
      mma_f16_first(c, a, v[j].x, v[j].y);
      mma_f16_first(d, b, v[j].z, v[j].w);
    } else {
      mma_f16(c, a, v[j].x, v[j].y);
      mma_f16(d, b, v[j].z, v[j].w);
    }
  }
  UNROLL for (int i = 0; i < 4; ++i) c[i] += d[i];
  // 2^16: weights and values are both 2^-8 times what they stand for.
  scaled_add(sum, c, kPlain ? weight_scale : weight_scale * 65536.f * even, kPlain ? weight_scale : weight_scale * 65536.f * odd);
}

// 128 columns of e2m1 weights, half `part` of a slot.
template <bool kPlain>
DEVICE void multiply_e2m1(float (&sum)[4], const char* slot, int part, const uint4 (&v)[4], float even, float odd, int lane) {
  const int g = lane >> 2;
  const u32 low = *(const u32*)(slot + 2048 + part * 64 + g * 4), high = *(const u32*)(slot + 2048 + part * 64 + (g + 8) * 4);
  float block[4] = {0.f, 0.f, 0.f, 0.f};  // of 128 columns, which share the input's scale
  UNROLL for (int j = 0; j < 2; ++j) {
    const uint4 w = *(const uint4*)(slot + (part * 2 + j) * 512 + lane * 16);
    UNROLL for (int i = 0; i < 2; ++i) {
      const uint4 x = v[j * 2 + i];
      u32 a[4], b[4];
      float c[4];
      widen4(i ? w.z : w.x, a);
      widen4(i ? w.w : w.y, b);
      if (kPlain) {
        UNROLL for (int n = 0; n < 4; ++n) {
          a[n] = to_bf16_4(a[n]);
          b[n] = to_bf16_4(b[n]);
        }
        mma_bf16_first(c, a, x.x, x.y);
        mma_bf16(c, b, x.z, x.w);
      } else {
        mma_f16_first(c, a, x.x, x.y);
        mma_f16(c, b, x.z, x.w);
      }
      const int shift = 8 * (j * 2 + i);
      const float r0 = __uint_as_float((low >> shift & 255u) << 23), r1 = __uint_as_float((high >> shift & 255u) << 23);
      block[0] = fmaf(c[0], r0, block[0]);
      block[1] = fmaf(c[1], r0, block[1]);
      block[2] = fmaf(c[2], r1, block[2]);
      block[3] = fmaf(c[3], r1, block[3]);
    }
  }
  // 2^22: weights are 2^-14, values 2^-8 times what they stand for.
  scaled_add(sum, block, kPlain ? 1.f : even * 4194304.f, kPlain ? 1.f : odd * 4194304.f);
}

// 64 columns of bf16 weights.
template <bool kRows>
DEVICE void multiply_bf16(float (&sum)[4], const char* slot, const uint4 (&v)[2], int lane) {
  float c[4], d[4];
  UNROLL for (int j = 0; j < 2; ++j) {
    const uint4 w = *(const uint4*)(slot + j * 1024 + lane * 16), u = *(const uint4*)(slot + j * 1024 + 512 + lane * 16);
    // In fragment order a load is a step; row by row it is a row half of two steps.
    const u32 a[4] = {w.x, kRows ? u.x : w.y, kRows ? w.y : w.z, kRows ? u.y : w.w};
    const u32 b[4] = {kRows ? w.z : u.x, kRows ? u.z : u.y, kRows ? w.w : u.z, u.w};
    if (j == 0) {
      mma_bf16_first(c, a, v[j].x, v[j].y);
      mma_bf16_first(d, b, v[j].z, v[j].w);
    } else {
      mma_bf16(c, a, v[j].x, v[j].y);
      mma_bf16(d, b, v[j].z, v[j].w);
    }
  }
  UNROLL for (int i = 0; i < 4; ++i) sum[i] += c[i] + d[i];
}


// The block in a slot, which is the one at a place of the stream. `wait` returns when it is there; the input
// is asked for before. kFormats: the formats that a launch has.
template <bool kOne, unsigned kFormats, typename Wait>
DEVICE void multiply(float (&sum)[4], const Cursor& c, const char* slot, const Operand<kOne>& x, int lane, Wait wait) {
  const int t = lane & 3;
  if (is_one_of<kE4m3Formats, kFormats>(c.format)) {
    uint4 v[4];
    float even = 1.f, odd = 1.f;
    UNROLL for (int j = 0; j < 4; ++j) v[j] = x.load(c.at * 128 + j * 32, t);
    const bool plain = is_one_of<kMask<kE4m3Bf16>, kFormats & kE4m3Formats>(c.format);
    if (!plain) x.scales(c.at, even, odd);
    wait();
    const float scale = e8m0_to_float(*(const u32*)(slot + 2048) >> (8 * (int)((u64)c.scale & 3)) & 255u);
    if (plain) multiply_e4m3<true>(sum, slot, scale, v, even, odd, lane);
    else multiply_e4m3<false>(sum, slot, scale, v, even, odd, lane);
    return;
  }
  if (is_one_of<kE2m1Formats, kFormats & ~kE4m3Formats>(c.format)) {
    const bool plain = is_one_of<kMask<kE2m1Bf16>, kFormats & kE2m1Formats>(c.format);
    const int parts = c.at == c.half ? 1 : 2;
#pragma unroll 1
    for (int part = 0; part < parts; ++part) {
      uint4 v[4];
      float even = 1.f, odd = 1.f;
      const auto load = [&] { UNROLL for (int j = 0; j < 4; ++j) v[j] = x.load(c.at * 256 + part * 128 + j * 32, t); };
      if (!kOne) load();
      if (part == 0) wait();
      if (kOne) load();  // (shared memory is near, and registers are few)
      if (!plain) x.scales(c.at * 2 + part, even, odd);
      if (plain) multiply_e2m1<true>(sum, slot, part, v, even, odd, lane);
      else multiply_e2m1<false>(sum, slot, part, v, even, odd, lane);
    }
    return;
  }
  if (kFormats & kBf16Formats) {
    uint4 v[2];
    UNROLL for (int j = 0; j < 2; ++j) v[j] = x.load(c.at * 64 + j * 32, t);
    wait();
    if (is_one_of<kMask<kRowsBf16>, kFormats & kBf16Formats>(c.format)) multiply_bf16<true>(sum, slot, v, lane);
    else multiply_bf16<false>(sum, slot, v, lane);
  }
}

}  // namespace rewright
