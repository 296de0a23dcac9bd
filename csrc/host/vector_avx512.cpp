// Loops of vector.h for AVX-512 (F, BW, VL): 16 floats are one register.
#if defined(__x86_64__)
#include <immintrin.h>

#include "math.h"
#include "vector_sets.h"

namespace rewright {
namespace avx512 {
namespace {

constexpr int kMostRows = 12;

struct V {
  __m512 a;

  static V load(const float* from) { return {_mm512_loadu_ps(from)}; }
  void store(float* to) const { _mm512_storeu_ps(to, a); }
  static V set(float value) { return {_mm512_set1_ps(value)}; }
  static V mul(V x, V y) { return {_mm512_mul_ps(x.a, y.a)}; }
  static V add(V x, V y) { return {_mm512_add_ps(x.a, y.a)}; }
  static V fma(V x, V y, V z) { return {_mm512_fmadd_ps(x.a, y.a, z.a)}; }
  static V widen_bf16(const uint16_t* from) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16))};
  }
  static V widen_half(const uint16_t* from) {
    return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)))};
  }
  // As with AVX2: the code as a half is its value times 2^-8.
  static V widen_e4m3(const uint8_t* from) {
    const __m256i code = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
    const __m256i sign = _mm256_and_si256(_mm256_slli_epi16(code, 8), _mm256_set1_epi16(static_cast<short>(0x8000)));
    const __m256i rest = _mm256_and_si256(_mm256_slli_epi16(code, 7), _mm256_set1_epi16(0x3f80));
    return mul({_mm512_cvtph_ps(_mm256_or_si256(sign, rest))}, set(256.0f));
  }
  static V e2m1(__m128i codes) {
    const __m128i table = _mm_setr_epi8(0, 0x38, 0x3c, 0x3e, 0x40, 0x42, 0x44, 0x46, static_cast<char>(0x80),
                                        static_cast<char>(0xb8), static_cast<char>(0xbc), static_cast<char>(0xbe),
                                        static_cast<char>(0xc0), static_cast<char>(0xc2), static_cast<char>(0xc4),
                                        static_cast<char>(0xc6));
    return {_mm512_cvtph_ps(_mm256_slli_epi16(_mm256_cvtepu8_epi16(_mm_shuffle_epi8(table, codes)), 8))};
  }
  static void widen_e2m1(const uint8_t* from, V& even, V& odd) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    const __m128i low = _mm_set1_epi8(15);
    even = e2m1(_mm_and_si128(bytes, low));
    odd = e2m1(_mm_and_si128(_mm_srli_epi16(bytes, 4), low));
  }
  static V widen_e8m0(const uint8_t* from) {
    const __m512i wide = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
    __m512i bits = _mm512_slli_epi32(wide, 23);
    bits = _mm512_mask_set1_epi32(bits, _mm512_cmpeq_epi32_mask(wide, _mm512_setzero_si512()), 0x00400000);
    bits = _mm512_mask_set1_epi32(bits, _mm512_cmpeq_epi32_mask(wide, _mm512_set1_epi32(255)), 0x7fc00000);
    return {_mm512_castsi512_ps(bits)};
  }
};

#include "vector_loops.h"

}  // namespace
}  // namespace avx512

const Vector kAvx512 = {"avx512", avx512::widen_bf16, avx512::widen_half, avx512::widen_e4m3, avx512::widen_e2m1, avx512::widen_e8m0, avx512::chain, avx512::lanes, avx512::lanes64, avx512::exp, avx512::exps_ulp1, avx512::softpluses};

}  // namespace rewright
#endif
