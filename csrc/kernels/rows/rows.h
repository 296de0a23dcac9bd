// Parameters of the kernels in rows.cu.
#pragma once

namespace rewright {

struct EmbedParams {
  const int* tokens;  // [B, per_batch], rows tokens_pitch bytes apart
  const void* weight;  // [vocabulary, columns]
  void* y;             // [rows, columns]
  long long tokens_pitch, weight_pitch, y_pitch;
  int per_batch, vocabulary, columns, weight_element, element;
};

struct TakeLastParams {
  const void* x;  // [B, tokens, inner, ..]
  const int* n_valid;
  void* y;  // [B, inner, ..]
  long long x_pitch, y_pitch, bytes;  // bytes of a row, in words of `unit`
  int tokens, inner, unit;
};

struct AddParams {
  const void *x, *y;
  void* sum;  // all [rows, columns]
  long long x_pitch, y_pitch, sum_pitch;
  int columns, element;
};

struct ReshapeParams {
  const void* x;
  void* y;
  long long x_pitch, y_pitch, x_words, y_words, words;  // words of `unit` bytes of a row, and in all
  int unit;
};

}  // namespace rewright
