// Products with the routed experts' weights, and whole expert blocks.
//
// host.expert_linear: each token's product with the matrices of its experts; host.expert_sum: their
// weighted sum; host.shared_expert and host.moe: gate, up, activation, quantisation and down in one
// launch. Token-expert pairs are ordered by sequence, expert and token, so that one matrix is decoded
// once for all tokens of a sequence that reach it. Bound by the bytes of the distinct experts.
#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>

#include "families.h"
#include "formats.h"
#include "matmul.h"
#include "quantize.h"
#include "route.h"
#include "rows.h"

namespace rewright {
namespace {

struct Pair {
  int32_t expert;
  int32_t token;   // index among the step's valid tokens
  int32_t choice;  // which of the token's k experts
};

// Rows that share a matrix: a run of pairs.
struct Run {
  int64_t expert, first, count;
};

DType product_type(const CallSite& site, const std::string& name) {
  site.require(name == "bf16" || name == "f32", "products are bf16 or f32, not " + name);
  return name == "bf16" ? DType::kBF16 : DType::kF32;
}

// Pairs of a step in order, in memory that the plan reserved.
class PairList {
 public:
  PairList(CallSite& site, int64_t tokens, int64_t k, int64_t experts)
      : k_(k), experts_(experts), pairs_(site.take_workspace<Pair>(tokens * k)), runs_(site.take_workspace<Run>(tokens * k)),
        counts_(site.take_workspace<int64_t>(2)) {}

  // One thread builds, the others wait at a barrier. `ids(token)` gives k expert ids; ids that name no
  // expert make no pair.
  template <typename Ids>
  void build(const TokenRows& rows, Ids ids) {
    int64_t count = 0, runs = 0;
    for (int64_t next = 0; next < rows.count();) {
      const int64_t end = next + rows.group_size(next), first = count;
      for (int64_t token = next; token < end; ++token) {
        const int32_t* mine = ids(token);
        for (int64_t j = 0; j < k_; ++j) {
          if (mine[j] < 0 || mine[j] >= experts_) continue;
          pairs_[count++] = {mine[j], static_cast<int32_t>(token), static_cast<int32_t>(j)};
        }
      }
      std::sort(pairs_ + first, pairs_ + count, [](const Pair& a, const Pair& b) {
        return std::tie(a.expert, a.token, a.choice) < std::tie(b.expert, b.token, b.choice);
      });
      for (int64_t i = first; i < count; ++i) {
        if (i == first || pairs_[i].expert != pairs_[i - 1].expert) runs_[runs++] = {pairs_[i].expert, i, 0};
        ++runs_[runs - 1].count;
      }
      next = end;
    }
    counts_[0] = count;
    counts_[1] = runs;
  }

  int64_t size() const { return counts_[0]; }
  int64_t runs() const { return counts_[1]; }
  const Pair& pair(int64_t i) const { return pairs_[i]; }
  const Run& run(int64_t i) const { return runs_[i]; }
  const Run* all_runs() const { return runs_; }

