// Parameters of the kernels in mix.cu and streams.cu.
#pragma once

namespace rewright {

constexpr int kMostStreams = 8;
constexpr int kMostLogits = 24;  // of a token

struct HcExpandParams {
  const void* x;  // [rows, columns]
  void* y;        // [rows, streams, columns]
  long long x_pitch, y_pitch;
  int streams, columns, element;
};

struct HcMixParams {
  const void* x;   // streams [rows, streams, columns]
  const void* fn;  // [logits, streams * columns]
  float* y;        // [rows, logits]
  long long x_pitch, fn_pitch, y_pitch;
  int streams, columns, logits, element, fn_element;
  float eps;
};

struct HcCollapseParams {
  const void* x;     // streams [rows, streams, columns]
  const float* pre;  // [rows, streams]
  void* y;           // [rows, columns]
  long long x_pitch, pre_pitch, y_pitch;
  int streams, columns, element, parts;  // parts: blocks of a row
};

struct HcCombineParams {
  const void* y;               // [rows, columns]
  const void* x;               // streams [rows, streams, columns]
  const float *post, *comb;    // [rows, streams], [rows, streams, streams]
  void* out;                   // like x
  long long y_pitch, x_pitch, post_pitch, comb_pitch, out_pitch;
  int streams, columns, y_element, element, parts;
};

}  // namespace rewright
