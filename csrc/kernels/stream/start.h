// Parameters of the kernel in start.cu.
#pragma once

#include "stream.h"

namespace rewright {

constexpr int kStartTiles = 8;  // of a block

struct StartParams {
  const int* tokens;
  const unsigned short* table;  // bf16[V,D], rows `pitch` bytes apart
  long long pitch;
  int vocabulary, rows;
  Combine combine;              // `before` is null: every stream is the token's row
  Order order;
};

}  // namespace rewright