 private:
  int64_t k_, experts_;
  Pair* pairs_;
  Run* runs_;
  int64_t* counts_;
};

// This worker's share of the products of runs of rows with one or two matrices each: y[row][N] for x[row][K],
// rounded to `dtype`.
struct Product {
  const Matrix* weight;
  float* y;
};

void multiply_runs(Worker& worker, const Run* runs, int64_t run_count, const float* x, const Product* products,
                   int product_count, DType dtype, int64_t most_rows) {
  const Matrix& weight = *products[0].weight;
  const int64_t tiles = weight.tiles(), per_run = tiles * product_count;
  const Range share = worker.share(run_count * per_run);
  float* out = worker.scratch();
  float* scratch = out + most_rows * kTile;
  for (int64_t i = share.begin; i < share.end; ++i) {
    const Run& run = runs[i / per_run];
    const Product& product = products[i % per_run / tiles];
    const int64_t tile = i % tiles, width = weight.width(tile);
    const RowGroup rows{0, run.count};
    product.weight->tile(run.expert, tile, x + run.first * weight.k(), weight.k(), &rows, 1, false, out, scratch);
    for (int64_t r = 0; r < run.count; ++r) {
      round_to(dtype, out + r * kTile, width);
      std::memcpy(product.y + (run.first + r) * weight.n() + tile * kTile, out + r * kTile, width * sizeof(float));
    }
  }
}

size_t runs_scratch(const Matrix& weight, int64_t most_rows) {
  return most_rows * kTile * sizeof(float) + weight.scratch_bytes(most_rows);
}

class ExpertLinear : public Kernel {
 public:
  explicit ExpertLinear(CallSite& site)
      : step_(site.step), x_(site, site.required(0), site.operand(1)), weight_(site, site.required(2), site.operand(3)),
        experts_(site.required(4)), y_(site.result(0)), dtype_(product_type(site, site.text("out", ""))) {
    const Tensor& x = x_.tensor();
    site.require(experts_.dtype == DType::kI32 && experts_.rank() == 3 && experts_.dim(0) == step_->batch &&
                     experts_.dim(1) == step_->tokens && experts_.dim(2) > 0,
                 "experts is not i32[B,T,k]");
    k_ = experts_.dim(2);
    shared_ = x.rank() == 3;
    site.require((shared_ || (x.rank() == 4 && x.dim(2) == k_)) && x.dim(0) == step_->batch && x.dim(1) == step_->tokens,
                 "x and experts disagree");
    site.require(weight_.k() == x_.k(), "x and the weight disagree on K");
    std::vector<int64_t> shape = experts_.shape;
    shape.push_back(weight_.n());
    site.require(y_.dtype == dtype_ && y_.shape == shape, "the product's type does not fit");
    tokens_ = int64_t{step_->batch} * step_->tokens;
    pairs_.emplace(site, tokens_, k_, weight_.stack());
    gathered_ = site.take_workspace<float>(tokens_ * k_ * x_.k());
    product_ = site.take_workspace<float>(tokens_ * k_ * weight_.n());
  }

  size_t scratch_bytes() const override { return runs_scratch(weight_, tokens_ * k_); }

  void run(Worker& worker) override {
    const TokenRows rows(step_, experts_);
    if (worker.rank() == 0) {
      pairs_->build(rows, [&](int64_t token) { return experts_.row<int32_t>(rows.at(token).row); });
    }
    worker.barrier();
    Range share = worker.share(pairs_->size());
    for (int64_t i = share.begin; i < share.end; ++i) {
      const Pair& pair = pairs_->pair(i);
      const int64_t token = rows.at(pair.token).row;
      x_.load_row(shared_ ? token : token * k_ + pair.choice, gathered_ + i * x_.k());
    }
    // Choices that name no expert give rows of zeros.
    share = worker.share(rows.count() * k_);
    for (int64_t i = share.begin; i < share.end; ++i) {
      const int64_t token = rows.at(i / k_).row;
      const int32_t id = experts_.row<int32_t>(token)[i % k_];
      if (id >= 0 && id < weight_.stack()) continue;
      std::memset(y_.row<char>(token * k_ + i % k_), 0, y_.cols() * bits_of(y_.dtype) / 8);
    }
    worker.barrier();
    const Product product{&weight_, product_};
    multiply_runs(worker, pairs_->all_runs(), pairs_->runs(), gathered_, &product, 1, dtype_, tokens_ * k_);
    worker.barrier();
    share = worker.share(pairs_->size());
    for (int64_t i = share.begin; i < share.end; ++i) {
      const Pair& pair = pairs_->pair(i);
      store_row(y_, rows.at(pair.token).row * k_ + pair.choice, product_ + i * weight_.n());
    }
  }

 private:
  const Step* step_;
  ActivationRows x_;
  Matrix weight_;
  Tensor experts_, y_;
  DType dtype_;
  int64_t k_ = 0, tokens_ = 0;
  bool shared_ = false;
  std::optional<PairList> pairs_;
  float *gathered_ = nullptr, *product_ = nullptr;
};

// Sum over a token's experts in ascending id, the shared expert's row last.
class ExpertSum : public Kernel {
 public:
  explicit ExpertSum(CallSite& site)
      : step_(site.step), routed_(require_activation(site, site.operand(0))), experts_(site.required(1)),
        shared_(require_activation(site, site.operand(2))), y_(site.result(0)) {
    site.require(experts_.dtype == DType::kI32 && experts_.rank() == 3, "experts is not i32[B,T,k]");
    k_ = experts_.dim(2);
    std::vector<int64_t> shape = experts_.shape;
    site.require(k_ > 0 && k_ <= kMostChoices, "a token has at most 64 experts");
    shape.push_back(shared_.cols());
    site.require(routed_.shape == shape, "routed rows and experts disagree");
    shape.erase(shape.begin() + 2);
    site.require(shared_.shape == shape && y_.shape == shape && y_.dtype == shared_.dtype, "the sum's type does not fit");
  }

