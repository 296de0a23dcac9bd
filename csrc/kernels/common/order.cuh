// The device's side of order.h.
#pragma once

#include "cuda.cuh"
#include "order.h"

namespace rewright {

// Returns to the whole block once `*count` has reached `all`; what the counting blocks wrote is seen then.
DEVICE void await(const int* count, int all) {
  if (threadIdx.x == 0) await_count(count, all);
  __syncthreads();
}

// Called by the whole block when its last result is written.
DEVICE void end_block(const Order& order) {
  if (order.done == nullptr) return;
  __syncthreads();
  if (threadIdx.x == 0) add_release(order.done, 1);
}

}  // namespace rewright
