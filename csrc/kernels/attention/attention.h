// Parameters of the kernels in attention.cu.
#pragma once

#include "../common/order.h"

namespace rewright {

constexpr int kHeadsPerBlock = 16, kKeysPerTile = 32;  // of the kernels on tensor cores
constexpr int kDimsPerBlock = 64;                      // of attention_combine

struct AttentionParams {
  const void* q;           // rows of B*T tokens, heads `q_head` bytes apart, tokens `q_pitch`
  const void* kv;          // keys of this step by token, or null: the window holds them
  const void* window;      // [S, window_keys, dim]
  const void* compressed;  // [S, slot_entries, dim], or null
  const int* indices;      // `listed` places a token, or null: all visible entries
  const void* sink;        // [heads]
  const float *cos, *sin;  // [table_rows, pairs], or null: q is ready and the result stays as it is
  const int *pos, *n_valid, *slot;
  float* scores;  // [B*T, groups, tiles, 16, 32] of tiles with keys
  float* tops;    // [B*T, groups, tiles, 16] largest of a tile, -inf where it has no keys
  void* y;         // rows of `y_heads` heads
  long long q_pitch, q_head, kv_pitch, window_pitch, compressed_pitch, index_pitch, cos_pitch, sin_pitch, y_pitch;
  int tokens, heads, dim, y_heads, window_keys, slot_entries, entries, listed, ratio, splits, tiles, pairs, table_rows;
  int element, sink_element;  // Element
  float eps, scale;
  Order order;
};

}  // namespace rewright