  size_t scratch_bytes() const override { return 2 * y_.cols() * sizeof(float); }

  void run(Worker& worker) override {
    const TokenRows rows(step_, experts_);
    float* total = worker.scratch();
    float* row = total + y_.cols();
    const Range share = worker.share(rows.count());
    for (int64_t i = share.begin; i < share.end; ++i) {
      const int64_t token = rows.at(i).row;
      const int32_t* ids = experts_.row<int32_t>(token);
      int order[kMostChoices];
      for (int j = 0; j < k_; ++j) order[j] = j;
      std::stable_sort(order, order + k_, [ids](int a, int b) { return ids[a] < ids[b]; });
      load_row(routed_, token * k_ + order[0], total);
      for (int j = 1; j < k_; ++j) {
        load_row(routed_, token * k_ + order[j], row);
        for (int64_t c = 0; c < y_.cols(); ++c) total[c] += row[c];
      }
      load_row(shared_, token, row);
      for (int64_t c = 0; c < y_.cols(); ++c) total[c] += row[c];
      store_row(y_, token, total);
    }
  }

 private:
  const Step* step_;
  Tensor routed_, experts_, shared_, y_;
  int k_ = 0;
};

// What shared_expert and moe do between their first and last products.
struct Hidden {
  // `fixed`: operand with the scales of the quantisation, if they are given; `columns`: inner width.
  Hidden(const CallSite& site, const Tensor& fixed, int64_t columns)
      : limit(static_cast<float>(site.number("limit"))), dtype(product_type(site, site.text("hidden", ""))),
        out(product_type(site, site.text("out", ""))), block(site.integer("block", 0)) {
    const std::string fmt = site.text("fmt", "");
    site.require(fmt.empty() || (fmt == "e4m3" && block > 0 && columns % block == 0), "the inner quantisation does not fit");
    quantised = !fmt.empty();
    site.require(quantised || !fixed, "fixed scales without a quantisation");
    if (fixed) scales = fixed_scales(site, fixed, columns, block);
  }

  // gate[count], up[count] -> what the down projection reads, in place of gate. Columns begin at block `first`.
  void activate(float* gate, const float* up, int64_t count, int64_t first, const float* weight) const {
    swiglu_row(gate, up, count, weight, limit, gate);
    round_to(dtype, gate, count);
    if (scales != nullptr) {
      round_row_fixed(gate, count, block, Codes::kE4M3, scales + first);
    } else if (quantised) {
      round_row(gate, count, block, Codes::kE4M3);
    }
  }

  float limit;
  DType dtype, out;
  int64_t block;
  bool quantised = false;
  const uint8_t* scales = nullptr;
};

void require_mlp(const CallSite& site, const Matrix& w1, const Matrix& w3, const Matrix& w2, int64_t k) {
  site.require(w1.k() == k && w3.k() == k && w1.n() == w3.n() && w2.k() == w1.n(), "the matrices do not fit each other");
  site.require(w1.stack() == w3.stack() && w1.stack() == w2.stack(), "the stacks differ");
}

class SharedExpert : public Kernel {
 public:
  explicit SharedExpert(CallSite& site)
      : step_(site.step), x_(site, site.required(0), site.operand(1)), w1_(site, site.required(2), site.operand(3)),
        w3_(site, site.required(4), site.operand(5)), w2_(site, site.required(6), site.operand(7)), y_(site.result(0)),
        hidden_(site, site.operand(8), w1_.n()) {
    require_mlp(site, w1_, w3_, w2_, x_.k());
    const Tensor& x = x_.tensor();
    std::vector<int64_t> shape = x.shape;
    shape.back() = w2_.n();
    site.require(x.rank() == 3 && x.dim(0) == step_->batch && x.dim(1) == step_->tokens && w1_.stack() == 1, "x is not [B,T,D]");
    site.require(y_.shape == shape && y_.dtype == hidden_.out, "the result's type does not fit");
    tokens_ = x_.most_rows();
    fp32_ = site.take_workspace<float>(tokens_ * x_.k());
    gate_ = site.take_workspace<float>(tokens_ * w1_.n());
    up_ = site.take_workspace<float>(tokens_ * w1_.n());
    down_ = site.take_workspace<float>(tokens_ * w2_.n());
    runs_ = site.take_workspace<Run>(step_->batch);
  }

