// A matrix product in any layout and type, one output a warp: what steps fall back to where the streaming
// kernels do not fit (fp32 weights, odd shapes, single expert products). Grid: (eight outputs, rows); rows
// are tokens, or tokens and choices. Bound by the latency of its loads.
#include "linear.h"

#include "../common/numeric.cuh"

namespace rewright {

namespace {

// Bytes from the start of a packed matrix to the word of row n, column k, and what of it is the element
// (ir/weight_layout.py).
struct Packed {
  int tile, chunk, lane, step, pair, half, high;
  DEVICE Packed(int n, int k) {
    const int r = n & 15;
    tile = n >> 4;
    chunk = k >> 5;
    lane = (r & 7) * 4 + ((k & 31) >> 3);
    step = (k & 7) >> 2;
    pair = (k & 3) >> 1;
    half = r >> 3;
    high = k & 1;
  }
};

DEVICE float weight_value(const MatrixProductParams& p, const char* w, int n, int k) {
  const i64 at = (i64)n * p.k + k;
  switch (p.kind) {
    case kPlainE4m3: return e4m3_to_float(((const u8*)w)[at]);
    case kPlainE2m1: return e2m1_to_float(((const u8*)w)[at >> 1] >> (4 * (k & 1)) & 15u);
    case kPlainBf16: return bf16_to_float(((const u16*)w)[at]);
    case kPlainF32: return ((const float*)w)[at];
  }
  const Packed e(n, k);
  const i64 chunk = (i64)e.tile * (p.k / 32) + e.chunk;
  if (p.kind == kPackedBf16) {
    return bf16_to_float(((const u16*)w)[(((chunk * 2 + e.step) * 32 + e.lane) * 4 + e.pair * 2 + e.half) * 2 + e.high]);
  }
  if (p.kind == kPackedE4m3) {
    const u32 word = ((const u32*)w)[((chunk * 32 + e.lane) * 2 + e.step) * 2 + e.pair] >> (16 * e.high);
    return e4m3_to_float(e.half ? (word >> 7 & 0x80u) | (word & 0x7fu) : (word >> 8 & 0x80u) | (word >> 7 & 0x7fu));
  }
  const u32 word = ((const u32*)w)[((chunk / 2 * 32 + e.lane) * 2 + (chunk & 1)) * 2 + e.step] >> (16 * e.high);
  const int sign[4] = {15, 12, 14, 13}, value[4] = {9, 6, 3, 0}, i = e.pair * 2 + e.half;
  return e2m1_to_float((word >> sign[i] & 1u) << 3 | (word >> value[i] & 7u));
}

DEVICE float scale_value(const MatrixProductParams& p, const char* s, int n, int k) {
  if (s == nullptr) return 1.f;
  const bool fine = p.kind == kPlainE2m1 || p.kind == kPackedE2m1;
  i64 at = fine ? (i64)n * p.scale_columns + k / 32 : (i64)(n / 128) * p.scale_columns + k / 128;
  if (p.scale_packed) at = ((i64)(n >> 4) * (p.scale_columns / 4) + k / 128) * 64 + (n & 15) * 4 + (k & 127) / 32;
  return p.scale_f32 ? ((const float*)s)[at] : e8m0_to_float(((const u8*)s)[at]);
}

}  // namespace

KERNEL(matrix_product, MatrixProductParams, 256, 1) {
  const int lane = lane_id(), n = blockIdx.x * 8 + warp_id(), row = blockIdx.y;
  if (n >= p.n) return;
  const char *weight = (const char*)p.weight, *scale = (const char*)p.scale;
  i64 from = row, to = row;
  int column = n;
  bool none = false;
  if (p.experts) {
    const int token = row / p.choices;
    const int expert = *(const int*)((const char*)p.experts + token * p.experts_pitch + row % p.choices * 4);
    none = expert < 0 || expert >= p.expert_count;
    if (!none) {
      weight += expert * p.expert_bytes;
      if (scale) scale += expert * p.expert_scale_bytes;
    }
    from = p.x_by_choice ? row : token;
  } else if (p.groups > 1) {
    const int each = p.n / p.groups;
    from = (i64)row * p.groups + n / each;
    if (!p.out_flat) {
      to = from;
      column = n % each;
    }
  }
  const char* x = (const char*)p.x + from * p.x_pitch;
  const u8* x_scale = p.x_scale ? p.x_scale + from * p.x_scale_pitch : nullptr;
  float sum = 0.f;
  if (!none) {
    for (int k = lane; k < p.k; k += 32) {
      const float v = p.x_kind == 2 ? e4m3_to_float(((const u8*)x)[k]) * e8m0_to_float(x_scale[k / 128]) : load_element(x, k, p.x_kind);
      sum += v * (weight_value(p, weight, n, k) * scale_value(p, scale, n, k));
    }
  }
  sum = warp_sum(sum);
  if (lane == 0) store_element((char*)p.out + to * p.out_pitch, column, p.out_f32, sum);
}

}  // namespace rewright
