// Quantisation of one block of values by one warp: to codes, or to the values that codes stand for.
#pragma once

#include "../common/vectors.cuh"
#include "quantize.h"

namespace rewright {

// Largest value of a format.
DEVICE float most_of(int format) { return format == kE2M1Codes ? 6.f : 448.f; }

// 2^e and 2^-e for the block scale 2^e, and its e8m0 code.
struct BlockScale {
  u32 code;
  float up, down;
};
DEVICE BlockScale scale_of(u32 code) { return {code, e8m0_to_float(code), __uint_as_float((254u - code) << 23)}; }
DEVICE BlockScale block_scale(float amax, int format) {
  return scale_of(format == kE2M1Codes ? scale_code(amax, 1.f / 6.f, 0x1.8p-124f) : scale_code(amax, 1.f / 448.f, 1e-4f));
}

// A scaled value within the range of the format: products with `down` are exact, so nothing is rounded twice.
DEVICE float into_range(float v, const BlockScale& scale, int format) {
  const float most = most_of(format);
  return fminf(fmaxf(v * scale.down, -most), most);
}
DEVICE u32 code_of(float v, int format) { return format == kE2M1Codes ? e2m1_code(v) : e4m3_code(round_to_e4m3(v)); }
DEVICE float coded(float v, int format) {
  return format == kE2M1Codes ? e2m1_to_float(e2m1_code(v)) : round_to_e4m3(v);
}

// Lane l holds pairs l and l + 32 of a block, which is even and at most kMostBlock; the rest is zero.
struct BlockPairs {
  float2 v[2];
};
DEVICE float largest_magnitude(const BlockPairs& pairs) {
  float amax = 0.f;
  UNROLL for (int i = 0; i < 2; ++i) amax = fmaxf(amax, fmaxf(fabsf(pairs.v[i].x), fabsf(pairs.v[i].y)));
  return warp_max(amax);
}
// load(pair) -> float2 gives a pair of the block.
template <typename Load>
DEVICE BlockPairs load_block(int block, Load load) {
  BlockPairs pairs;
  UNROLL for (int i = 0; i < 2; ++i) {
    const int pair = lane_id() + 32 * i;
    pairs.v[i] = pair < block / 2 ? load(pair) : make_float2(0.f, 0.f);
  }
  return pairs;
}

// Codes of a block -> codes[block] (e2m1: two a byte); returns the code of its scale, to every lane. With
// `fixed` that is its scale, and values beyond its range become the largest.
template <typename Load>
DEVICE u32 quantize_block(int block, int format, Load load, void* codes, const u8* fixed = nullptr) {
  const BlockPairs pairs = load_block(block, load);
  const BlockScale scale = fixed ? scale_of(*fixed) : block_scale(largest_magnitude(pairs), format);
  UNROLL for (int i = 0; i < 2; ++i) {
    const int pair = lane_id() + 32 * i;
    const u32 low = code_of(into_range(pairs.v[i].x, scale, format), format);
    const u32 high = code_of(into_range(pairs.v[i].y, scale, format), format);
    if (pair >= block / 2) continue;
    if (format == kE2M1Codes) ((u8*)codes)[pair] = (u8)(low | high << 4);
    else ((u16*)codes)[pair] = (u16)(low | high << 8);
  }
  return scale.code;
}

// values[block] in shared memory, 8-byte aligned, rounded in place to what its codes stand for.
DEVICE void round_block(float* values, int block, int format) {
  float2* row = (float2*)values;
  const BlockPairs pairs = load_block(block, [row](int pair) { return row[pair]; });
  const BlockScale scale = block_scale(largest_magnitude(pairs), format);
  UNROLL for (int i = 0; i < 2; ++i) {
    const int pair = lane_id() + 32 * i;
    const float low = coded(into_range(pairs.v[i].x, scale, format), format) * scale.up;
    const float high = coded(into_range(pairs.v[i].y, scale, format), format) * scale.up;
    if (pair < block / 2) row[pair] = make_float2(low, high);
  }
}

// One block of a row of the op, by one warp.
DEVICE void quantize_row_block(const QuantizeParams& p, i64 row, int at) {
  const void* x = row_of(p.x, row, p.x_pitch);
  const int first = (p.start + at * p.block) / 2, element = p.element;
  u8* codes = (u8*)row_of(p.codes, row, p.codes_pitch) + (p.format == kE2M1Codes ? at * p.block / 2 : at * p.block);
  const auto load = [x, first, element](int pair) { return load_pair(x, first + pair, element); };
  const u32 code = quantize_block(p.block, p.format, load, codes, p.fixed ? p.fixed + at : nullptr);
  if (p.fixed == nullptr && lane_id() == 0) ((u8*)row_of(p.scales, row, p.scales_pitch))[at] = (u8)code;
}

}  // namespace rewright
