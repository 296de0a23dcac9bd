// Rows as bytes.
#pragma once

#include "cuda.cuh"

namespace rewright {

// Copies `bytes` by the whole block in words of `unit` bytes: 16, 4, 2 or 1, of which both addresses and
// the size are multiples.
DEVICE void copy_bytes(void* to, const void* from, i64 bytes, int unit) {
  const i64 count = bytes / unit;
  for (i64 i = threadIdx.x; i < count; i += blockDim.x) {
    if (unit == 16) ((uint4*)to)[i] = ((const uint4*)from)[i];
    else if (unit == 4) ((u32*)to)[i] = ((const u32*)from)[i];
    else if (unit == 2) ((u16*)to)[i] = ((const u16*)from)[i];
    else ((u8*)to)[i] = ((const u8*)from)[i];
  }
}

}  // namespace rewright
