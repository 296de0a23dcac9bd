// Loops of vector.h for AVX2 with FMA and F16C: 16 floats are two registers.
#if defined(__x86_64__)
#include <immintrin.h>

#include "math.h"
#include "vector_sets.h"

namespace rewright {
namespace avx2 {
namespace {

constexpr int kMostRows = 6;  // 12 of the 16 registers are sums

struct V {
  __m256 a, b;

  static V load(const float* from) { return {_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8)}; }
  void store(float* to) const {
    _mm256_storeu_ps(to, a);
    _mm256_storeu_ps(to + 8, b);
  }
  static V set(float value) { return {_mm256_set1_ps(value), _mm256_set1_ps(value)}; }
  static V mul(V x, V y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
  static V add(V x, V y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
  static V fma(V x, V y, V z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }

  static __m256 bf16(__m128i bits) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
  }
  static V widen_bf16(const uint16_t* from) {
    const __m128i* at = reinterpret_cast<const __m128i*>(from);
    return {bf16(_mm_loadu_si128(at)), bf16(_mm_loadu_si128(at + 1))};
  }
  static V half(__m256i bits) {
    return {_mm256_cvtph_ps(_mm256_castsi256_si128(bits)), _mm256_cvtph_ps(_mm256_extracti128_si256(bits, 1))};
  }
  static V widen_half(const uint16_t* from) { return half(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))); }
  // A code moved into a half has the exponent's bias 15 instead of 7: its value times 2^-8, subnormal
  // codes included. NaN codes are refused when a model is compiled.
  static V widen_e4m3(const uint8_t* from) {
    const __m256i code = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
    const __m256i sign = _mm256_and_si256(_mm256_slli_epi16(code, 8), _mm256_set1_epi16(static_cast<short>(0x8000)));
    const __m256i rest = _mm256_and_si256(_mm256_slli_epi16(code, 7), _mm256_set1_epi16(0x3f80));
    return mul(half(_mm256_or_si256(sign, rest)), set(256.0f));
  }
  // The upper bytes of the 16 values as halves; their lower bytes are zero.
  static V e2m1(__m128i codes) {
    const __m128i table = _mm_setr_epi8(0, 0x38, 0x3c, 0x3e, 0x40, 0x42, 0x44, 0x46, static_cast<char>(0x80),
                                        static_cast<char>(0xb8), static_cast<char>(0xbc), static_cast<char>(0xbe),
                                        static_cast<char>(0xc0), static_cast<char>(0xc2), static_cast<char>(0xc4),
                                        static_cast<char>(0xc6));
    const __m256i wide = _mm256_cvtepu8_epi16(_mm_shuffle_epi8(table, codes));
    return half(_mm256_slli_epi16(wide, 8));
  }
  static void widen_e2m1(const uint8_t* from, V& even, V& odd) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    const __m128i low = _mm_set1_epi8(15);
    even = e2m1(_mm_and_si128(bytes, low));
    odd = e2m1(_mm_and_si128(_mm_srli_epi16(bytes, 4), low));
  }
  static __m256 e8m0(__m128i bytes) {
    const __m256i wide = _mm256_cvtepu8_epi32(bytes);
    __m256i bits = _mm256_slli_epi32(wide, 23);
    // Byte 0 is 2^-127, a subnormal float; byte 255 is NaN.
    bits = _mm256_or_si256(bits, _mm256_and_si256(_mm256_cmpeq_epi32(wide, _mm256_setzero_si256()), _mm256_set1_epi32(0x00400000)));
    bits = _mm256_or_si256(bits, _mm256_and_si256(_mm256_cmpeq_epi32(wide, _mm256_set1_epi32(255)), _mm256_set1_epi32(0x7fc00000)));
    return _mm256_castsi256_ps(bits);
  }
  static V widen_e8m0(const uint8_t* from) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    return {e8m0(bytes), e8m0(_mm_srli_si128(bytes, 8))};
  }
};

#include "vector_loops.h"

}  // namespace
}  // namespace avx2

const Vector kAvx2 = {"avx2+fma", avx2::widen_bf16, avx2::widen_half, avx2::widen_e4m3, avx2::widen_e2m1, avx2::widen_e8m0, avx2::chain, avx2::lanes, avx2::lanes64, avx2::exp, avx2::exps_ulp1, avx2::softpluses};

}  // namespace rewright
#endif
