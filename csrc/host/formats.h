// Exact conversion between fp32 and the stored formats; ir/formats.py is the same in torch.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

namespace rewright {

inline float bf16_to_float(uint16_t bits) { return std::bit_cast<float>(uint32_t{bits} << 16); }

// Round to nearest, ties to even; NaN stays NaN.
inline uint16_t float_to_bf16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fc0;
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline float round_to_bf16(float value) { return bf16_to_float(float_to_bf16(value)); }

// 2^(byte - 127); byte 255 is NaN.
inline float e8m0_to_float(uint8_t byte) {
  if (byte == 0) return std::bit_cast<float>(0x00400000u);
  if (byte == 255) return std::bit_cast<float>(0x7fc00000u);
  return std::bit_cast<float>(uint32_t{byte} << 23);
}

// Values of the 256 e4m3 codes, and of the 16 e2m1 codes.
extern const float kE4M3[256];
extern const float kE2M1[16];

// IEEE half precision.
float half_to_float(uint16_t bits);

// Nearest e4m3 code of a value within [-448, 448], ties to even.
uint8_t float_to_e4m3(float value);

// Nearest e2m1 code of a value within [-6, 6], ties to the even code.
uint8_t float_to_e2m1(float value);

enum class Codes { kE4M3, kE2M1 };

inline float largest(Codes codes) { return codes == Codes::kE4M3 ? 448.0f : 6.0f; }

// Exponent e of the block scale 2^e for the largest magnitude of a block: `block_scale_exponent`.
int block_exponent(float amax, Codes codes);

// Quantise x[count] in blocks: codes (e2m1: two a byte) and one e8m0 byte a block. x is left as it is.
void quantize_row(const float* x, int64_t count, int64_t block, Codes codes, uint8_t* out, uint8_t* scales);

// The same with given scales.
void quantize_row_fixed(const float* x, int64_t count, int64_t block, Codes codes, const uint8_t* scales, uint8_t* out);

// quantize_row and back: x[count] rounded to what its codes say.
void round_row(float* x, int64_t count, int64_t block, Codes codes);

// The same with given scales.
void round_row_fixed(float* x, int64_t count, int64_t block, Codes codes, const uint8_t* scales);

}  // namespace rewright
