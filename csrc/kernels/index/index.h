// Parameters of the kernels in index.cu.
#pragma once

namespace rewright {

constexpr int kMostChosen = 1 << 14;  // of a row, so that they fit shared memory

struct IndexQueryParams {
  const void* x;           // [B*T, heads * dim]
  void* y;                 // [B*T, heads, dim]
  const float *cos, *sin;  // [table_rows, pairs]
  const int* pos;
  long long x_pitch, y_pitch, cos_pitch, sin_pitch;
  int rows, tokens, heads, dim, pairs, table_rows;
  int element, result_element;  // Element
  int block;                    // elements that share a scale, 0: not rounded
  int e4m3;                     // their codes, otherwise e2m1
  float root;                   // dim^(-1/2)
};

struct IndexScoreParams {
  const void* q;        // rows of B*T * heads
  const void* weights;  // [B*T, heads]
  const void* keys;     // [S, slot_entries, dim]
  void* scores;         // [B*T, entries]
  const int *pos, *n_valid, *slot;
  long long q_pitch, weights_pitch, keys_pitch, scores_pitch;
  int tokens, heads, dim, slot_entries, entries, ratio, element;
  int fill;    // whether entries out of sight get -inf, or are left alone
  int blocks;  // of a token
  float weight_scale;
};

struct IndexTopkParams {
  const void* scores;  // [B*T, entries]
  int* chosen;         // [B*T, k]
  const int *pos, *n_valid;
  long long scores_pitch, chosen_pitch;
  int tokens, entries, ratio, k;
  int own;     // whether a row holds scores of its own entries only, or of all of its sequence
  int vector;  // whether 16 bytes can be read at once
  int sorted;  // places of the list while it is sorted: a power of two, k or more
};

}  // namespace rewright
