// Products of activations with dense weights.
//
// host.linear, host.multi_linear: y = x W^T for one activation and one or several weights; host.
// grouped_linear: one matrix for each group; host.grouped_linear_quant: with the quantisation of its
// result. The activation becomes fp32 rows once, then the tiles of all weights are shared out over the
// threads. Bound by the bytes of the weights at one row, by multiply-adds at many.
#include <memory>

#include "families.h"
#include "formats.h"
#include "matmul.h"
#include "quantize.h"
#include "rows.h"

namespace rewright {
namespace {

constexpr int kMostLinears = 8;

DType float_named(const CallSite& site, const std::string& name) {
  site.require(name == "bf16" || name == "f32", "products are bf16 or f32, not " + name);
  return name == "bf16" ? DType::kBF16 : DType::kF32;
}

// Several products of one activation, all of them in one launch.
class Linears : public Kernel {
 public:
  void run(Worker& worker) override {
    const TokenRows rows(step_, x_->tensor());
    x_->load(worker, step_, fp32_);
    worker.barrier();
    const Range share = worker.share(tiles_);
    if (share.begin == share.end || rows.count() == 0) return;
    float* out = worker.scratch();
    float* scratch = out + x_->most_rows() * kTile;
    size_t part = 0;
    int64_t first = 0;  // of the part among all tiles
    for (int64_t i = share.begin; i < share.end; ++i) {
      while (i >= first + parts_[part].weight.tiles()) first += parts_[part++].weight.tiles();
      compute(parts_[part], i - first, rows, out, scratch);
    }
  }

  size_t scratch_bytes() const override {
    size_t most = 0;
    for (const Part& part : parts_) most = std::max(most, part.weight.scratch_bytes(x_->most_rows(), part.bf16));
    return x_->most_rows() * kTile * sizeof(float) + most;
  }

 protected:
  struct Part {
    Matrix weight;
    Tensor y;
    bool bf16;
  };

  void take_activation(CallSite& site, size_t x, size_t x_scale) {
    step_ = site.step;
    x_ = std::make_unique<ActivationRows>(site, site.required(x), site.operand(x_scale));
    fp32_ = site.take_workspace<float>(x_->most_rows() * x_->k());
  }

  void add(CallSite& site, const Tensor& weight, const Tensor& scale, const Tensor& y, const std::string& out) {
    Part part{Matrix(site, weight, scale), y, false};
    std::vector<int64_t> shape = x_->tensor().shape;
    shape.back() = part.weight.n();
    site.require(part.weight.stack() == 1 && part.weight.k() == x_->k(), "activation and weight disagree on K");
    site.require(y.dtype == float_named(site, out) && y.shape == shape, "a product's type does not fit");
    part.bf16 = x_->tensor().dtype == DType::kBF16 && weight.dtype == DType::kBF16 && y.dtype == DType::kBF16;
    tiles_ += part.weight.tiles();
    parts_.push_back(part);
  }

 private:
  void compute(const Part& part, int64_t tile, const TokenRows& rows, float* out, float* scratch) const {
    RowGroup groups[kGroups];
    const int64_t inner = rows.inner(), count = rows.count();
    const int64_t width = part.weight.width(tile);
    for (int64_t next = 0; next < count;) {  // a few sequences at a time
      size_t used = 0;
      const int64_t start = next;
      while (used < kGroups && next < count) {
        const int64_t size = rows.by_token() ? rows.group_size(next) : 1;
        groups[used++] = {(next - start) * inner, size * inner};
        next += size;
      }
      const int64_t first = start * inner, total = (next - start) * inner;
      part.weight.tile(0, tile, fp32_ + first * x_->k(), x_->k(), groups, used, part.bf16, out, scratch);
      for (int64_t r = 0; r < total; ++r) {
        const int64_t row = rows.at((first + r) / inner).row + (first + r) % inner;
        store_part(part.y, row, tile * kTile, width, out + r * kTile);
      }
    }
  }

  static constexpr size_t kGroups = 16;
  const Step* step_ = nullptr;
  std::unique_ptr<ActivationRows> x_;
  float* fp32_ = nullptr;
  std::vector<Part> parts_;
  int64_t tiles_ = 0;
};

class Linear : public Linears {
 public:
  explicit Linear(CallSite& site) {
    take_activation(site, 0, 1);
    add(site, site.required(2), site.operand(3), site.result(0), site.text("out", ""));
  }
};

class MultiLinear : public Linears {
 public:
  explicit MultiLinear(CallSite& site) {
    take_activation(site, 0, 1);
    const std::string outs = site.text("outs", "");
    size_t start = 0;
    for (int i = 0; i < kMostLinears && start <= outs.size(); ++i) {
      const size_t comma = std::min(outs.find(',', start), outs.size());
      add(site, site.required(2 + 2 * i), site.operand(3 + 2 * i), site.result(i), outs.substr(start, comma - start));
      start = comma + 1;
    }
    site.require(start > outs.size() && site.results.size() <= kMostLinears, "more products than weights");
  }
};

// Rows g*R .. of the weight belong to group g, which is a row of its own of x [B,T,G,K].
class GroupedLinear : public Kernel {
 public:
  explicit GroupedLinear(CallSite& site) : GroupedLinear(site, site.result(0), site.flag("flat", false)) {}

  void run(Worker& worker) override {
    multiply(worker, y_);
  }

