// expert_sum: the sum over a token's experts in ascending id whatever the order of the list, the shared expert
// last; fp32, rounded once. Four columns a thread, 1024 a block; bound by memory.
#include "expert_sum.cuh"

namespace rewright {

KERNEL(expert_sum, ExpertSumParams, 256, 1) {
  __shared__ int order[kMostSummed];
  const int row = blockIdx.x / p.parts, quad = blockIdx.x % p.parts * 256 + threadIdx.x;
  expert_order((const int*)row_of(p.experts, row, p.experts_pitch), p.k, threadIdx.x, order);
  __syncthreads();
  if (quad < p.columns / 4) store_four(row_of(p.y, row, p.y_pitch), quad, p.element, expert_sum_four(p, row, quad, order));
}

}  // namespace rewright
