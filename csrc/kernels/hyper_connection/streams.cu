// The residual streams around a sub-block, one op a launch; all bound by memory.
//
// hc_expand: copies of the embedding, a block a row. hc_collapse: the weighted sum of the streams, in fp32 and
// rounded once. hc_combine: streams after a sub-block. The latter take four columns a thread, 1024 a block.
#include "streams.cuh"

namespace rewright {

KERNEL(hc_expand, HcExpandParams, 256, 1) {
  const int row = blockIdx.x;
  const void* x = row_of(p.x, row, p.x_pitch);
  for (int i = threadIdx.x; i < p.columns / 4; i += blockDim.x) {
    const float4 v = load_four(x, i, p.element);
    for (int j = 0; j < p.streams; ++j) store_four(row_of(p.y, (i64)row * p.streams + j, p.y_pitch), i, p.element, v);
  }
}

KERNEL(hc_collapse, HcCollapseParams, 256, 1) {
  const int row = blockIdx.x / p.parts, quad = blockIdx.x % p.parts * 256 + threadIdx.x;
  if (quad >= p.columns / 4) return;
  const float4 sum = hc_collapse_four(p, row, quad, (const float*)row_of(p.pre, row, p.pre_pitch));
  store_four(row_of(p.y, row, p.y_pitch), quad, p.element, sum);
}

KERNEL(hc_combine, HcCombineParams, 256, 1) {
  const int row = blockIdx.x / p.parts, quad = blockIdx.x % p.parts * 256 + threadIdx.x;
  if (quad >= p.columns / 4) return;
  const float* post = (const float*)row_of(p.post, row, p.post_pitch);
  const float* comb = (const float*)row_of(p.comb, (i64)row * p.streams, p.comb_pitch);
  const float4 y = load_four(row_of(p.y, row, p.y_pitch), quad, p.y_element);
  hc_combine_four(p, row, quad, y, post, comb, p.comb_pitch / 4, [&](int k, float4 v) {
    store_four(row_of(p.out, (i64)row * p.streams + k, p.out_pitch), quad, p.element, v);
  });
}

}  // namespace rewright
