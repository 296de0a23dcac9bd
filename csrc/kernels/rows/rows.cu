// What only moves rows, or adds two, one op a launch; all bound by memory.
//
// embed: rows of the table, ids clamped into it. take_last: the row of the last valid token, row 0 where
// there is none. add: x + y, fp32 inside. These take a block a row. reshape: the same elements in row-major
// order, a thread a word.
#include "rows.h"

#include "../common/copy.cuh"
#include "../common/vectors.cuh"

namespace rewright {

KERNEL(embed, EmbedParams, 256, 1) {
  const int row = blockIdx.x;
  const int id = ((const int*)row_of(p.tokens, row / p.per_batch, p.tokens_pitch))[row % p.per_batch];
  const void* from = row_of(p.weight, max(0, min(id, p.vocabulary - 1)), p.weight_pitch);
  void* y = row_of(p.y, row, p.y_pitch);
  for (int i = threadIdx.x; i < p.columns / 4; i += blockDim.x) {
    store_four(y, i, p.element, load_four(from, i, p.weight_element));
  }
}

KERNEL(take_last, TakeLastParams, 256, 1) {
  const int row = blockIdx.x, batch = row / p.inner;
  const int last = max(0, min(p.n_valid[batch], p.tokens) - 1);
  const i64 from = ((i64)batch * p.tokens + last) * p.inner + row % p.inner;
  copy_bytes(row_of(p.y, row, p.y_pitch), row_of(p.x, from, p.x_pitch), p.bytes, p.unit);
}

KERNEL(add, AddParams, 256, 1) {
  const int row = blockIdx.x;
  const void* x = row_of(p.x, row, p.x_pitch);
  const void* y = row_of(p.y, row, p.y_pitch);
  void* sum = row_of(p.sum, row, p.sum_pitch);
  for (int i = threadIdx.x; i < p.columns / 4; i += blockDim.x) {
    store_four(sum, i, p.element, add_four(load_four(x, i, p.element), load_four(y, i, p.element)));
  }
}

KERNEL(reshape, ReshapeParams, 256, 1) {
  const i64 word = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  if (word >= p.words) return;
  const void* x = row_of(p.x, word / p.x_words, p.x_pitch);
  void* y = row_of(p.y, word / p.y_words, p.y_pitch);
  const i64 from = word % p.x_words, to = word % p.y_words;
  if (p.unit == 16) ((uint4*)y)[to] = ((const uint4*)x)[from];
  else if (p.unit == 4) ((u32*)y)[to] = ((const u32*)x)[from];
  else if (p.unit == 2) ((u16*)y)[to] = ((const u16*)x)[from];
  else ((u8*)y)[to] = ((const u8*)x)[from];
}

}  // namespace rewright
