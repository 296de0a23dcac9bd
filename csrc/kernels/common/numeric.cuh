// Number formats of the model: bf16, e4m3, e2m1 and e8m0, with the roundings of the released code.
#pragma once

#include "cuda.cuh"

namespace rewright {

DEVICE float bf16_to_float(u16 v) { return __uint_as_float((u32)v << 16); }
DEVICE float bf16_low(u32 pair) { return __uint_as_float(pair << 16); }
DEVICE float bf16_high(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }

// Nearest, ties to even; NaN stays NaN.
DEVICE u16 float_to_bf16(float f) { return (u16)round_bf16x2(f, 0.f); }
DEVICE float round_to_bf16(float f) { return __uint_as_float(round_bf16x2(0.f, f)); }
DEVICE u32 pack_bf16(float low, float high) { return round_bf16x2(low, high); }

// 2^(code - 127); code 0 is 2^-127.
DEVICE float e8m0_to_float(u32 code) { return code ? __uint_as_float(code << 23) : __uint_as_float(0x00400000u); }

// Code of the block scale for the largest magnitude of a block: the power of two at or above amax / most,
// amax being at least 1e-4 (e4m3) or 6 * 2^-126 (e2m1). `inverse` is 1 / most as f32.
DEVICE u32 scale_code(float amax, float inverse, float least) {
  return (__float_as_uint(fmaxf(amax, least) * inverse) + 0x7fffffu) >> 23;
}
constexpr float kE4m3Most = 448.f, kE2m1Most = 6.f;

// Nearest e4m3 value, ties to even, of |v| <= 448; as a float.
DEVICE float round_to_e4m3(float v) {
  const u32 u = __float_as_uint(v), magnitude = u & 0x7fffffffu;
  if (magnitude < 0x3c800000u) {  // below 2^-6: steps of 2^-9
    const float step = 24576.f;   // 1.5 * 2^14
    const float rounded = __fadd_rn(__fadd_rn(__uint_as_float(magnitude), step), -step);
    return __uint_as_float((u & 0x80000000u) | __float_as_uint(rounded));
  }
  const u32 rounded = magnitude + 0x7ffffu + ((magnitude >> 20) & 1);
  return __uint_as_float((u & 0x80000000u) | (rounded & 0xfff00000u));
}
// Code of a float that is an e4m3 value.
DEVICE u32 e4m3_code(float v) {
  const u32 u = __float_as_uint(v), sign = (u >> 24) & 0x80u, magnitude = u & 0x7fffffffu;
  if (magnitude < 0x3c800000u) return sign | (u32)(__uint_as_float(magnitude) * 512.f);
  return sign | ((magnitude >> 20) - (120u << 3));
}
DEVICE float e4m3_to_float(u32 code) {
  const u32 sign = (code & 0x80u) << 24, e = (code >> 3) & 15u, m = code & 7u;
  const float value = e ? __uint_as_float(((e + 120u) << 23) | (m << 20)) : (float)m * 0.001953125f;
  return __uint_as_float(__float_as_uint(value) | sign);
}
// e4m3 code -> bits of the fp16 that is 2^-8 times its value.
DEVICE u32 e4m3_to_f16_bits(u32 code) { return ((code & 0x80u) << 8) | ((code & 0x7fu) << 7); }

// Nearest e2m1 code, ties to even, of |v| <= 6.
DEVICE u32 e2m1_code(float v) {
  const float a = fabsf(v);
  const u32 sign = (__float_as_uint(v) >> 28) & 8u;
  u32 code;
  if (a <= 0.25f) code = 0;
  else if (a < 0.75f) code = 1;
  else if (a <= 1.25f) code = 2;
  else if (a < 1.75f) code = 3;
  else if (a <= 2.5f) code = 4;
  else if (a < 3.5f) code = 5;
  else if (a <= 5.f) code = 6;
  else code = 7;
  return sign | code;
}
DEVICE float e2m1_to_float(u32 code) {
  const u32 e = (code >> 1) & 3u, m = code & 1u;
  const float value = e ? __uint_as_float(((e + 126u) << 23) | (m << 22)) : 0.5f * (float)m;
  return __uint_as_float(__float_as_uint(value) | (code & 8u) << 28);
}

// Element types of activations and norm weights that kernels take at run time.
enum Element : int { kBf16 = 0, kF32 = 1 };
DEVICE float load_element(const void* p, i64 index, int element) {
  return element == kF32 ? ((const float*)p)[index] : bf16_to_float(((const u16*)p)[index]);
}
DEVICE void store_element(void* p, i64 index, int element, float v) {
  if (element == kF32) ((float*)p)[index] = v;
  else ((u16*)p)[index] = float_to_bf16(v);
}
DEVICE float round_to(float v, int element) { return element == kF32 ? v : round_to_bf16(v); }

}  // namespace rewright
