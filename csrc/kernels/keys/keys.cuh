// The key/value row of one token, by a whole block; `shared` as in `finish_row`.
#pragma once

#include "../state/state.cuh"
#include "row_form.cuh"

namespace rewright {

// Row r = b * tokens + t in its form -> y.
DEVICE void kv_row(const KvParams& p, int row, void* y, float* shared) {
  const void* x = row_of(p.x, row, p.x_pitch);
  for (int i = threadIdx.x; i < p.form.columns / 2; i += blockDim.x) {
    ((float2*)shared)[i] = load_pair(x, i, p.form.element);
  }
  finish_row(p.form, shared, (i64)p.pos[row / p.tokens] + row % p.tokens, y);
}

// The same into the window ring, unless the token is masked or the ring keeps later ones in its place.
DEVICE void kv_write_row(const KvParams& p, int row, float* shared) {
  const int b = row / p.tokens, t = row % p.tokens;
  if (!ring_keeps(p.window, t, min(p.n_valid[b], p.tokens))) return;
  kv_row(p, row, row_of(p.y, ring_row(p.slots, p.window, p.slot[b], p.pos[b] + t), p.y_pitch), shared);
}

}  // namespace rewright
