// Choice of experts and their weights, and the gated activation.
//
// host.route: the k best of sqrt(softplus(logits)) + bias. host.route_hash: experts from a table. Weights
// are the unbiased scores over their sum, times a factor. host.swiglu: silu(gate) * up with both clamped;
// host.swiglu_quant: that with its quantisation. Routing is bound by latency (a few hundred logits a
// token), the activation by memory.
#include "route.h"

#include <algorithm>
#include <cmath>

#include "families.h"
#include "math.h"
#include "quantize.h"
#include "rows.h"
#include "sum.h"
#include "vector.h"

namespace rewright {

ExpertChoice::ExpertChoice(const CallSite& site, const Tensor& logits, const Tensor& bias, const Tensor& table,
                           const Tensor& tokens, int64_t k, float scale)
    : step_(site.step), logits_(logits), table_(table), tokens_(tokens), scale_(scale) {
  site.require(logits && logits.dtype == DType::kF32 && logits.rank() == 3 && logits.cols() > 0, "logits are not f32[B,T,E]");
  site.require(logits.dim(0) == step_->batch && logits.dim(1) == step_->tokens, "logits are not those of the step");
  site.require(static_cast<bool>(bias) != static_cast<bool>(table), "experts are chosen by bias or by table");
  if (table) {
    const bool ids = table.dtype == DType::kI64 || table.dtype == DType::kI32;
    site.require(ids && table.rank() == 2 && table.dim(0) > 0, "the table is not int[V,k]");
    const bool fits = tokens && tokens.dtype == DType::kI32 && tokens.rank() == 2 && tokens.dim(0) == logits.dim(0) &&
                      tokens.dim(1) == logits.dim(1);
    site.require(fits, "tokens are not i32[B,T]");
    k = table.dim(1);
  } else {
    site.require(is_float(bias.dtype) && bias.rank() == 1 && bias.cols() == logits.cols(), "the bias is no float [E]");
    site.require(k <= logits.cols(), "more choices than experts");
    bias_.resize(bias.cols());
    load_row(bias, 0, bias_.data());
  }
  site.require(0 < k && k <= kMostChoices, "a token has 1 to 64 experts");
  k_ = static_cast<int>(k);
}

namespace {

// NaN counts as the largest, as in the reference's sort.
bool better(float a, float b) { return a > b || (std::isnan(a) && !std::isnan(b)); }

// Ids of the k largest of scores[count].
void largest(const float* scores, int64_t count, int k, int32_t* ids) {
  int chosen = 0;
  for (int32_t id = 0; id < count; ++id) {
    if (chosen == k && !better(scores[id], scores[ids[k - 1]])) continue;
    int at = chosen < k ? chosen++ : k - 1;
    for (; at > 0 && better(scores[id], scores[ids[at - 1]]); --at) ids[at] = ids[at - 1];
    ids[at] = id;
  }
}

}  // namespace

void ExpertChoice::choose(int64_t row, int32_t* ids, float* weights, float* scratch) const {
  const int64_t count = experts(), batch = row / step_->tokens, token = row % step_->tokens;
  const float* logits = logits_.row<float>(row);
  const int64_t by_vector = in_vectors(step_->n_valid[batch] * count, token * count, count);
  float* affinity = scratch;
  std::copy_n(logits, by_vector, affinity);
  vector().softplus(affinity, by_vector);
  for (int64_t e = by_vector; e < count; ++e) affinity[e] = softplus_scalar(logits[e]);
  for (int64_t e = 0; e < count; ++e) affinity[e] = std::sqrt(affinity[e]);
  if (table_) {
    const int64_t id = std::clamp<int64_t>(tokens_.row<int32_t>(batch)[token], 0, table_.dim(0) - 1);
    for (int j = 0; j < k_; ++j) {
      const int64_t expert = table_.dtype == DType::kI64 ? table_.row<int64_t>(id)[j] : table_.row<int32_t>(id)[j];
      ids[j] = static_cast<int32_t>(std::clamp<int64_t>(expert, 0, count - 1));
    }
  } else {
    float* scores = scratch + count;
    for (int64_t e = 0; e < count; ++e) scores[e] = affinity[e] + bias_[e];
    largest(scores, count, k_, ids);
  }
  for (int j = 0; j < k_; ++j) weights[j] = affinity[ids[j]];
  const float sum = sum_in_order(weights, k_);
  for (int j = 0; j < k_; ++j) weights[j] = weights[j] / sum * scale_;
}

void swiglu_row(const float* gate, const float* up, int64_t count, const float* weight, float limit, float* out,
                int64_t in_vectors) {
  constexpr int64_t kPart = 64;
  float g[kPart], e[kPart];
  for (int64_t start = 0; start < count; start += kPart) {
    const int64_t size = std::min(kPart, count - start), whole = std::clamp<int64_t>(in_vectors - start, 0, size);
    for (int64_t i = 0; i < size; ++i) {
      g[i] = gate[start + i] > limit ? limit : gate[start + i];
      e[i] = -g[i];
    }
    vector().exp_ulp1(e, whole);
    for (int64_t i = whole; i < size; ++i) e[i] = std::exp(e[i]);
    for (int64_t i = 0; i < size; ++i) {
      float u = up[start + i];
      u = u < -limit ? -limit : u;
      u = u > limit ? limit : u;
      g[i] = g[i] / (1.0f + e[i]) * u;
    }
    if (weight) {
      for (int64_t i = 0; i < size; ++i) g[i] *= *weight;
    }
    std::copy_n(g, size, out + start);
  }
}

namespace {

// host.route and host.route_hash.
class Route : public Kernel {
 public:
  static constexpr bool kByScore = true, kByTable = false;

