// Choice of experts, one op a launch.
//
// route: the k best of sqrt(softplus(logits)) + bias. route_hash: experts from a table. Weights are the unbiased
// scores over their sum, times a factor. A warp a token, 4 tokens a block; bound by latency.
#include "route.cuh"

namespace rewright {

KERNEL(route, RouteParams, 128, 1) {
  const int row = blockIdx.x * 4 + warp_id();
  if (row < p.rows) route_row(p, row);
}

KERNEL(route_hash, RouteParams, 128, 1) {
  const int row = blockIdx.x * 4 + warp_id();
  if (row < p.rows) route_row(p, row);
}

}  // namespace rewright
