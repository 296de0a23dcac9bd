// Parameters of the kernels in compress.cu.
#pragma once

#include "../keys/keys.h"

namespace rewright {

// Floats of shared memory that the pooling of an entry takes for each thread of the block: largest score,
// denominator and sum of a pair of channels.
constexpr int kPoolShared = 6;

struct AddPositionBiasParams {
  const float* gate;  // [B, tokens, columns]
  const void* ape;    // [ratio, columns]
  float* y;           // like gate
  const int* pos;
  long long gate_pitch, ape_pitch, y_pitch;
  int tokens, columns, ratio, ape_element;
};

// The windows of tokens that entries pool, and their channels.
struct PoolParams {
  const float *kv, *gate;    // [B, tokens, width] of this chunk
  float *kv_ring, *gate_ring;  // [slots, ring, width] of earlier tokens, gate with its bias
  const void* ape;           // [ratio, width] bias of the chunk's gate; null: it is in there
  const int *pos, *n_valid, *slot;
  long long kv_pitch, gate_pitch, kv_ring_pitch, gate_ring_pitch, ape_pitch;
  int tokens, candidates, slots, ring, ratio;
  int window, width, channels;  // with overlap: window = 2 ratio, width = 2 channels; else equal
  int ape_element;
};

struct CompressParams {
  PoolParams pool;
  void* entries;  // [B, candidates, channels]
  int* count;     // [B]
  long long entries_pitch;
  int element;
};

struct CompressWriteParams {
  PoolParams pool;
  RowForm form;  // of an entry; its element is that of the pooled entry
  void* cache;   // [slots, entries, channels]
  long long cache_pitch;
  int entries;
};

}  // namespace rewright
