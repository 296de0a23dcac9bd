// RMS norms.
//
// host.rms_norm: y = round(weight * (x * rsqrt(mean(x^2) + eps))) for each row of the last axis.
// host.rms_norm_quant: that of x + residual with its quantisation. host.head_rms_norm: without a weight,
// in the steps that `head_norm_row` names. Bound by memory: each row is read and written once.
#include "norm.h"

#include <cmath>

#include "families.h"
#include "formats.h"
#include "quantize.h"
#include "rows.h"
#include "sum.h"

namespace rewright {

void rms_norm_row(float* x, int64_t count, const float* weight, float eps) {
  const float scale = 1.0f / std::sqrt(mean_square(x, count) + eps);
  for (int64_t i = 0; i < count; ++i) x[i] = weight[i] * (x[i] * scale);
}

void head_norm_row(float* x, int64_t count, float eps, DType dtype, bool tail) {
  if (dtype != DType::kBF16) {
    const float scale = 1.0f / std::sqrt(mean_square(x, count) + eps);
    for (int64_t i = 0; i < count; ++i) x[i] *= scale;
    return;
  }
  const float mean = round_to_bf16(mean_square_bf16(x, count));
  float root = std::sqrt(round_to_bf16(mean + round_to_bf16(eps)));
  if (tail) root = round_to_bf16(root);
  const float scale = round_to_bf16(1.0f / root);
  for (int64_t i = 0; i < count; ++i) x[i] = round_to_bf16(x[i] * scale);
}

NormWeight::NormWeight(const CallSite& site, const Tensor& weight, int64_t count) {
  const bool fits = weight && is_float(weight.dtype) && weight.rank() == 1 && weight.count() == count;
  site.require(fits, "the norm's weight does not fit");
  values_.resize(count);
  load_row(weight, 0, values_.data());
}

namespace {

class RmsNorm : public Kernel {
 public:
  explicit RmsNorm(CallSite& site)
      : x_(require_activation(site, site.operand(0))),
        y_(site.result(0)),
        weight_(site, site.operand(1), x_.cols()),
        eps_(static_cast<float>(site.number("eps"))),
        rows_(site.step, x_) {
    site.require(y_.dtype == x_.dtype && y_.shape == x_.shape, "x and its norm differ in type");
  }

  size_t scratch_bytes() const override { return x_.cols() * sizeof(float); }

  void run(Worker& worker) override {
    float* row = worker.scratch();
    const Range share = worker.share(rows_.count());
    for (int64_t i = share.begin; i < share.end; ++i) {
      for (int64_t at = rows_.at(i).row, end = at + rows_.inner(); at < end; ++at) {
        load_row(x_, at, row);
        rms_norm_row(row, x_.cols(), weight_.data(), eps_);
        store_row(y_, at, row);
      }
    }
  }

 private:
  Tensor x_, y_;
  NormWeight weight_;
  float eps_;
  TokenRows rows_;
};

class HeadRmsNorm : public Kernel {
 public:
  explicit HeadRmsNorm(CallSite& site)
      : step_(site.step),
        x_(require_activation(site, site.operand(0))),
        y_(site.result(0)),
        eps_(static_cast<float>(site.number("eps"))),
        rows_(site.step, x_) {
    site.require(x_.rank() >= 2, "x has no heads");
    site.require(y_.dtype == x_.dtype && y_.shape == x_.shape, "x and its norm differ in type");
  }

  size_t scratch_bytes() const override { return x_.cols() * sizeof(float); }

  void run(Worker& worker) override {
    float* head = worker.scratch();
    const int64_t heads = rows_.inner();  // of a token
    const Range share = worker.share(rows_.count() * heads);
    for (int64_t i = share.begin; i < share.end; ++i) {
      const TokenRows::Group token = rows_.at(i / heads);
      // Place of this head among those of its sequence.
      int64_t all = x_.rows() / x_.dim(0), place = i % all;
      if (rows_.by_token()) {
        all = step_->n_valid[token.batch] * heads;
        place = token.token * heads + i % heads;
      }
      const int64_t row = token.row + i % heads;
      load_row(x_, row, head);
      head_norm_row(head, x_.cols(), eps_, x_.dtype, place >= all / kHeadNormLanes * kHeadNormLanes);
      store_row(y_, row, head);
    }
  }

 private:
  const Step* step_;
  Tensor x_, y_;
  float eps_;
  TokenRows rows_;
};

class RmsNormQuant : public Kernel {
 public:
  explicit RmsNormQuant(CallSite& site)
      : x_(require_activation(site, site.operand(0))),
        residual_(site.operand(1)),
        weight_(site, site.operand(2), x_.cols()),
        eps_(static_cast<float>(site.number("eps"))),
        rows_(site.step, x_) {
    size_t next = 0;
    if (site.flag("keep_sum", false)) sum_ = site.result(next++);
    if (site.flag("keep", false)) normed_ = site.result(next++);
    for (const Tensor* like : {&residual_, &sum_, &normed_}) {
      site.require(!*like || (like->dtype == x_.dtype && like->shape == x_.shape), "residual, sum or norm differ from x");
    }
    to_ = Quantizer(site, x_.shape, site.operand(3), next);
  }

  size_t scratch_bytes() const override { return 2 * x_.cols() * sizeof(float); }

  void run(Worker& worker) override {
    const int64_t count = x_.cols();
    float* row = worker.scratch();
    float* other = row + count;
    const Range share = worker.share(rows_.count() * rows_.inner());
    for (int64_t i = share.begin; i < share.end; ++i) {
      const int64_t at = rows_.at(i / rows_.inner()).row + i % rows_.inner();
      load_row(x_, at, row);
      if (residual_) {
        load_row(residual_, at, other);
        for (int64_t c = 0; c < count; ++c) row[c] += other[c];
        round_to(x_.dtype, row, count);
      }
      if (sum_) store_row(sum_, at, row);
      rms_norm_row(row, count, weight_.data(), eps_);
      round_to(x_.dtype, row, count);
      if (normed_) store_row(normed_, at, row);
      to_.store(at, row);
    }
  }

 private:
  Tensor x_, residual_, sum_, normed_;
  NormWeight weight_;
  float eps_;
  TokenRows rows_;
  Quantizer to_;
};

}  // namespace

void add_norm_kernels(Registry& registry) {
  registry["host.rms_norm"] = {"rms_norm(x, weight; eps: float) -> ()", make_kernel<RmsNorm>};
  registry["host.head_rms_norm"] = {"head_rms_norm(x; eps: float) -> ()", make_kernel<HeadRmsNorm>};
  registry["host.rms_norm_quant"] = {
      "rms_norm_quant(x, residual?, weight, fixed?; eps: float, fmt: str, block: int, static: bool, keep: bool, "
      "keep_sum: bool) -> (*)",
      make_kernel<RmsNormQuant>};
}

}  // namespace rewright
