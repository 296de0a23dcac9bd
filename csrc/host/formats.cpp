#include "formats.h"

#include <algorithm>
#include <array>

namespace rewright {
namespace {

constexpr std::array<float, 256> e4m3_values() {
  std::array<float, 256> values{};
  for (int code = 0; code < 256; ++code) {
    const int exponent = code >> 3 & 15, mantissa = code & 7;
    float value = exponent ? 1.0f + static_cast<float>(mantissa) / 8 : static_cast<float>(mantissa) / 8;
    for (int i = exponent ? exponent : 1; i < 7; ++i) value /= 2;
    for (int i = 7; i < exponent; ++i) value *= 2;
    values[code] = code & 128 ? -value : value;
  }
  values[127] = std::bit_cast<float>(0x7fc00000u);
  values[255] = std::bit_cast<float>(0xffc00000u);
  return values;
}

constexpr std::array<float, 256> kE4M3Values = e4m3_values();

}  // namespace

alignas(64) const float kE2M1[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                                     -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};

#define EIGHT(i)                                                                                     \
  kE4M3Values[i], kE4M3Values[i + 1], kE4M3Values[i + 2], kE4M3Values[i + 3], kE4M3Values[i + 4], \
      kE4M3Values[i + 5], kE4M3Values[i + 6], kE4M3Values[i + 7]
#define SIXTYFOUR(i) \
  EIGHT(i), EIGHT(i + 8), EIGHT(i + 16), EIGHT(i + 24), EIGHT(i + 32), EIGHT(i + 40), EIGHT(i + 48), EIGHT(i + 56)
alignas(64) const float kE4M3[256] = {SIXTYFOUR(0), SIXTYFOUR(64), SIXTYFOUR(128), SIXTYFOUR(192)};
#undef SIXTYFOUR
#undef EIGHT

float half_to_float(uint16_t bits) {
  const uint32_t sign = uint32_t{bits & 0x8000u} << 16;
  const int exponent = bits >> 10 & 31;
  const uint32_t mantissa = bits & 0x3ff;
  if (exponent == 31) return std::bit_cast<float>(sign | 0x7f800000u | mantissa << 13);
  const float magnitude = exponent ? std::ldexp(static_cast<float>(1024 + mantissa), exponent - 25)
                                   : std::ldexp(static_cast<float>(mantissa), -24);
  return sign ? -magnitude : magnitude;
}

uint8_t float_to_e4m3(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint8_t sign = static_cast<uint8_t>(bits >> 24 & 0x80);
  const uint32_t magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return sign | 0x7f;
  const float absolute = std::bit_cast<float>(magnitude);
  if (absolute < 0x1p-6f) {  // subnormal codes are multiples of 2^-9; rint ties to even
    return sign | static_cast<uint8_t>(std::rint(absolute * 512.0f));
  }
  // Three bits of mantissa are kept: round the 20 others, then move the exponent's bias from 127 to 7.
  const uint32_t rounded = (magnitude + 0x7ffff + (magnitude >> 20 & 1)) >> 20;
  return sign | static_cast<uint8_t>(std::min<uint32_t>(rounded - (120u << 3), 0x7e));
}

uint8_t float_to_e2m1(float value) {
  const float x = std::abs(value);
  const uint8_t sign = std::signbit(value) ? 8 : 0;
  // Halfway points between magnitudes; a tie goes to the even code.
  if (x <= 0.25f) return sign;
  if (x < 0.75f) return sign | 1;
  if (x <= 1.25f) return sign | 2;
  if (x < 1.75f) return sign | 3;
  if (x <= 2.5f) return sign | 4;
  if (x < 3.5f) return sign | 5;
  if (x <= 5.0f) return sign | 6;
  return sign | 7;
}

int block_exponent(float amax, Codes codes) {
  const float floor = codes == Codes::kE4M3 ? 1e-4f : 6.0f * 0x1p-126f;
  const float inverse = static_cast<float>(1.0 / (codes == Codes::kE4M3 ? 448.0 : 6.0));
  const uint32_t bits = std::bit_cast<uint32_t>(std::max(amax, floor) * inverse);
  return static_cast<int>(bits >> 23) - 127 + ((bits & 0x7fffff) != 0);
}

namespace {

// Loops over integers rather than floats: compilers turn them into vector code, and NaN has a place.

constexpr int32_t kMagnitude = 0x7fffffff, kInfinity = 0x7f800000, kNaN = 0x7fc00000;

// (NaN counts as the largest.)
float amax_of(const float* x, int64_t count) {
  int32_t amax = 0;
  for (int64_t i = 0; i < count; ++i) amax = std::max(amax, std::bit_cast<int32_t>(x[i]) & kMagnitude);
  return std::bit_cast<float>(amax);
}

float power_of_two(int exponent) { return std::ldexp(1.0f, exponent); }

// Bits of |value| within a limit's.
inline int32_t capped(float value, int32_t limit) {
  const int32_t magnitude = std::bit_cast<int32_t>(value) & kMagnitude;
  return magnitude > kInfinity ? kNaN : std::min(magnitude, limit);
}

// Adding and taking away 1.5 * 2^(23 + e) leaves the nearest multiple of 2^e, ties to even.
inline float nearest_multiple(float magnitude, float magic) { return (magnitude + magic) - magic; }

constexpr int32_t kLeastNormal = std::bit_cast<int32_t>(0x1p-6f);  // of e4m3
constexpr float kSubnormals = 0x1.8p14f;                           // multiples of 2^-9

// Bits of the magnitude that the nearest code stands for.
inline int32_t nearest_e4m3(int32_t magnitude) {
  const int32_t normal = (magnitude + 0x7ffff + (magnitude >> 20 & 1)) & ~0xfffff;
  const float subnormal = nearest_multiple(std::bit_cast<float>(magnitude), kSubnormals);
  return magnitude < kLeastNormal ? std::bit_cast<int32_t>(subnormal) : normal;
}

inline int32_t nearest_e2m1(int32_t magnitude) {
  constexpr int32_t kTwo = std::bit_cast<int32_t>(2.0f), kFour = std::bit_cast<int32_t>(4.0f);
  constexpr int32_t kHalves = std::bit_cast<int32_t>(0x1.8p22f), kExponent = 1 << 23;
  const int32_t magic = kHalves + (magnitude >= kTwo ? kExponent : 0) + (magnitude >= kFour ? kExponent : 0);
  const float nearest = nearest_multiple(std::bit_cast<float>(magnitude), std::bit_cast<float>(magic));
  return magnitude > kInfinity ? std::bit_cast<int32_t>(6.0f) : std::bit_cast<int32_t>(nearest);
}

template <int32_t (*nearest)(int32_t)>
void round_block(float* x, int64_t count, float inverse, float scale, float limit) {
  const int32_t most = std::bit_cast<int32_t>(limit);
  for (int64_t i = 0; i < count; ++i) {
    const int32_t sign = std::bit_cast<int32_t>(x[i]) & ~kMagnitude;
    x[i] = std::bit_cast<float>(nearest(capped(x[i] * inverse, most)) | sign) * scale;
  }
}

// float_to_e4m3 of x[count] * inverse within the limit.
void encode_e4m3(const float* x, int64_t count, float inverse, uint8_t* out) {
  const int32_t most = std::bit_cast<int32_t>(largest(Codes::kE4M3));
  for (int64_t i = 0; i < count; ++i) {
    const int32_t magnitude = capped(x[i] * inverse, most);
    // Three bits of mantissa, and the exponent's bias moved from 127 to 7; or multiples of 2^-9.
    const int32_t normal = ((magnitude + 0x7ffff + (magnitude >> 20 & 1)) >> 20) - (120 << 3);
    const int32_t subnormal =
        std::bit_cast<int32_t>(std::bit_cast<float>(magnitude) + kSubnormals) - std::bit_cast<int32_t>(kSubnormals);
    const int32_t code = magnitude < kLeastNormal ? subnormal : magnitude > kInfinity ? 0x7f : normal;
    out[i] = static_cast<uint8_t>(code | (std::bit_cast<int32_t>(x[i]) >> 24 & 0x80));
  }
}

}  // namespace

namespace {

void encode_block(const float* x, int64_t block, Codes codes, int exponent, uint8_t* out) {
  const float limit = largest(codes), inverse = power_of_two(-exponent);
  if (codes == Codes::kE4M3) return encode_e4m3(x, block, inverse, out);
  for (int64_t i = 0; i < block; i += 2) {
    const float low = std::clamp(x[i] * inverse, -limit, limit), high = std::clamp(x[i + 1] * inverse, -limit, limit);
    out[i / 2] = static_cast<uint8_t>(float_to_e2m1(low) | float_to_e2m1(high) << 4);
  }
}

uint8_t* block_codes(uint8_t* row, int64_t element, Codes codes) {
  return row + (codes == Codes::kE4M3 ? element : element / 2);
}

void round_by(float* x, int64_t block, Codes codes, int exponent) {
  const float limit = largest(codes), inverse = power_of_two(-exponent), scale = power_of_two(exponent);
  if (codes == Codes::kE4M3) {
    round_block<nearest_e4m3>(x, block, inverse, scale, limit);
  } else {
    round_block<nearest_e2m1>(x, block, inverse, scale, limit);
  }
}

}  // namespace

void quantize_row(const float* x, int64_t count, int64_t block, Codes codes, uint8_t* out, uint8_t* scales) {
  for (int64_t start = 0; start < count; start += block) {
    const int exponent = block_exponent(amax_of(x + start, block), codes);
    scales[start / block] = static_cast<uint8_t>(exponent + 127);
    encode_block(x + start, block, codes, exponent, block_codes(out, start, codes));
  }
}

void quantize_row_fixed(const float* x, int64_t count, int64_t block, Codes codes, const uint8_t* scales, uint8_t* out) {
  for (int64_t start = 0; start < count; start += block) {
    encode_block(x + start, block, codes, scales[start / block] - 127, block_codes(out, start, codes));
  }
}

void round_row(float* x, int64_t count, int64_t block, Codes codes) {
  for (int64_t start = 0; start < count; start += block) {
    round_by(x + start, block, codes, block_exponent(amax_of(x + start, block), codes));
  }
}

void round_row_fixed(float* x, int64_t count, int64_t block, Codes codes, const uint8_t* scales) {
  for (int64_t start = 0; start < count; start += block) {
    round_by(x + start, block, codes, scales[start / block] - 127);
  }
}

}  // namespace rewright
