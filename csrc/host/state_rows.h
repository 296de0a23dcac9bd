// Rows of keys in a state [S,R,c]: values, or packed as codes, scales and bf16 values.
#pragma once

#include <algorithm>
#include <string>

#include "../runtime/kernel.h"
#include "formats.h"
#include "step_vectors.h"

namespace rewright {

// Where the parts of packed rows lie; ir/kv_format.py is the same in torch, and says more. Plain: device code
// may take it as it is.
struct RowFormat {
  Codes codes = Codes::kE4M3;
  int64_t block = 0;  // elements that share a scale; 0: rows are not packed
  int64_t coded = 0;  // leading elements of a row that are codes
  int64_t plain = 0;  // the others, bf16

  int64_t plain_bytes() const { return 2 * plain; }
  int64_t code_bytes() const { return codes == Codes::kE4M3 ? coded : coded / 2; }
  int64_t scale_bytes() const { return block > 0 ? coded / block : 0; }
  int64_t row_bytes() const { return plain_bytes() + code_bytes() + scale_bytes(); }
  // Bytes from the begin of a slot of `rows` rows to the part of one of them.
  int64_t plain_at(int64_t row) const { return row * plain_bytes(); }
  int64_t codes_at(int64_t rows, int64_t row) const { return rows * plain_bytes() + row * code_bytes(); }
  int64_t scales_at(int64_t rows, int64_t row) const {
    return rows * (plain_bytes() + code_bytes()) + row * scale_bytes();
  }
};

class StateRows {
 public:
  // No state.
  StateRows() = default;
  // Of a state whose rows are `columns` values of `dtype`, packed as the attribute `format` says if it is not
  // empty; throws PlanError (`misfit`) for another state.
  StateRows(const CallSite& site, const Tensor& state, const std::string& format, int64_t columns, DType dtype,
            const std::string& misfit);

  explicit operator bool() const { return static_cast<bool>(state_); }
  bool packed() const { return format_.block > 0; }
  int64_t slots() const { return state_.dim(0); }
  int64_t size() const { return state_.dim(1); }  // rows of a slot
  int64_t first_kept(int64_t n_valid) const { return rewright::first_kept(state_, n_valid); }

  // Row `index` of a slot as fp32.
  void load(int64_t slot, int64_t index, float* out) const;
  // fp32 into a row, rounded to what it holds once.
  void store(int64_t slot, int64_t index, const float* values) const;
  // The same from row `from` of a tensor of the state's values. Scratch is a row of floats if packed().
  void copy(int64_t slot, int64_t index, const Tensor& rows, int64_t from, float* scratch) const;

 private:
  uint8_t* slot(int64_t slot) const;

  Tensor state_;
  RowFormat format_;
};

}  // namespace rewright