  Route(CallSite& site, bool by_score)
      : choice_(site, site.required(0), by_score ? site.required(1) : Tensor{}, by_score ? Tensor{} : site.required(1),
                by_score ? Tensor{} : site.required(2), by_score ? site.integer("k") : 0,
                static_cast<float>(site.number("scale"))),
        n_valid_(site.required(by_score ? 2 : 3)),
        experts_(site.result(0)),
        weights_(site.result(1)),
        rows_(site.step, site.required(0)) {
    const Tensor& logits = site.required(0);
    site.require(n_valid_.dtype == DType::kI32 && n_valid_.rank() == 1 && n_valid_.dim(0) == logits.dim(0),
                 "n_valid is not i32[B]");
    const std::vector<int64_t> shape{logits.dim(0), logits.dim(1), choice_.k()};
    site.require(experts_.dtype == DType::kI32 && experts_.shape == shape, "experts are not i32[B,T,k]");
    site.require(weights_.dtype == DType::kF32 && weights_.shape == shape, "weights are not f32[B,T,k]");
  }

  size_t scratch_bytes() const override { return 2 * choice_.experts() * sizeof(float); }

  void run(Worker& worker) override {
    const Range share = worker.share(rows_.count());
    for (int64_t i = share.begin; i < share.end; ++i) {
      const TokenRows::Group token = rows_.at(i);
      int32_t* ids = experts_.row<int32_t>(token.row);
      float* weights = weights_.row<float>(token.row);
      if (token.token < n_valid_.row<int32_t>(0)[token.batch]) {
        choice_.choose(token.row, ids, weights, worker.scratch());
      } else {
        std::fill_n(ids, choice_.k(), -1);
        std::fill_n(weights, choice_.k(), 0.0f);
      }
    }
  }

 private:
  ExpertChoice choice_;
  Tensor n_valid_, experts_, weights_;
  TokenRows rows_;
};

class RouteByScore : public Route {
 public:
  explicit RouteByScore(CallSite& site) : Route(site, kByScore) {}
};

class RouteByTable : public Route {
 public:
  explicit RouteByTable(CallSite& site) : Route(site, kByTable) {}
};

// Rows of gate, up and weights, the activation of a part of a row.
class Gated {
 public:
  explicit Gated(const CallSite& site)
      : step_(site.step),
        gate_(require_activation(site, site.operand(0))),
        up_(site.required(1)),
        weights_(site.operand(2)),
        limit_(static_cast<float>(site.number("limit"))),
        rows_(site.step, gate_) {
    site.require(gate_.rank() >= 2, "gate has no rows");
    site.require(up_.dtype == gate_.dtype && up_.shape == gate_.shape, "gate and up differ in type");
    const std::vector<int64_t> lead(gate_.shape.begin(), gate_.shape.end() - 1);
    site.require(!weights_ || (weights_.dtype == DType::kF32 && weights_.shape == lead), "the weights do not fit");
  }

