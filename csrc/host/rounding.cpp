#include "rounding.h"

#include "quantize.h"

namespace rewright {

Rounding::Rounding(const CallSite& site, int64_t columns, DType dtype) : dtype_(dtype), count_(columns) {
  const std::string fmt = site.text("fmt", "");
  if (fmt.empty()) return;
  format_ = codes_named(site, fmt);
  const std::string out = site.text("out", "");
  site.require(out == "bf16" || out == "f32", "rounded rows are bf16 or f32, not " + out);
  const std::vector<int64_t> dims = site.list("dims");
  if (!dims.empty()) {
    site.require(dims.size() == 2 && 0 <= dims[0] && dims[0] < dims[1] && dims[1] <= columns, "dims do not fit");
    site.require(out == name_of(dtype), "rows of which a part is rounded keep their type");
    start_ = dims[0];
    count_ = dims[1] - dims[0];
  }
  dtype_ = out == "bf16" ? DType::kBF16 : DType::kF32;
  block_ = site.integer("block");
  site.require(block_ > 0 && count_ > 0 && count_ % block_ == 0, "blocks do not divide a row");
  site.require(format_ == Codes::kE4M3 || block_ % 2 == 0, "blocks of e2m1 codes are even");
}

}  // namespace rewright
