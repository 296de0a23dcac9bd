// Writes of decode state, one op a launch.
//
// ring_write: the last rows of a chunk at their position modulo the ring's size. entry_write: a chunk's
// finished entries behind those that the cache holds. A block a row; both write the state in place, leave
// the slots of masked sequences alone, and are bound by memory.
#include "state.h"

#include "../common/copy.cuh"
#include "../common/vectors.cuh"
#include "state.cuh"

namespace rewright {

KERNEL(ring_write, RingWriteParams, 128, 1) {
  const int row = blockIdx.x, b = row / p.tokens, t = row % p.tokens;
  if (!ring_keeps(p.size, t, min(p.n_valid[b], p.tokens))) return;
  const i64 to = ring_row(p.slots, p.size, p.slot[b], p.pos[b] + t);
  copy_bytes(row_of(p.ring, to, p.ring_pitch), row_of(p.rows, row, p.rows_pitch), p.bytes, p.unit);
}

KERNEL(entry_write, EntryWriteParams, 128, 1) {
  const int row = blockIdx.x, b = row / p.candidates, j = row % p.candidates;
  // (A masked sequence has finished nothing; its count may be unwritten.)
  if (p.n_valid[b] <= 0 || j >= p.count[b]) return;
  const int entry = p.pos[b] / p.ratio + j;
  if (entry >= p.size) return;
  const i64 to = state_row(p.slots, p.size, p.slot[b], entry);
  copy_bytes(row_of(p.cache, to, p.cache_pitch), row_of(p.entries, row, p.entries_pitch), p.bytes, p.unit);
}

}  // namespace rewright