  size_t scratch_bytes() const override {
    const int64_t rows = x_.most_rows() / groups_;
    return rows * kTile * sizeof(float) + weight_.scratch_bytes(rows, bf16());
  }

 protected:
  GroupedLinear(CallSite& site, const Tensor& y, bool flat)
      : step_(site.step), x_(site, site.required(0), Tensor{}), weight_(site, site.required(1), site.operand(2)), y_(y), flat_(flat) {
    const Tensor& x = x_.tensor();
    site.require(x.rank() == 4 && x.dim(2) > 0 && x.dim(0) == step_->batch && x.dim(1) == step_->tokens,
                 "x is not [B,T,G,K]");
    groups_ = x.dim(2);
    site.require(weight_.stack() == 1 && weight_.k() == x_.k() && weight_.n() % groups_ == 0, "the weight does not fit");
    per_group_ = weight_.n() / groups_;
    if (y.data) check_result(site, y);
    fp32_ = site.take_workspace<float>(x_.most_rows() * x_.k());
  }

  // The weight is then widened to bf16 as well.
  bool bf16() const { return x_.tensor().dtype == DType::kBF16; }

  void check_result(const CallSite& site, const Tensor& y) const {
    std::vector<int64_t> shape{step_->batch, step_->tokens};
    if (!flat_) shape.push_back(groups_);
    shape.push_back(flat_ ? weight_.n() : per_group_);
    site.require(y.dtype == x_.tensor().dtype && y.shape == shape, "the product's type does not fit");
  }

  void multiply(Worker& worker, const Tensor& y) const {
    const TokenRows rows(step_, x_.tensor());
    x_.load(worker, step_, fp32_);  // [token][G][K]
    worker.barrier();
    const Range share = worker.share(weight_.tiles());
    float* out = worker.scratch();
    float* scratch = out + x_.most_rows() / groups_ * kTile;
    for (int64_t tile = share.begin; tile < share.end; ++tile) {
      // A tile that lies across groups is computed for each, of which its own columns are kept.
      const int64_t end = tile * kTile + weight_.width(tile);
      for (int64_t column = tile * kTile; column < end;) {
        const int64_t group = column / per_group_, stop = std::min(end, (group + 1) * per_group_);
        for (int64_t next = 0; next < rows.count();) {
          const RowGroup sequence{0, rows.group_size(next)};
          const float* x = fp32_ + (next * groups_ + group) * x_.k();
          weight_.tile(0, tile, x, groups_ * x_.k(), &sequence, 1, bf16(), out, scratch);
          for (int64_t r = 0; r < sequence.count; ++r) {
            const int64_t token = rows.at(next + r).row / groups_;
            const float* values = out + r * kTile + column - tile * kTile;
            if (flat_) {
              store_part(y, token, column, stop - column, values);
            } else {
              store_part(y, token * groups_ + group, column % per_group_, stop - column, values);
            }
          }
          next += sequence.count;
        }
        column = stop;
      }
    }
  }

  const Step* step_;
  ActivationRows x_;
  Matrix weight_;
  Tensor y_;
  bool flat_;
  int64_t groups_ = 1, per_group_ = 1;
  float* fp32_ = nullptr;
};

class GroupedLinearQuant : public GroupedLinear {
 public:
  explicit GroupedLinearQuant(CallSite& site) : GroupedLinear(site, Tensor{}, true) {
    const int64_t n = weight_.n();
    product_ = x_.tensor();
    product_.shape = {step_->batch, step_->tokens, n};
    product_.pitch = n * bits_of(product_.dtype) / 8;
    product_.data = site.take_workspace<char>(product_.nbytes());
    size_t result = 0;
    to_ = Quantizer(site, product_.shape, site.operand(3), result);
  }

  void run(Worker& worker) override {
    multiply(worker, product_);
    worker.barrier();
    // Blocks of all tokens are shared out, so that one token keeps every thread busy.
    const TokenRows rows(step_, product_);
    const int64_t per_row = to_.blocks();
    const Range share = worker.share(rows.count() * per_row);
    float* values = worker.scratch();
    for (int64_t i = share.begin; i < share.end; ++i) {
      const int64_t row = rows.at(i / per_row).row, at = i % per_row;
      load_part(product_, row, at * to_.block(), to_.block(), values);
      to_.store(row, at, 1, values);
    }
  }

  size_t scratch_bytes() const override {
    return std::max(GroupedLinear::scratch_bytes(), to_.block() * sizeof(float));
  }

 private:
  Tensor product_;
  Quantizer to_;
};

}  // namespace

void add_linear_kernels(Registry& registry) {
  registry["host.linear"] = {"linear(x, x_scale?, weight, scale?; out: str) -> ()", make_kernel<Linear>};
  registry["host.multi_linear"] = {
      "multi_linear(x, x_scale?, weight0, scale0?, weight1, scale1?, weight2?, scale2?, weight3?, scale3?, weight4?, "
      "scale4?, weight5?, scale5?, weight6?, scale6?, weight7?, scale7?; outs: str) -> (*)",
      make_kernel<MultiLinear>};
  registry["host.grouped_linear"] = {"grouped_linear(x, weight, scale?; flat: bool) -> ()", make_kernel<GroupedLinear>};
  registry["host.grouped_linear_quant"] = {
      "grouped_linear_quant(x, weight, scale?, fixed?; fmt: str, block: int, static: bool) -> (*)", make_kernel<GroupedLinearQuant>};
}

}  // namespace rewright
