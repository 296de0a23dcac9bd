// Block quantisation with power-of-two scales, and its inverse.
//
// host.quantize: codes and one e8m0 scale for each block of a range of the last axis. host.quantize_static:
// codes by scales that are given. host.dequantize: code times scale, which is exact in bf16, the values around the range taken from `base`. Bound by
// memory. Work is shared out in blocks, so that the single row of a decode step keeps every thread busy.
#include "quantize.h"

#include <algorithm>
#include <cstring>

#include "families.h"
#include "rows.h"

namespace rewright {

Codes codes_named(const CallSite& site, const std::string& name) {
  site.require(name == "e4m3" || name == "e2m1", "codes are e4m3 or e2m1, not " + name);
  return name == "e4m3" ? Codes::kE4M3 : Codes::kE2M1;
}

const uint8_t* fixed_scales(const CallSite& site, const Tensor& fixed, int64_t columns, int64_t block) {
  const bool fits = fixed && fixed.dtype == DType::kE8M0 && fixed.rank() == 1 && block > 0 && columns % block == 0 &&
                    fixed.count() == columns / block;
  site.require(fits, "fixed scales do not fit");
  return fixed.row<uint8_t>(0);
}

Quantizer::Quantizer(const CallSite& site, std::vector<int64_t> shape, const Tensor& fixed, size_t& result)
    : format_(codes_named(site, site.text("fmt", ""))), block_(site.integer("block")), fixed_(static_cast<bool>(fixed)),
      codes_(site.result(result++)) {
  const bool packed = format_ == Codes::kE2M1;
  site.require(!shape.empty() && block_ > 0 && shape.back() % block_ == 0, "blocks do not divide a row");
  site.require(!packed || block_ % 2 == 0, "blocks of e2m1 codes are even");
  site.require(codes_.dtype == (packed ? DType::kE2M1 : DType::kF8E4M3) && codes_.shape == shape, "the codes do not fit");
  if (fixed_) {
    fixed_scales(site, fixed, shape.back(), block_);
    scales_ = fixed;
    return;
  }
  scales_ = site.result(result++);
  shape.back() /= block_;
  site.require(scales_.dtype == DType::kE8M0 && scales_.shape == shape, "the scales do not fit");
}

void Quantizer::store(int64_t row, int64_t first, int64_t count, const float* values) const {
  const int64_t column = first * block_;
  uint8_t* codes = codes_.row<uint8_t>(row) + (format_ == Codes::kE2M1 ? column / 2 : column);
  if (fixed_) {
    quantize_row_fixed(values, count * block_, block_, format_, scales_.row<uint8_t>(0) + first, codes);
  } else {
    quantize_row(values, count * block_, block_, format_, codes, scales_.row<uint8_t>(row) + first);
  }
}

namespace {

// Columns [start, stop) of a row that `dims` names; all of them where it is not given.
struct Columns {
  Columns(const CallSite& site, int64_t all) : stop(all) {
    const std::vector<int64_t> dims = site.list("dims");
    if (dims.empty()) return;
    site.require(dims.size() == 2 && 0 <= dims[0] && dims[0] < dims[1] && dims[1] <= all, "dims do not fit");
    start = dims[0];
    stop = dims[1];
  }
  int64_t size() const { return stop - start; }

  int64_t start = 0, stop;
};

class Quantize : public Kernel {
 public:
  explicit Quantize(CallSite& site) : Quantize(site, Tensor{}) {}

  size_t scratch_bytes() const override { return x_.cols() * sizeof(float); }

  void run(Worker& worker) override {
    float* values = worker.scratch();
    const int64_t per_row = to_.blocks();
    const Range share = worker.share(rows_.count() * rows_.inner() * per_row);
    for (int64_t i = share.begin; i < share.end;) {
      const int64_t at = i / per_row, first = i % per_row, count = std::min(share.end - i, per_row - first);
      const int64_t row = rows_.at(at / rows_.inner()).row + at % rows_.inner();
      load_part(x_, row, columns_.start + first * to_.block(), count * to_.block(), values);
      to_.store(row, first, count, values);
      i += count;
    }
  }

