// Parameters of the kernels in quantize.cu.
#pragma once

namespace rewright {

enum CodeFormat : int { kNoCodes = 0, kE4M3Codes = 1, kE2M1Codes = 2 };

// Values that share a scale at most: two pairs for each lane of a warp.
constexpr int kMostBlock = 128;

struct QuantizeParams {
  const void* x;         // [rows, ..]
  void *codes, *scales;  // [rows, blocks * block] of the format, e8m0 [rows, blocks]; no scales with `fixed`
  const unsigned char* fixed;  // e8m0 [blocks], calibrated; null: scales are found by the largest values
  long long x_pitch, codes_pitch, scales_pitch, count;  // count: rows * blocks
  int blocks, block, start, element, format;            // start: first column of x that is quantised
};

struct DequantizeParams {
  const void *codes, *scales, *base;  // base: values outside the range, may be null
  void* y;                            // [rows, columns]
  long long codes_pitch, scales_pitch, base_pitch, y_pitch;
  int columns, start, stop, block, format, element, wide_scales;  // wide_scales: f32, otherwise e8m0
};

}  // namespace rewright
