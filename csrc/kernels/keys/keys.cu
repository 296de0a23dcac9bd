// The key/value row of a token, and its way into the window ring, one op a launch.
//
// kv_rows: RMS norm, RoPE and rounding of each row, every step rounded to the row's dtype as if it had been
// stored. kv_write: the same at the row's position modulo the ring's size. A block a row, which lies in
// shared memory; bound by the latency of one row.
#include "keys.cuh"

namespace rewright {

KERNEL(kv_rows, KvParams, 256, 1) {
  __align__(16) __shared__ float shared[kRowShared];
  kv_row(p, blockIdx.x, row_of(p.y, blockIdx.x, p.y_pitch), shared);
}

KERNEL(kv_write, KvParams, 256, 1) {
  __align__(16) __shared__ float shared[kRowShared];
  kv_write_row(p, blockIdx.x, shared);
}

}  // namespace rewright
