// The residual streams of a step's tokens: rows of the embedding table, copied to every stream, and the parts
// of the first mixing logits. Grid: a block for eight tiles of 16 columns. Bound by latency.
#include "start.h"

#include "combine.cuh"

#include "../common/order.cuh"

namespace rewright {

KERNEL(start, StartParams, 256, 1) {
  DYNAMIC_SHARED(words);
  const int tiles = p.combine.dim / 16, first = blockIdx.x * kStartTiles;
  const Kept kept = kept_in(p.combine, (char*)words, min(kStartTiles, tiles - first), first, 1, p.rows);
  fetch_kept(p.combine, kept, p.rows);
  for (int i = threadIdx.x; i < kept.slots * p.rows * 16; i += blockDim.x) {
    const int m = i / 16 % p.rows, slot = i / 16 / p.rows, token = min(max(p.tokens[m], 0), p.vocabulary - 1);
    kept.y[i] = bf16_to_float(((const u16*)((const char*)p.table + token * p.pitch))[(first + slot) * 16 + (i & 15)]);
  }
  copy_commit();
  copy_wait<0>();
  combine(p.combine, kept, p.rows, gridDim.x);
  end_block(p.order);
}

}  // namespace rewright
