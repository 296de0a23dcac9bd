// Where rows of states lie.
#pragma once

#include "../common/cuda.cuh"

namespace rewright {

// Row `index` of a slot of a state [slots, size, ..].
DEVICE i64 state_row(int slots, int size, int slot, int index) { return (i64)min(slot, slots - 1) * size + index; }

// Row of a ring [slots, size, ..] that holds a position.
DEVICE i64 ring_row(int slots, int size, int slot, int position) {
  return state_row(slots, size, slot, position % size);
}

// Whether a ring of `size` rows keeps the row of token t of n_valid. Masked tokens have none.
DEVICE bool ring_keeps(int size, int t, int n_valid) { return t < n_valid && t >= n_valid - size; }

}  // namespace rewright
