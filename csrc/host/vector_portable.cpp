// Loops of vector.h in plain C++: any processor. Slow where the processor has no fused multiply-add.
#include "formats.h"
#include "math.h"
#include "vector_sets.h"

namespace rewright {
namespace portable {
namespace {

constexpr int kMostRows = 4;

struct V {
  float v[kTile];

  template <typename F>
  static V each(F f) {
    V result;
    for (int i = 0; i < kTile; ++i) result.v[i] = f(i);
    return result;
  }
  static V load(const float* from) { return each([from](int i) { return from[i]; }); }
  void store(float* to) const {
    for (int i = 0; i < kTile; ++i) to[i] = v[i];
  }
  static V set(float value) { return each([value](int) { return value; }); }
  static V mul(const V& a, const V& b) { return each([&](int i) { return a.v[i] * b.v[i]; }); }
  static V add(const V& a, const V& b) { return each([&](int i) { return a.v[i] + b.v[i]; }); }
  static V fma(const V& a, const V& b, const V& c) { return each([&](int i) { return std::fma(a.v[i], b.v[i], c.v[i]); }); }
  static V widen_bf16(const uint16_t* from) { return each([from](int i) { return bf16_to_float(from[i]); }); }
  static V widen_half(const uint16_t* from) { return each([from](int i) { return half_to_float(from[i]); }); }
  static V widen_e4m3(const uint8_t* from) { return each([from](int i) { return kE4M3[from[i]]; }); }
  static V widen_e8m0(const uint8_t* from) { return each([from](int i) { return e8m0_to_float(from[i]); }); }
  static void widen_e2m1(const uint8_t* from, V& even, V& odd) {
    even = each([from](int i) { return kE2M1[from[i] & 15]; });
    odd = each([from](int i) { return kE2M1[from[i] >> 4]; });
  }
};

#include "vector_loops.h"

}  // namespace
}  // namespace portable

const Vector kPortable = {"portable", portable::widen_bf16, portable::widen_half, portable::widen_e4m3, portable::widen_e2m1, portable::widen_e8m0, portable::chain, portable::lanes, portable::lanes64, portable::exp, portable::exps_ulp1, portable::softpluses};

}  // namespace rewright
