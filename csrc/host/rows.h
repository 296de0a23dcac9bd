// Rows of activations: as fp32 and back, and which of them a step computes.
#pragma once

#include "../runtime/kernel.h"

namespace rewright {

// One row (the last axis) of a float tensor as fp32.
void load_row(const Tensor& tensor, int64_t row, float* out);

// `count` elements from column `first` on.
void load_part(const Tensor& tensor, int64_t row, int64_t first, int64_t count, float* out);

// fp32 into a row of a float tensor, rounded to its dtype once.
void store_row(const Tensor& tensor, int64_t row, const float* values);

void store_part(const Tensor& tensor, int64_t row, int64_t first, int64_t count, const float* values);

// Rounds fp32 values in place to what a tensor of that dtype would hold.
void round_to(DType dtype, float* values, int64_t count);

bool is_float(DType dtype);

// What a constructor checks of an activation: present, not empty, bf16 or f32.
const Tensor& require_activation(const CallSite& site, const Tensor& tensor);

// Row groups of a tensor [B,T,...] that a step computes: one per token (b,t) with t < n_valid[b], each
// of `inner` rows. A tensor whose leading axes are not those of the step's tokens ([B,D] after
// take_last, [B,C,c] entries) counts all of its rows, as groups of one.
class TokenRows {
 public:
  TokenRows(const Step* step, const Tensor& tensor);

  bool by_token() const { return by_token_; }
  // Row groups of this step.
  int64_t count() const;
  // Index of a group's first row in the tensor, and the batch row it belongs to.
  struct Group {
    int64_t row;
    int batch;
    int token;
  };
  Group at(int64_t index) const;
  // Row groups from `index` on that belong to the same sequence.
  int64_t group_size(int64_t index) const;
  // Rows of one group.
  int64_t inner() const { return inner_; }

 private:
  const Step* step_;
  bool by_token_;
  int64_t inner_, all_;
};

}  // namespace rewright
