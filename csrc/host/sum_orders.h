// The orders in which the reference's reductions add, over any type with + (a float, or several columns
// side by side). A sum over the last axis runs in lanes (`sum_contiguous`); one over another axis runs down
// the columns, which the reference takes 32 at a time (`sum_cascaded`) with the rest one vector or one
// element at a time (`sum_interleaved`). `load(i)` gives term i.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

namespace rewright {

constexpr int64_t kSumLanes = 8;       // fp32 elements of the reference's vectors
constexpr int64_t kSumTogether = 4;    // vectors of columns that it sums at a time
constexpr int kSumLevels = 4;

// One after the other, in blocks of 16 (or more) whose sums are added up.
template <typename V, typename Load>
V sum_cascaded(Load load, int64_t count) {
  const int log2 = static_cast<int>(std::bit_width(static_cast<uint64_t>(std::max<int64_t>(count, 1) - 1)));
  const int power = std::max(4, log2 / kSumLevels);
  const int64_t step = int64_t{1} << power;
  V levels[kSumLevels] = {};
  int64_t i = 0;
  while (i + step <= count) {
    for (int64_t end = i + step; i < end; ++i) levels[0] += load(i);
    for (int level = 1; level < kSumLevels; ++level) {
      levels[level] += levels[level - 1];
      levels[level - 1] = V{};
      if ((i & ((step - 1) << (level * power))) != 0) break;
    }
  }
  for (; i < count; ++i) levels[0] += load(i);
  for (int level = 1; level < kSumLevels; ++level) levels[0] += levels[level];
  return levels[0];
}

// Four such sums over i modulo 4, added up.
template <typename V, typename Load>
V sum_interleaved(Load load, int64_t count) {
  constexpr int64_t kSums = 4;
  const int64_t rows = count / kSums;
  V total{};
  for (int64_t k = 0; k < kSums; ++k) {
    V sum = sum_cascaded<V>([&](int64_t row) { return load(row * kSums + k); }, rows);
    if (k == 0) {
      for (int64_t i = rows * kSums; i < count; ++i) sum += load(i);
      total = sum;
    } else {
      total += sum;
    }
  }
  return total;
}

// Terms that lie side by side. `narrow`: they are bf16, of which the reference's vectors hold 16, pairs
// eight apart being added first.
template <typename V, typename Load>
V sum_contiguous(Load load, int64_t count, bool narrow) {
  const int64_t step = narrow ? 2 * kSumLanes : kSumLanes;
  if (count < step) return sum_interleaved<V>(load, count);
  const int64_t vectors = count / step;
  V total{};
  for (int64_t i = vectors * step; i < count; ++i) total += load(i);
  for (int64_t lane = 0; lane < kSumLanes; ++lane) {
    if (narrow) {
      total += sum_interleaved<V>(
          [&](int64_t i) {
            V pair = load(i * step + lane);
            pair += load(i * step + kSumLanes + lane);
            return pair;
          },
          vectors);
    } else {
      total += sum_interleaved<V>([&](int64_t i) { return load(i * step + lane); }, vectors);
    }
  }
  return total;
}

// Of `columns` columns that are summed down, how many are cascaded; the rest are interleaved.
inline int64_t cascaded_columns(int64_t columns, bool narrow) {
  const bool vectors = columns >= (narrow ? 2 * kSumLanes : kSumLanes);
  const int64_t together = vectors ? kSumTogether * kSumLanes : kSumTogether;
  return columns / together * together;
}

// Columns that are summed side by side.
template <int N>
struct Columns {
  float v[N] = {};
  Columns& operator+=(const Columns& other) {
    for (int i = 0; i < N; ++i) v[i] += other.v[i];
    return *this;
  }
};

}  // namespace rewright
