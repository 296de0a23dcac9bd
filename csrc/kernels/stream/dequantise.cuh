// Weight words of the layouts mma8 and mma4 (ir/weight_layout.py) -> operand A of a matrix instruction.
#pragma once

#include "../common/cuda.cuh"

namespace rewright {

// A word of mma8: the fp16 pair of row half 0 lies in place, that of row half 1 in the gaps. Values * 2^-8.
DEVICE void widen8(u32 w, u32& low, u32& high) {
  low = w & 0xBF80BF80u;
  high = ((w << 7) & 0x3F803F80u) | ((w << 1) & 0x80008000u);
}

// A word of mma4: four fp16 pairs, values * 2^-14.
DEVICE void widen4(u32 w, u32 (&a)[4]) {
  a[0] = w & 0x8E008E00u;
  a[1] = (w << 3) & 0x8E008E00u;
  a[2] = ((w << 6) & 0x0E000E00u) | ((w << 1) & 0x80008000u);
  a[3] = ((w << 9) & 0x0E000E00u) | ((w << 2) & 0x80008000u);
}

// fp16 bits of such a value -> bf16 bits of the value itself: the same bits three places lower are it times
// 2^-120 (e4m3) or 2^-126 (e2m1), which a product with a power of two undoes exactly.
DEVICE u32 to_bf16_8(u32 f16) { return mul_bf16x2((f16 & 0x80008000u) | ((f16 & 0x7FF87FF8u) >> 3), 0x7B807B80u); }
DEVICE u32 to_bf16_4(u32 f16) { return mul_bf16x2((f16 & 0x80008000u) | ((f16 & 0x7FF87FF8u) >> 3), 0x7E807E80u); }

}  // namespace rewright
