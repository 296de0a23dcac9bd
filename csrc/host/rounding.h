// The rounding of keys and index vectors: to codes and back, for the kernels that have it inside.
#pragma once

#include "../runtime/kernel.h"
#include "formats.h"

namespace rewright {

// Attributes fmt, block, dims and out of a call, for rows of `columns` values of dtype `dtype`.
class Rounding {
 public:
  // Throws PlanError for attributes that do not fit. No `fmt`: rows stay as they are.
  Rounding(const CallSite& site, int64_t columns, DType dtype);

  // What a tensor of rounded rows is made of.
  DType dtype() const { return dtype_; }
  // In place; the values are those that codes and scales stand for.
  void apply(float* row) const {
    if (block_ > 0) round_row(row + start_, count_, block_, format_);
  }

 private:
  DType dtype_;
  Codes format_ = Codes::kE4M3;
  int64_t block_ = 0, start_ = 0, count_ = 0;
};

}  // namespace rewright
