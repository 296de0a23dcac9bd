// Block quantisation with power-of-two scales, and its inverse, one op a launch.
//
// quantize: codes and one e8m0 scale for each block of a range of the last axis, or codes by calibrated
// scales; a warp a block, 8 blocks of values a thread block. dequantize: code times scale, exact in bf16, the values around the range taken from
// `base`; a thread block a row. Bound by memory.
#include "quantize.cuh"

namespace rewright {

KERNEL(quantize, QuantizeParams, 256, 1) {
  const i64 at = (i64)blockIdx.x * 8 + warp_id();
  if (at < p.count) quantize_row_block(p, at / p.blocks, (int)(at % p.blocks));
}

KERNEL(dequantize, DequantizeParams, 256, 1) {
  const int row = blockIdx.x;
  const u8* codes = (const u8*)row_of(p.codes, row, p.codes_pitch);
  const void* scales = row_of(p.scales, row, p.scales_pitch);
  const void* base = row_of(p.base, row, p.base_pitch);
  void* y = row_of(p.y, row, p.y_pitch);
  for (int pair = threadIdx.x; pair < p.columns / 2; pair += blockDim.x) {
    float2 v;
    const int i = 2 * pair - p.start;
    if (i < 0 || 2 * pair >= p.stop) {
      v = load_pair(base, pair, p.element);
    } else {
      const int block = i / p.block;
      const float scale = p.wide_scales ? ((const float*)scales)[block] : e8m0_to_float(((const u8*)scales)[block]);
      if (p.format == kE2M1Codes) {
        v = make_float2(e2m1_to_float(codes[i / 2] & 15u), e2m1_to_float(codes[i / 2] >> 4));
      } else {
        v = make_float2(e4m3_to_float(codes[i]), e4m3_to_float(codes[i + 1]));
      }
      v = make_float2(v.x * scale, v.y * scale);
    }
    store_pair(y, pair, p.element, v);
  }
}

}  // namespace rewright
