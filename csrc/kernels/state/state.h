// Parameters of the kernels in state.cu.
#pragma once

namespace rewright {

struct RingWriteParams {
  const void* rows;  // [B, tokens, ..]
  void* ring;        // [slots, size, ..]
  const int *pos, *n_valid, *slot;
  long long rows_pitch, ring_pitch, bytes;  // bytes of a row, in words of `unit`
  int tokens, slots, size, unit;
};

struct EntryWriteParams {
  const void* entries;  // [B, candidates, ..]
  void* cache;          // [slots, size, ..]
  const int *count, *pos, *n_valid, *slot;
  long long entries_pitch, cache_pitch, bytes;
  int candidates, ratio, slots, size, unit;
};

}  // namespace rewright
