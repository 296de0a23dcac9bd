// Parameters of the kernels in split.cu.
#pragma once

namespace rewright {

// Streams that a warp can split: their matrix has an element for each lane at most.
constexpr int kMostSplitStreams = 5;

struct HcSplitParams {
  const float* mix;         // [rows, (2 + streams) * streams]
  const void *scale, *base;  // [3], one for each logit
  float *pre, *post, *comb;  // [rows, streams] twice, [rows, streams, streams]
  long long mix_pitch, pre_pitch, post_pitch, comb_pitch;
  int rows, streams, iters, scale_element, base_element;
  float eps;
};

struct HcHeadSplitParams {
  const float* mix;          // [rows, streams]
  const void *scale, *base;  // [1], [streams]
  float* y;                  // like mix
  long long mix_pitch, y_pitch;
  int rows, streams, scale_element, base_element;
  float eps;
};

}  // namespace rewright
