// Elementary functions as the reference computes them: the same polynomial in the same order, so a
// result does not depend on the C library. Coefficients: minimax fits of exp on [-ln2/2, ln2/2] and of
// log, as published with SLEEF (1 ulp). Functions are static: files compiled for another instruction
// set must not lend their copies to the others.
//
// The reference's loops over vectors leave a rest at the end of a tensor to the C library. Functions
// called ..._scalar are those of the rest; `in_vectors` tells how far the vectors reach.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

namespace rewright {

// Without branches, so that a loop over it is vectorised.
static inline float exp_ulp1(float x) {
  const float within = x < -104.0f ? -104.0f : x > 104.0f ? 104.0f : x;  // NaN stays
  constexpr float kShift = 0x1.8p23f;  // a number added to it is rounded to an integer, its lowest bits
  const float shifted = within * 1.442695040888963407359924681001892137426645954152985934135449406931f + kShift;
  const float q = shifted - kShift;
  float s = std::fma(q, -0.693145751953125f, within);
  s = std::fma(q, -1.428606765330187045e-06f, s);
  float u = 0.000198527617612853646278381f;
  u = std::fma(u, s, 0.00139304355252534151077271f);
  u = std::fma(u, s, 0.00833336077630519866943359f);
  u = std::fma(u, s, 0.0416664853692054748535156f);
  u = std::fma(u, s, 0.166666671633720397949219f);
  u = std::fma(u, s, 0.5f);
  u = 1.0f + std::fma(s * s, u, s);
  // 2^q in two factors: q may lie outside the exponents of normal floats.
  const int32_t e = std::bit_cast<int32_t>(shifted) - std::bit_cast<int32_t>(kShift), half = e >> 1;
  u *= std::bit_cast<float>(static_cast<uint32_t>(half + 127) << 23);
  u *= std::bit_cast<float>(static_cast<uint32_t>(e - half + 127) << 23);
  u = x < -104.0f ? 0.0f : u;
  return x > 100.0f ? std::bit_cast<float>(0x7f800000u) : u;
}

static inline float sigmoid(float x) { return 1.0f / (1.0f + exp_ulp1(-x)); }
static inline float sigmoid_scalar(float x) { return 1.0f / (1.0f + std::exp(-x)); }

// log(1 + x) for x >= 0: the exponent of 1 + x times log 2, plus 2 atanh(m / (2 + m)) of the rest m, the
// sum of both carried in two floats.
static inline float log1p_ulp1(float x) {
  const int e = static_cast<int>(std::bit_cast<uint32_t>((x + 1.0f) * (1.0f / 0.75f)) >> 23) - 127;
  const float down = std::bit_cast<float>(static_cast<uint32_t>(127 - e) << 23);
  const float m = std::fma(x, down, down - 1.0f), exponent = static_cast<float>(e);
  const float log2_high = 0.69314718246459960938f, log2_low = -1.904654323148236017e-09f;
  const float part = log2_high * exponent;
  const float part_low = std::fma(log2_low, exponent, std::fma(log2_high, exponent, -part));

  const float divisor = 2.0f + m, divisor_low = (2.0f - divisor) + m, inverse = 1.0f / divisor;
  const float q = m * inverse;
  const float error = std::fma(-divisor_low, inverse, std::fma(-divisor, inverse, 1.0f));
  const float q_low = std::fma(q, error, std::fma(inverse, m, -q));

  const float q2 = q * q;
  float p = std::fma(0.3027294874e+0f, q2, 0.3996108174e+0f);
  p = std::fma(p, q2, 0.6666694880e+0f);
  const float cubic = (q2 * q) * p;
  const float head = part + 2.0f * q;
  const float sum = head + cubic;
  const float head_low = (((part - head) + 2.0f * q) + part_low) + 2.0f * q_low;
  return sum + (((head - sum) + cubic) + head_low);
}

// log(1 + exp(x)).
static inline float softplus(float x) { return x > 20.0f ? x : log1p_ulp1(exp_ulp1(x)); }
static inline float softplus_scalar(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

// Of `count` elements that begin at element `first` of the `all` that a sequence has, those that the
// reference's loops over fp32 vectors (two of 8 lanes at a time) reach.
static inline int64_t in_vectors(int64_t all, int64_t first, int64_t count) {
  const int64_t left = all / 16 * 16 - first;
  return left < 0 ? 0 : left < count ? left : count;
}

// exp rounded once from double: what a vector math library gives in all but one of a hundred values. Plain
// arithmetic, so that a loop over it is vectorised for any instruction set with the same result.
static inline float exp_rounded(float x) {
  const double d = x < -150.0f ? -150.0 : x > 150.0f ? 150.0 : static_cast<double>(x);
  constexpr double kShift = 0x1.8p52;  // a number added to it is rounded to an integer, its lowest bits
  const double shifted = d * 1.4426950408889634 + kShift;
  const double q = shifted - kShift;
  const double r = d - q * 0.6931471805599453;  // |r| <= ln2 / 2: the first term left out is 7e-12
  double p = 1.0 / 362880;
  p = p * r + 1.0 / 40320;
  p = p * r + 1.0 / 5040;
  p = p * r + 1.0 / 720;
  p = p * r + 1.0 / 120;
  p = p * r + 1.0 / 24;
  p = p * r + 1.0 / 6;
  p = p * r + 0.5;
  p = p * r + 1.0;
  p = p * r + 1.0;
  // 2^q as a factor, so that NaN stays what it is.
  return static_cast<float>(p * std::bit_cast<double>((std::bit_cast<uint64_t>(shifted) + 1023) << 52));
}

}  // namespace rewright
