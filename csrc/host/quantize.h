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
  // Of values of `shape`; throws PlanError if codes and scales are not what `fmt` and `block` make of them.
  Quantizer(const CallSite& site, const std::string& fmt, int64_t block, std::vector<int64_t> shape,
            const Tensor& codes, const Tensor& scales);

  explicit operator bool() const { return block_ > 0; }
  int64_t block() const { return block_; }
  int64_t blocks() const { return scales_.cols(); }  // of a row
  // A whole row, or `count` of its blocks from block `first` on.
  void store(int64_t row, const float* values) const { store(row, 0, blocks(), values); }
  void store(int64_t row, int64_t first, int64_t count, const float* values) const;

 private:
  Codes format_ = Codes::kE4M3;
  int64_t block_ = 0;
  Tensor codes_, scales_;
};

// The format called `name` in attributes.
Codes codes_named(const CallSite& site, const std::string& name);

}  // namespace rewright
