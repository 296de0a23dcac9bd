// Mixing logits to coefficients, one op a launch.
//
// hc_split: pre, post, and the matrix comb made doubly stochastic; a warp a token, 4 tokens a block; bound by
// the latency of the Sinkhorn steps, each a sum over lanes and a division. hc_head_split: a thread a logit.
#include "split.cuh"

namespace rewright {

KERNEL(hc_split, HcSplitParams, 128, 1) {
  const int row = blockIdx.x * 4 + warp_id();
  if (row < p.rows) hc_split_row(p, row);
}

KERNEL(hc_head_split, HcHeadSplitParams, 128, 1) {
  const int at = blockIdx.x * 128 + threadIdx.x, row = at / p.streams, j = at % p.streams;
  if (row >= p.rows) return;
  const float logit = ((const float*)row_of(p.mix, row, p.mix_pitch))[j];
  ((float*)row_of(p.y, row, p.y_pitch))[j] = hc_head_coefficient(p, logit, j);
}

}  // namespace rewright
