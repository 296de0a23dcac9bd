// Quantisation of a kernel's result, for the kernels that have one inside.
#pragma once

#include "../runtime/kernel.h"
#include "formats.h"

namespace rewright {

// Where the quantised form of rows goes, and how they are quantised.
class Quantizer {
 public:
  // No quantisation.
  Quantizer() = default;
  // Of values of `shape`, as attributes fmt, block and static say: codes and, if these are not given by `fixed`,
  // scales go to the results from `result` on, which is moved behind them. Throws PlanError if they do not fit.
  Quantizer(const CallSite& site, std::vector<int64_t> shape, const Tensor& fixed, size_t& result);

  explicit operator bool() const { return block_ > 0; }
  int64_t block() const { return block_; }
  int64_t blocks() const { return scales_.cols(); }  // of a row
  const Tensor& codes() const { return codes_; }
  // A whole row, or `count` of its blocks from block `first` on.
  void store(int64_t row, const float* values) const { store(row, 0, blocks(), values); }
  void store(int64_t row, int64_t first, int64_t count, const float* values) const;

 private:
  Codes format_ = Codes::kE4M3;
  int64_t block_ = 0;
  bool fixed_ = false;
  Tensor codes_, scales_;
};

// Scales [columns/block] that are the same for all rows; throws PlanError if `fixed` is anything else.
const uint8_t* fixed_scales(const CallSite& site, const Tensor& fixed, int64_t columns, int64_t block);

// The format called `name` in attributes.
Codes codes_named(const CallSite& site, const std::string& name);

}  // namespace rewright
