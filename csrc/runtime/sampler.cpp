#include "sampler.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "error.h"

namespace rewright {
namespace {

// Uniform in [0, 1), 53 bits.
double uniform(uint64_t seed, uint64_t draw) {
  const auto bits = philox(seed, draw);
  return static_cast<double>((uint64_t{bits[0]} << 32 | bits[1]) >> 11) * 0x1p-53;
}

int64_t largest(const float* logits, int64_t count) {
  int64_t best = 0;
  for (int64_t i = 0; i < count; ++i) {
    check(!std::isnan(logits[i]), "the logit of token " + std::to_string(i) + " is NaN");
    if (logits[i] > logits[best]) best = i;
  }
  check(std::isfinite(logits[best]), "no logit is finite");
  return best;
}

}  // namespace

std::array<uint32_t, 4> philox(uint64_t key, uint64_t counter) {
  std::array<uint32_t, 4> x = {static_cast<uint32_t>(counter), static_cast<uint32_t>(counter >> 32), 0, 0};
  uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t{0xD2511F53u} * x[0], b = uint64_t{0xCD9E8D57u} * x[2];
    x = {static_cast<uint32_t>(b >> 32) ^ x[1] ^ k0, static_cast<uint32_t>(b), static_cast<uint32_t>(a >> 32) ^ x[3] ^ k1,
         static_cast<uint32_t>(a)};
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return x;
}

int32_t sample(const float* logits, int64_t count, double temperature, double top_p, uint64_t seed, uint64_t draw) {
  check(count > 0, "there are no logits");
  const int64_t best = largest(logits, count);
  if (temperature == 0) return static_cast<int32_t>(best);
  // Relative to the largest nothing overflows.
  std::vector<double> weights(count);
  for (int64_t i = 0; i < count; ++i) weights[i] = std::exp((double{logits[i]} - logits[best]) / temperature);
  std::vector<int32_t> order(count);
  std::iota(order.begin(), order.end(), 0);
  double total = std::accumulate(weights.begin(), weights.end(), 0.0);
  if (top_p < 1) {
    std::sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
      return logits[a] != logits[b] ? logits[a] > logits[b] : a < b;
    });
    double kept = 0;
    size_t size = 0;
    while (size < order.size() && kept < top_p * total) kept += weights[order[size++]];
    order.resize(std::max<size_t>(size, 1));
    total = kept;
  }
  double left = uniform(seed, draw) * total;
  for (const int32_t token : order) {
    left -= weights[token];
    if (left < 0) return token;
  }
  // Rounding of the sum: the last token that can be drawn at all.
  for (auto token = order.rbegin(); token != order.rend(); ++token) {
    if (weights[*token] > 0) return *token;
  }
  return static_cast<int32_t>(best);
}

}  // namespace rewright
