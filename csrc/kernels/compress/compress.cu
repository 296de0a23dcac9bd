// Pooling of past tokens into compressed entries, one op in one or two launches.
//
// add_position_bias: gate scores plus the bias of the token's place in its window; a block a row. compress:
// the entries that a chunk finishes; a block a candidate. compress_write: the bias, the pooling, what follows
// it and the writes of the rings and of the entries' cache; a block a sequence. Chunks that can finish several
// entries take compress_write_entries, a block a candidate, and then compress_write_rows, a block a token: the
// rings change only once all entries are pooled. Bound by the latency of a window's rows, 8 at a time.
#include "compress.cuh"

namespace rewright {

KERNEL(add_position_bias, AddPositionBiasParams, 256, 1) {
  const int row = blockIdx.x, b = row / p.tokens, t = row % p.tokens;
  const float* gate = (const float*)row_of(p.gate, row, p.gate_pitch);
  float* y = (float*)row_of(p.y, row, p.y_pitch);
  const void* ape = row_of(p.ape, max(0, p.pos[b] + t) % p.ratio, p.ape_pitch);
  for (int i = threadIdx.x; i < p.columns; i += blockDim.x) y[i] = gate[i] + load_element(ape, i, p.ape_element);
}

KERNEL(compress, CompressParams, 256, 1) {
  __shared__ float parts[kPoolShared * 256];
  const int b = blockIdx.x / p.pool.candidates, j = blockIdx.x % p.pool.candidates;
  const int finished = finished_entries(p.pool, b), element = p.element;
  void* y = row_of(p.entries, blockIdx.x, p.entries_pitch);
  if (j == 0 && threadIdx.x == 0) p.count[b] = finished;
  if (j < finished) {
    pool_entry(p.pool, b, first_entry(p.pool, b) + j, parts, [y, element](int pair, float2 v) {
      store_pair(y, pair, element, v);
    });
  } else {
    for (int i = threadIdx.x; i < p.pool.channels / 2; i += blockDim.x) {
      store_pair(y, i, element, make_float2(0.f, 0.f));
    }
  }
}

constexpr int kShared = kRowShared + kPoolShared * 256;

KERNEL(compress_write, CompressWriteParams, 256, 1) {
  __align__(16) __shared__ float shared[kShared];
  compress_sequence(p, blockIdx.x, shared);
}

KERNEL(compress_write_entries, CompressWriteParams, 256, 1) {
  __align__(16) __shared__ float shared[kShared];
  compress_entry(p, blockIdx.x / p.pool.candidates, blockIdx.x % p.pool.candidates, shared);
}

KERNEL(compress_write_rows, CompressWriteParams, 256, 1) {
  compress_ring_row(p.pool, blockIdx.x / p.pool.tokens, blockIdx.x % p.pool.tokens);
}

}  // namespace rewright
