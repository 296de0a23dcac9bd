#include "sum.h"

#include <algorithm>
#include <bit>

#include "formats.h"

namespace rewright {
namespace {

constexpr int kLanes = 8, kRunning = 4, kLevels = 4;

// Sum over i of load(i, lane) for each lane, i < size: `kRunning` sums over i modulo 4, of which the low
// level is folded into the next after each full step.
template <typename Load>
void sum_lanes(Load load, int64_t size, float* lanes) {
  const int64_t rows = size / kRunning;
  const int log2_rows = static_cast<int>(std::bit_width(static_cast<uint64_t>(std::max<int64_t>(rows, 1) - 1)));
  const int power = std::max(4, log2_rows / kLevels);
  const int64_t step = int64_t{1} << power;
  float sums[kLevels][kRunning][kLanes] = {};
  const auto add_row = [&](int64_t row) {
    for (int k = 0; k < kRunning; ++k) {
      for (int lane = 0; lane < kLanes; ++lane) sums[0][k][lane] += load(row * kRunning + k, lane);
    }
  };
  int64_t i = 0;
  while (i + step <= rows) {
    for (int64_t j = 0; j < step; ++j) add_row(i++);
    for (int level = 1; level < kLevels; ++level) {
      for (int k = 0; k < kRunning; ++k) {
        for (int lane = 0; lane < kLanes; ++lane) {
          sums[level][k][lane] += sums[level - 1][k][lane];
          sums[level - 1][k][lane] = 0;
        }
      }
      if ((i & ((step - 1) << (level * power))) != 0) break;
    }
  }
  for (; i < rows; ++i) add_row(i);
  for (int level = 1; level < kLevels; ++level) {
    for (int k = 0; k < kRunning; ++k) {
      for (int lane = 0; lane < kLanes; ++lane) sums[0][k][lane] += sums[level][k][lane];
    }
  }
  for (int64_t rest = rows * kRunning; rest < size; ++rest) {
    for (int lane = 0; lane < kLanes; ++lane) sums[0][0][lane] += load(rest, lane);
  }
  for (int lane = 0; lane < kLanes; ++lane) {
    lanes[lane] = sums[0][0][lane];
    for (int k = 1; k < kRunning; ++k) lanes[lane] += sums[0][k][lane];
  }
}

// The rest that fills no vector first, then the lanes.
template <typename Term>
float finish(Term term, int64_t from, int64_t count, const float* lanes) {
  float total = 0;
  for (int64_t i = from; i < count; ++i) total += term(i);
  for (int lane = 0; lane < kLanes; ++lane) total += lanes[lane];
  return total;
}

template <typename Term>
float sum_terms(Term term, int64_t count) {
  if (count < kLanes) {  // fills no vector: the same with one lane
    float sums[kRunning] = {};
    const int64_t whole = count / kRunning * kRunning;
    for (int64_t i = 0; i < whole; ++i) sums[i % kRunning] += term(i);
    for (int64_t i = whole; i < count; ++i) sums[0] += term(i);
    return ((sums[0] + sums[1]) + sums[2]) + sums[3];
  }
  float lanes[kLanes] = {};
  const int64_t vectors = count / kLanes;
  sum_lanes([&](int64_t i, int lane) { return term(i * kLanes + lane); }, vectors, lanes);
  return finish(term, vectors * kLanes, count, lanes);
}

template <typename Term>
float sum_pairs(Term term, int64_t count) {
  float lanes[kLanes] = {};
  const int64_t vectors = count / (2 * kLanes);
  const auto pair = [&](int64_t i, int lane) { return term(i * 2 * kLanes + lane) + term(i * 2 * kLanes + kLanes + lane); };
  sum_lanes(pair, vectors, lanes);
  return finish(term, vectors * 2 * kLanes, count, lanes);
}

}  // namespace

float sum_in_order(const float* x, int64_t count) {
  return sum_terms([x](int64_t i) { return x[i]; }, count);
}

float sum_in_order_bf16(const float* x, int64_t count) {
  return sum_pairs([x](int64_t i) { return x[i]; }, count);
}

float mean_square(const float* x, int64_t count) {
  return sum_terms([x](int64_t i) { return x[i] * x[i]; }, count) / static_cast<float>(count);
}

float mean_square_bf16(const float* x, int64_t count) {
  return sum_pairs([x](int64_t i) { return round_to_bf16(x[i] * x[i]); }, count) / static_cast<float>(count);
}

}  // namespace rewright