 protected:
  Quantize(CallSite& site, const Tensor& fixed)
      : x_(require_activation(site, site.operand(0))), columns_(site, x_.cols()), rows_(site.step, x_) {
    std::vector<int64_t> shape = x_.shape;
    site.require(!shape.empty(), "x has no rows");
    shape.back() = columns_.size();
    size_t result = 0;
    to_ = Quantizer(site, shape, fixed, result);
  }

 private:
  Tensor x_;
  Columns columns_;
  TokenRows rows_;
  Quantizer to_;
};

class QuantizeStatic : public Quantize {
 public:
  explicit QuantizeStatic(CallSite& site) : Quantize(site, site.required(1)) {}
};

class Dequantize : public Kernel {
 public:
  explicit Dequantize(CallSite& site)
      : codes_(site.required(0)),
        scale_(site.required(1)),
        base_(site.operand(2)),
        y_(require_activation(site, site.result(0))),
        columns_(site, y_.cols()),
        block_(site.integer("block")),
        rows_(site.step, y_) {
    const std::string out = site.text("out", "");
    site.require(out == name_of(y_.dtype), "the result is " + std::string(name_of(y_.dtype)) + ", not " + out);
    site.require(codes_.dtype == DType::kF8E4M3 || codes_.dtype == DType::kE2M1, "codes are neither e4m3 nor e2m1");
    std::vector<int64_t> shape = y_.shape;
    site.require(!shape.empty() && block_ > 0 && columns_.size() % block_ == 0, "blocks do not divide a row");
    shape.back() = columns_.size();
    site.require(codes_.shape == shape, "the codes do not fit");
    shape.back() /= block_;
    const bool known = scale_.dtype == DType::kE8M0 || scale_.dtype == DType::kF32;
    site.require(known && scale_.shape == shape, "the scales do not fit");
    site.require(static_cast<bool>(base_) == !site.list("dims").empty(), "base and dims go together");
    site.require(!base_ || (base_.dtype == y_.dtype && base_.shape == y_.shape), "base does not fit");
  }

  size_t scratch_bytes() const override { return y_.cols() * sizeof(float); }

  void run(Worker& worker) override {
    float* values = worker.scratch();
    const Range share = worker.share(rows_.count() * rows_.inner());
    for (int64_t i = share.begin; i < share.end; ++i) {
      const int64_t row = rows_.at(i / rows_.inner()).row + i % rows_.inner();
      if (base_) load_row(base_, row, values);
      decode(row, values + columns_.start);
      store_row(y_, row, values);
    }
  }

 private:
  void decode(int64_t row, float* out) const {
    const uint8_t* codes = codes_.row<uint8_t>(row);
    for (int64_t start = 0; start < columns_.size(); start += block_) {
      const int64_t at = start / block_;
      const float scale =
          scale_.dtype == DType::kE8M0 ? e8m0_to_float(scale_.row<uint8_t>(row)[at]) : scale_.row<float>(row)[at];
      if (codes_.dtype == DType::kF8E4M3) {
        for (int64_t i = start; i < start + block_; ++i) out[i] = kE4M3[codes[i]] * scale;
      } else {
        for (int64_t i = start; i < start + block_; ++i) {
          out[i] = kE2M1[i % 2 == 0 ? codes[i / 2] & 15 : codes[i / 2] >> 4] * scale;
        }
      }
    }
  }

  Tensor codes_, scale_, base_, y_;
  Columns columns_;
  int64_t block_;
  TokenRows rows_;
};

}  // namespace

void add_quantize_kernels(Registry& registry) {
  registry["host.quantize"] = {"quantize(x; fmt: str, block: int, dims: ints) -> (, scale)", make_kernel<Quantize>};
  registry["host.quantize_static"] = {"quantize_static(x, fixed; fmt: str, block: int) -> ()",
                                      make_kernel<QuantizeStatic>};
  registry["host.dequantize"] = {"dequantize(codes, scale, base?; block: int, out: str, dims: ints) -> ()",
                                 make_kernel<Dequantize>};
}

}  // namespace rewright
