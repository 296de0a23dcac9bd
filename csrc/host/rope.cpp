// Rotary position embedding and the Hadamard rotation of index vectors.
//
// host.rope: the last 2R elements of every row turned by the angles of its position, rounded once; the
// others as they are. host.hadamard: n^(-1/2) times the Sylvester matrix, rounded once. Bound by memory:
// each row is read and written once.
#include "rope.h"

#include <algorithm>
#include <cmath>

#include "families.h"
#include "rows.h"
#include "step_vectors.h"

namespace rewright {

void rope_row(float* row_tail, const float* cos, const float* sin, int64_t pairs, bool inverse) {
  const float sign = inverse ? -1.0f : 1.0f;
  for (int64_t i = 0; i < pairs; ++i) {
    const float even = row_tail[2 * i], odd = row_tail[2 * i + 1], s = sign * sin[i];
    row_tail[2 * i] = even * cos[i] - odd * s;
    row_tail[2 * i + 1] = even * s + odd * cos[i];
  }
}

void hadamard_row(float* x, int64_t count) {
  int64_t width = 1;
  if (count >= 4) {  // widths 1 and 2 of four neighbours at a time
    for (int64_t i = 0; i < count; i += 4) {
      const float a = x[i] + x[i + 1], b = x[i] - x[i + 1], c = x[i + 2] + x[i + 3], d = x[i + 2] - x[i + 3];
      x[i] = a + c;
      x[i + 1] = b + d;
      x[i + 2] = a - c;
      x[i + 3] = b - d;
    }
    width = 4;
  }
  for (; width < count; width *= 2) {
    for (int64_t start = 0; start < count; start += 2 * width) {
      float* low = x + start;
      float* high = low + width;
      for (int64_t i = 0; i < width; ++i) {
        const float a = low[i], b = high[i];
        low[i] = a + b;
        high[i] = a - b;
      }
    }
  }
  const float scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(count)));
  for (int64_t i = 0; i < count; ++i) x[i] *= scale;
}

bool is_power_of_two(int64_t count) { return count > 0 && (count & (count - 1)) == 0; }

RopeTables::RopeTables(const CallSite& site, const Tensor& cos, const Tensor& sin, int64_t columns)
    : cos_(cos), sin_(sin) {
  site.require(cos && sin && cos.dtype == DType::kF32 && sin.dtype == DType::kF32 && cos.rank() == 2 &&
                   cos.shape == sin.shape && cos.dim(0) > 0 && cos.pitch % sizeof(float) == 0 &&
                   sin.pitch % sizeof(float) == 0,
               "the tables of cosines and sines do not fit");
  site.require(cos.cols() <= columns / 2, "the tables turn more than a row");
}

int64_t RopeTables::clamped(int64_t position) const { return std::clamp<int64_t>(position, 0, cos_.dim(0) - 1); }

namespace {

class Rope : public Kernel {
 public:
  explicit Rope(CallSite& site)
      : step_(site.step),
        x_(require_activation(site, site.operand(0))),
        y_(site.result(0)),
        tables_(site, site.operand(1), site.operand(2), x_.cols()),
        stride_(site.integer("stride", 1)),
        inverse_(site.flag("inverse", false)),
        rows_(step_, x_) {
    require_step_vector(site, site.operand(3), step_->pos);
    site.require(x_.rank() >= 3 && x_.dim(0) == step_->batch, "x is not [B,T,..,d]");
    site.require(y_.dtype == x_.dtype && y_.shape == x_.shape, "x and its turned form differ in type");
    site.require(1 <= stride_ && stride_ <= kMostStride, "the stride is out of range");
    per_position_ = 1;
    for (int axis = 2; axis + 1 < x_.rank(); ++axis) per_position_ *= x_.dim(axis);
  }

  size_t scratch_bytes() const override { return x_.cols() * sizeof(float); }

  void run(Worker& worker) override {
    float* row = worker.scratch();
    const int64_t inner = rows_.inner();
    const Range share = worker.share(rows_.count() * inner);
    for (int64_t i = share.begin; i < share.end; ++i) {
      const int64_t at = rows_.at(i / inner).row + i % inner, place = at / per_position_;
      const int64_t batch = place / x_.dim(1), token = place % x_.dim(1);
      load_row(x_, at, row);
      tables_.turn(row, x_.cols(), (step_->pos[batch] / stride_ + token) * stride_, inverse_);
      store_row(y_, at, row);
    }
  }

 private:
  static constexpr int64_t kMostStride = int64_t{1} << 31;  // products with positions cannot overflow
  const Step* step_;
  Tensor x_, y_;
  RopeTables tables_;
  int64_t stride_;
  bool inverse_;
  TokenRows rows_;
  int64_t per_position_;
};

class Hadamard : public Kernel {
 public:
  explicit Hadamard(CallSite& site)
      : x_(require_activation(site, site.operand(0))), y_(site.result(0)), rows_(site.step, x_) {
    site.require(x_.rank() > 0 && is_power_of_two(x_.cols()), "the last axis is no power of two");
    site.require(y_.dtype == x_.dtype && y_.shape == x_.shape, "x and its rotated form differ in type");
  }

  size_t scratch_bytes() const override { return x_.cols() * sizeof(float); }

  void run(Worker& worker) override {
    float* row = worker.scratch();
    const int64_t inner = rows_.inner();
    const Range share = worker.share(rows_.count() * inner);
    for (int64_t i = share.begin; i < share.end; ++i) {
      const int64_t at = rows_.at(i / inner).row + i % inner;
      load_row(x_, at, row);
      hadamard_row(row, x_.cols());
      store_row(y_, at, row);
    }
  }

 private:
  Tensor x_, y_;
  TokenRows rows_;
};

}  // namespace

void add_rope_kernels(Registry& registry) {
  registry["host.rope"] = {"rope(x, cos, sin, pos; stride: int, inverse: bool) -> ()", make_kernel<Rope>};
  registry["host.hadamard"] = {"hadamard(x) -> ()", make_kernel<Hadamard>};
}

}  // namespace rewright
