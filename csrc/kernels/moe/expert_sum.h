// Parameters of the kernel in expert_sum.cu.
#pragma once

namespace rewright {

constexpr int kMostSummed = 8;  // experts of a token

struct ExpertSumParams {
  const void* routed;   // [rows, k, columns]
  const int* experts;   // [rows, k]
  const void* shared;   // [rows, columns]
  void* y;              // like shared
  long long routed_pitch, experts_pitch, shared_pitch, y_pitch;
  int k, columns, routed_element, element, parts;  // parts: blocks of a row
};

}  // namespace rewright