  const Tensor& tensor() const { return gate_; }
  int64_t count() const { return rows_.count() * rows_.inner(); }
  int64_t row(int64_t index) const { return rows_.at(index / rows_.inner()).row + index % rows_.inner(); }

  // Columns first .. of the index-th row, rounded to the dtype, into out[count]; uses count floats behind it.
  void compute(int64_t index, int64_t first, int64_t count, float* out) const {
    const int64_t row = this->row(index), width = gate_.cols();
    float* up = out + count;
    load_part(gate_, row, first, count, out);
    load_part(up_, row, first, count, up);
    const float* weight = weights_ ? weights_.row<float>(row / weights_.cols()) + row % weights_.cols() : nullptr;
    int64_t all = gate_.count() / gate_.dim(0), place = row * width % all;  // elements of the sequence
    if (rows_.by_token()) {
      const TokenRows::Group token = rows_.at(index / rows_.inner());
      all = step_->n_valid[token.batch] * rows_.inner() * width;
      place = (token.token * rows_.inner() + index % rows_.inner()) * width;
    }
    swiglu_row(out, up, count, weight, limit_, out, in_vectors(all, place + first, count));
    round_to(gate_.dtype, out, count);
  }

 private:
  const Step* step_;
  Tensor gate_, up_, weights_;
  float limit_;
  TokenRows rows_;
};

class Swiglu : public Kernel {
 public:
  explicit Swiglu(CallSite& site) : gated_(site), y_(site.result(0)) {
    site.require(y_.dtype == gated_.tensor().dtype && y_.shape == gated_.tensor().shape, "the result's type does not fit");
  }

  size_t scratch_bytes() const override { return 2 * y_.cols() * sizeof(float); }

  void run(Worker& worker) override {
    const Range share = worker.share(gated_.count());
    for (int64_t i = share.begin; i < share.end; ++i) {
      gated_.compute(i, 0, y_.cols(), worker.scratch());
      store_row(y_, gated_.row(i), worker.scratch());
    }
  }

 private:
  Gated gated_;
  Tensor y_;
};

class SwigluQuant : public Kernel {
 public:
  explicit SwigluQuant(CallSite& site) : gated_(site) {
    size_t result = 0;
    to_ = Quantizer(site, gated_.tensor().shape, site.operand(3), result);
  }

  size_t scratch_bytes() const override { return 2 * gated_.tensor().cols() * sizeof(float); }

  void run(Worker& worker) override {
    const int64_t per_row = to_.blocks();
    const Range share = worker.share(gated_.count() * per_row);
    for (int64_t i = share.begin; i < share.end;) {
      const int64_t index = i / per_row, first = i % per_row, count = std::min(share.end - i, per_row - first);
      gated_.compute(index, first * to_.block(), count * to_.block(), worker.scratch());
      to_.store(gated_.row(index), first, count, worker.scratch());
      i += count;
    }
  }

 private:
  Gated gated_;
  Quantizer to_;
};

}  // namespace

void add_route_kernels(Registry& registry) {
  registry["host.route"] = {"route(logits, bias, n_valid; k: int, scale: float) -> (experts, weights)",
                            make_kernel<RouteByScore>};
  registry["host.route_hash"] = {"route_hash(logits, table, tokens, n_valid; scale: float) -> (experts, weights)",
                                 make_kernel<RouteByTable>};
  registry["host.swiglu"] = {"swiglu(gate, up, weights?; limit: float) -> ()", make_kernel<Swiglu>};
  registry["host.swiglu_quant"] = {
      "swiglu_quant(gate, up, weights?, fixed?; limit: float, fmt: str, block: int, static: bool) -> (*)",
      make_kernel<SwigluQuant>};
}

}  // namespace rewright
