// Token embedding, choice of rows, sums and changes of shape: what only moves values.
//
// host.embed: rows of the table, ids clamped into it. host.take_last: the row of the last valid token.
// host.add: x + y. host.reshape: the same elements in row-major order. Bound by memory.
#include <algorithm>
#include <cstring>

#include "families.h"
#include "rows.h"

namespace rewright {
namespace {

int64_t row_bytes(const Tensor& tensor) { return tensor.cols() * bits_of(tensor.dtype) / 8; }

class Embed : public Kernel {
 public:
  explicit Embed(CallSite& site)
      : tokens_(site.required(0)),
        weight_(site.required(1)),
        y_(require_activation(site, site.result(0))),
        rows_(site.step, y_) {
    site.require(tokens_.dtype == DType::kI32 && tokens_.rank() == 2, "tokens are not i32[B,T]");
    site.require(is_float(weight_.dtype) && weight_.rank() == 2 && weight_.count() > 0, "the table is no float [V,D]");
    const std::vector<int64_t> shape{tokens_.dim(0), tokens_.dim(1), weight_.dim(1)};
    site.require(y_.shape == shape && site.text("out", "") == name_of(y_.dtype), "the result's type does not fit");
  }

  size_t scratch_bytes() const override { return y_.cols() * sizeof(float); }

  void run(Worker& worker) override {
    float* values = worker.scratch();
    const Range share = worker.share(rows_.count());
    for (int64_t i = share.begin; i < share.end; ++i) {
      const int64_t row = rows_.at(i).row;
      const int64_t id = tokens_.row<int32_t>(row / tokens_.dim(1))[row % tokens_.dim(1)];
      const int64_t from = std::clamp<int64_t>(id, 0, weight_.dim(0) - 1);
      if (weight_.dtype == y_.dtype) {
        std::memmove(y_.row<char>(row), weight_.row<char>(from), row_bytes(y_));
      } else {
        load_row(weight_, from, values);
        store_row(y_, row, values);
      }
    }
  }

 private:
  Tensor tokens_, weight_, y_;
  TokenRows rows_;
};

// Row 0 where no token is valid: it may hold anything, and nobody reads what comes of it.
class TakeLast : public Kernel {
 public:
  explicit TakeLast(CallSite& site) : x_(site.required(0)), n_valid_(site.required(1)), y_(site.result(0)) {
    site.require(x_.rank() >= 3 && x_.count() > 0 && bits_of(x_.dtype) >= 8, "x is not [B,T,..,D]");
    site.require(n_valid_.dtype == DType::kI32 && n_valid_.rank() == 1 && n_valid_.dim(0) == x_.dim(0),
                 "n_valid is not i32[B]");
    std::vector<int64_t> shape = x_.shape;
    shape.erase(shape.begin() + 1);
    site.require(y_.dtype == x_.dtype && y_.shape == shape, "the result's type does not fit");
    inner_ = y_.rows() / y_.dim(0);
  }

  void run(Worker& worker) override {
    const int64_t tokens = x_.dim(1);
    const Range share = worker.share(y_.rows());
    for (int64_t row = share.begin; row < share.end; ++row) {
      const int64_t b = row / inner_, last = std::clamp<int64_t>(n_valid_.row<int32_t>(0)[b] - int64_t{1}, 0, tokens - 1);
      std::memmove(y_.row<char>(row), x_.row<char>((b * tokens + last) * inner_ + row % inner_), row_bytes(y_));
    }
  }

 private:
  Tensor x_, n_valid_, y_;
  int64_t inner_ = 1;
};

class Add : public Kernel {
 public:
  explicit Add(CallSite& site)
      : x_(require_activation(site, site.operand(0))), y_(site.required(1)), sum_(site.result(0)), rows_(site.step, x_) {
    for (const Tensor* like : {&y_, &sum_}) {
      site.require(like->dtype == x_.dtype && like->shape == x_.shape, "the operands or the sum differ in type");
    }
  }

  size_t scratch_bytes() const override { return 2 * x_.cols() * sizeof(float); }

  void run(Worker& worker) override {
    const int64_t count = x_.cols();
    float* x = worker.scratch();
    float* y = x + count;
    const Range share = worker.share(rows_.count() * rows_.inner());
    for (int64_t i = share.begin; i < share.end; ++i) {
      const int64_t row = rows_.at(i / rows_.inner()).row + i % rows_.inner();
      load_row(x_, row, x);
      load_row(y_, row, y);
      for (int64_t c = 0; c < count; ++c) x[c] += y[c];
      store_row(sum_, row, x);
    }
  }

 private:
  Tensor x_, y_, sum_;
  TokenRows rows_;
};

// Copies masked rows too: which rows of the result they become depends on the shapes.
class Reshape : public Kernel {
 public:
  explicit Reshape(CallSite& site) : x_(site.required(0)), y_(site.result(0)) {
    site.require(bits_of(x_.dtype) >= 8 && y_.dtype == x_.dtype, "x is packed or differs from the result in type");
    site.require(x_.count() > 0 && y_.count() == x_.count(), "x and the result differ in size");
  }

  void run(Worker& worker) override {
    const int64_t from_row = row_bytes(x_), to_row = row_bytes(y_);
    const Range share = worker.share(y_.rows());
    for (int64_t row = share.begin; row < share.end; ++row) {
      for (int64_t done = 0; done < to_row;) {
        const int64_t at = row * to_row + done, column = at % from_row;
        const int64_t size = std::min(to_row - done, from_row - column);
        std::memmove(y_.row<char>(row) + done, x_.row<char>(at / from_row) + column, size);
        done += size;
      }
    }
  }

 private:
  Tensor x_, y_;
};

}  // namespace

void add_embed_kernels(Registry& registry) {
  registry["host.embed"] = {"embed(tokens, weight; out: str) -> ()", make_kernel<Embed>};
  registry["host.take_last"] = {"take_last(x, n_valid) -> ()", make_kernel<TakeLast>};
  registry["host.add"] = {"add(x, y) -> ()", make_kernel<Add>};
  registry["host.reshape"] = {"reshape(x; tail: ints, keep: int) -> ()", make_kernel<Reshape>};
}

}  // namespace rewright
