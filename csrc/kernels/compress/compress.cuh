// Compression of a chunk of one sequence, by whole blocks.
#pragma once

#include "../keys/row_form.cuh"
#include "pool.cuh"

namespace rewright {

// Candidate j of sequence b in its form -> the cache, if the chunk finishes it. `shared` is kRowShared +
// kPoolShared * blockDim.x floats, 16-byte aligned. The rings must still be as before the chunk.
DEVICE void compress_entry(const CompressWriteParams& p, int b, int j, float* shared) {
  const int entry = first_entry(p.pool, b) + j;
  if (j >= finished_entries(p.pool, b) || entry >= p.entries) return;
  const int element = p.form.element;
  pool_entry(p.pool, b, entry, shared + kRowShared, [shared, element](int pair, float2 v) {
    ((float2*)shared)[pair] = round_pair(v, element);
  });
  const i64 to = state_row(p.pool.slots, p.entries, p.pool.slot[b], entry);
  finish_row(p.form, shared, (i64)entry * p.pool.ratio, row_of(p.cache, to, p.cache_pitch));
}

// The rings' rows of token t, unless it is masked or the rings keep later ones in their place.
DEVICE void compress_ring_row(const PoolParams& p, int b, int t) {
  if (!ring_keeps(p.ring, t, valid_tokens(p, b))) return;
  const int position = p.pos[b] + t;
  const i64 from = (i64)b * p.tokens + t, to = ring_row(p.slots, p.ring, p.slot[b], position);
  const float2* kv = (const float2*)row_of(p.kv, from, p.kv_pitch);
  const float2* gate = (const float2*)row_of(p.gate, from, p.gate_pitch);
  const void* ape = row_of(p.ape, position % p.ratio, p.ape_pitch);
  float2* kv_to = (float2*)row_of(p.kv_ring, to, p.kv_ring_pitch);
  float2* gate_to = (float2*)row_of(p.gate_ring, to, p.gate_ring_pitch);
  for (int i = threadIdx.x; i < p.width / 2; i += blockDim.x) {
    const float2 z = gate[i], bias = load_pair(ape, i, p.ape_element);
    kv_to[i] = kv[i];
    gate_to[i] = make_float2(z.x + bias.x, z.y + bias.y);
  }
}

// Everything of sequence b by one block: entries first, while the rings hold earlier tokens, then the rings.
DEVICE void compress_sequence(const CompressWriteParams& p, int b, float* shared) {
  const int finished = finished_entries(p.pool, b), valid = valid_tokens(p.pool, b);
  for (int j = 0; j < finished; ++j) compress_entry(p, b, j, shared);
  __syncthreads();
  for (int t = 0; t < valid; ++t) compress_ring_row(p.pool, b, t);
}

}  // namespace rewright