  size_t scratch_bytes() const override { return runs_scratch(w1_, tokens_); }

  void run(Worker& worker) override {
    const TokenRows rows(step_, x_.tensor());
    int64_t runs = 0;
    for (int64_t next = 0; next < rows.count(); ++runs) {
      const int64_t size = rows.group_size(next);
      if (worker.rank() == 0) runs_[runs] = {0, next, size};
      next += size;
    }
    x_.load(worker, step_, fp32_);
    worker.barrier();
    const Product in[] = {{&w1_, gate_}, {&w3_, up_}};
    multiply_runs(worker, runs_, runs, fp32_, in, 2, hidden_.dtype, tokens_);
    worker.barrier();
    const int64_t piece = hidden_.quantised ? hidden_.block : w1_.n(), pieces = w1_.n() / piece;
    Range share = worker.share(rows.count() * pieces);
    for (int64_t i = share.begin; i < share.end; ++i) {
      hidden_.activate(gate_ + i * piece, up_ + i * piece, piece, i % pieces, nullptr);
    }
    worker.barrier();
    const Product out{&w2_, down_};
    multiply_runs(worker, runs_, runs, gate_, &out, 1, hidden_.out, tokens_);
    worker.barrier();
    share = worker.share(rows.count());
    for (int64_t i = share.begin; i < share.end; ++i) store_row(y_, rows.at(i).row, down_ + i * w2_.n());
  }

 private:
  const Step* step_;
  ActivationRows x_;
  Matrix w1_, w3_, w2_;
  Tensor y_;
  Hidden hidden_;
  int64_t tokens_ = 0;
  float *fp32_ = nullptr, *gate_ = nullptr, *up_ = nullptr, *down_ = nullptr;
  Run* runs_ = nullptr;
};

class Moe : public Kernel {
 public:
  explicit Moe(CallSite& site)
      : step_(site.step), x_(site, site.required(0), site.operand(1)),
        choice_(site, site.required(2), site.operand(3), site.operand(4), site.operand(5), site.integer("k", 0),
                static_cast<float>(site.number("route_scale"))),
        w1_(site, site.required(7), site.operand(8)), w3_(site, site.required(9), site.operand(10)),
        w2_(site, site.required(11), site.operand(12)), shared_(require_activation(site, site.operand(13))),
        y_(site.result(0)), hidden_(site, site.operand(14), w1_.n()) {
    require_mlp(site, w1_, w3_, w2_, x_.k());
    const Tensor& x = x_.tensor();
    site.require(x.rank() == 3 && x.dim(0) == step_->batch && x.dim(1) == step_->tokens, "x is not [B,T,D]");
    site.require(w1_.stack() == choice_.experts(), "weights and logits disagree on the number of experts");
    site.require(shared_.shape == y_.shape && shared_.dtype == y_.dtype && y_.rank() == 3 && y_.cols() == w2_.n() &&
                     y_.dim(0) == step_->batch && y_.dim(1) == step_->tokens,
                 "the result's type does not fit");
    k_ = choice_.k();
    tokens_ = x_.most_rows();
    const int64_t pairs = tokens_ * k_;
    ids_ = site.take_workspace<int32_t>(pairs);
    weights_ = site.take_workspace<float>(pairs);
    places_ = site.take_workspace<int32_t>(pairs);
    pairs_.emplace(site, tokens_, k_, w1_.stack());
    gathered_ = site.take_workspace<float>(pairs * x_.k());
    gate_ = site.take_workspace<float>(pairs * w1_.n());
    up_ = site.take_workspace<float>(pairs * w1_.n());
    down_ = site.take_workspace<float>(pairs * w2_.n());
  }

  size_t scratch_bytes() const override {
    return std::max(runs_scratch(w1_, tokens_ * k_), (choice_.experts() * 4 + 2 * y_.cols()) * sizeof(float));
  }

