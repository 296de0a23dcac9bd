// Neighbouring elements of rows at once: what keeps the memory accesses of a warp whole.
#pragma once

#include "numeric.cuh"

namespace rewright {

DEVICE const void* row_of(const void* p, i64 row, i64 pitch) { return (const char*)p + row * pitch; }
DEVICE void* row_of(void* p, i64 row, i64 pitch) { return (char*)p + row * pitch; }

// Elements 2 pair, 2 pair + 1 of a row.
DEVICE float2 load_pair(const void* p, int pair, int element) {
  if (element == kF32) return ((const float2*)p)[pair];
  const u32 v = ((const u32*)p)[pair];
  return make_float2(bf16_low(v), bf16_high(v));
}
DEVICE void store_pair(void* p, int pair, int element, float2 v) {
  if (element == kF32) ((float2*)p)[pair] = v;
  else ((u32*)p)[pair] = pack_bf16(v.x, v.y);
}
DEVICE float2 round_pair(float2 v, int element) { return make_float2(round_to(v.x, element), round_to(v.y, element)); }

// Elements 4 quad .. 4 quad + 3 of a row.
DEVICE float4 load_four(const void* p, int quad, int element) {
  if (element == kF32) return ((const float4*)p)[quad];
  const uint2 v = ((const uint2*)p)[quad];
  return make_float4(bf16_low(v.x), bf16_high(v.x), bf16_low(v.y), bf16_high(v.y));
}
DEVICE void store_four(void* p, int quad, int element, float4 v) {
  if (element == kF32) ((float4*)p)[quad] = v;
  else ((uint2*)p)[quad] = make_uint2(pack_bf16(v.x, v.y), pack_bf16(v.z, v.w));
}
DEVICE float4 add_four(float4 a, float4 b) { return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w); }
// a + factor * b
DEVICE float4 add_scaled(float4 a, float factor, float4 b) {
  return make_float4(a.x + factor * b.x, a.y + factor * b.y, a.z + factor * b.z, a.w + factor * b.w);
}

}  // namespace rewright
