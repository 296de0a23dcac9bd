// The loops that carry the time, compiled for several instruction sets and chosen once at run time.
// All of them give the same bits: each element's operations and their order are stated, and a product
// is fused with its sum only where `fma` says so.
#pragma once

#include <cstdint>

namespace rewright {

constexpr int kTile = 16;  // rows of a weight that lie together (ir/weight_layout.py, tile16)

struct Vector {
  const char* name;  // as cpu_features() spells it, or "portable"

  // Weight elements to fp32, count a multiple of 16.
  void (*widen_bf16)(const uint16_t* from, int64_t count, float* to);
  void (*widen_half)(const uint16_t* from, int64_t count, float* to);
  // e4m3 codes times a scale.
  void (*widen_e4m3)(const uint8_t* from, int64_t count, float scale, float* to);
  // Bytes [pairs][16] of e2m1 codes, element 2p of a row low and 2p+1 high -> to[2 * pairs][16], times
  // one scale for each of the 16 rows.
  void (*widen_e2m1)(const uint8_t* from, int64_t pairs, const float* scales, float* to);
  // 16 e8m0 bytes -> fp32.
  void (*widen_e8m0)(const uint8_t* from, float* to);

  // sums[r][0..16) = fma(x[r * ldx + k], panel[k * ldp + 0..16), sums[r]) for k ascending from 0 to count.
  void (*chain)(const float* panel, int64_t ldp, const float* x, int64_t ldx, int64_t rows, int64_t count, float* sums);
  // Four running sums of one row: sums[k % 4][0..16) += x[k] * panel[k * 16 + 0..16), the product
  // rounded; count is a multiple of 4.
  void (*lanes)(const float* panel, const float* x, int64_t count, float* sums);

  // 64 running sums of one row: sums[k % 64][0..16) = fma(x[k], panel[k * 16 + 0..16), sums[k % 64]).
  void (*lanes64)(const float* panel, const float* x, int64_t count, float* sums);

  // x[i] = exp_rounded(x[i]) of math.h.
  void (*exp)(float* x, int64_t count);
  // x[i] = exp_ulp1(x[i]), softplus(x[i]).
  void (*exp_ulp1)(float* x, int64_t count);
  void (*softplus)(float* x, int64_t count);
};

// The widest that this processor has. REWRIGHT_VECTOR=portable (or another name) in the environment
// takes a narrower one.
const Vector& vector();

}  // namespace rewright