  void run(Worker& worker) override {
    const TokenRows rows(step_, x_.tensor());
    Range share = worker.share(rows.count());
    for (int64_t i = share.begin; i < share.end; ++i) {
      choice_.choose(rows.at(i).row, ids_ + i * k_, weights_ + i * k_, worker.scratch());
    }
    worker.barrier();
    if (worker.rank() == 0) {
      pairs_->build(rows, [&](int64_t token) { return ids_ + token * k_; });
      std::fill(places_, places_ + rows.count() * k_, -1);
      for (int64_t i = 0; i < pairs_->size(); ++i) {
        places_[pairs_->pair(i).token * k_ + pairs_->pair(i).choice] = static_cast<int32_t>(i);
      }
    }
    worker.barrier();
    share = worker.share(pairs_->size());
    for (int64_t i = share.begin; i < share.end; ++i) {
      x_.load_row(rows.at(pairs_->pair(i).token).row, gathered_ + i * x_.k());
    }
    worker.barrier();
    const Product in[] = {{&w1_, gate_}, {&w3_, up_}};
    multiply_runs(worker, pairs_->all_runs(), pairs_->runs(), gathered_, in, 2, hidden_.dtype, tokens_ * k_);
    worker.barrier();
    const int64_t piece = hidden_.quantised ? hidden_.block : w1_.n(), pieces = w1_.n() / piece;
    share = worker.share(pairs_->size() * pieces);
    for (int64_t i = share.begin; i < share.end; ++i) {
      const Pair& pair = pairs_->pair(i / pieces);
      hidden_.activate(gate_ + i * piece, up_ + i * piece, piece, i % pieces, weights_ + pair.token * k_ + pair.choice);
    }
    worker.barrier();
    const Product out{&w2_, down_};
    multiply_runs(worker, pairs_->all_runs(), pairs_->runs(), gate_, &out, 1, hidden_.out, tokens_ * k_);
    worker.barrier();
    sum(worker, rows);
  }

 private:
  // Ascending expert id whatever the order of the choice, equal ids in that order, the shared row last.
  void sum(Worker& worker, const TokenRows& rows) const {
    const Range share = worker.share(rows.count());
    float* total = worker.scratch();
    float* row = total + y_.cols();
    for (int64_t i = share.begin; i < share.end; ++i) {
      const int64_t at = rows.at(i).row;
      const int32_t* ids = ids_ + i * k_;
      int32_t order[kMostChoices];
      for (int j = 0; j < k_; ++j) order[j] = j;
      std::stable_sort(order, order + k_, [ids](int a, int b) { return ids[a] < ids[b]; });
      for (int j = 0; j < k_; ++j) {
        const int32_t place = places_[i * k_ + order[j]];
        for (int64_t c = 0; c < y_.cols(); ++c) {
          const float value = place < 0 ? 0.0f : down_[place * w2_.n() + c];
          total[c] = j == 0 ? value : total[c] + value;
        }
      }
      load_row(shared_, at, row);
      for (int64_t c = 0; c < y_.cols(); ++c) total[c] += row[c];
      store_row(y_, at, total);
    }
  }

  const Step* step_;
  ActivationRows x_;
  ExpertChoice choice_;
  Matrix w1_, w3_, w2_;
  Tensor shared_, y_;
  Hidden hidden_;
  int64_t tokens_ = 0;
  int k_ = 0;
  std::optional<PairList> pairs_;
  int32_t *ids_ = nullptr, *places_ = nullptr;
  float *weights_ = nullptr, *gathered_ = nullptr, *gate_ = nullptr, *up_ = nullptr, *down_ = nullptr;
};

}  // namespace

void add_expert_kernels(Registry& registry) {
  registry["host.expert_linear"] = {"expert_linear(x, x_scale?, weight, scale?, experts; out: str) -> ()",
                                    make_kernel<ExpertLinear>};
  registry["host.expert_sum"] = {"expert_sum(routed, experts, shared) -> ()", make_kernel<ExpertSum>};
  registry["host.shared_expert"] = {
      "shared_expert(x, x_scale?, w1, s1?, w3, s3?, w2, s2?, fixed?; limit: float, hidden: str, out: str, fmt: str, block: int) "
      "-> ()",
      make_kernel<SharedExpert>};
  registry["host.moe"] = {
      "moe(x, x_scale?, logits, bias?, table?, tokens?, n_valid, w1, s1?, w3, s3?, w2, s2?, shared, fixed?; k: int, "
      "route_scale: float, limit: float, hidden: str, out: str, fmt: str, block: int) -> ()",
      make_kernel<Moe>};
}

}  // namespace rewright
