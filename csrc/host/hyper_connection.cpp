// Hyper-Connections: n residual streams X[B,T,n,D], collapsed before a sub-block and put back behind it.
//
// host.hc_expand: copies of the embedding. host.hc_mix: logits (fn . x) * rsqrt(mean(x^2) + eps) of the
// flattened streams x. host.hc_split, host.hc_head_split: logits to coefficients. host.hc_collapse: the
// weighted sum of the streams. host.hc_combine: streams after a sub-block. host.hc_pre, host.hc_post_pre,
// host.hc_head: all of that around a sub-block in one launch, with the norm and the quantisation behind
// it; the streams are read once and stay in the cache as fp32. Bound by the bytes of streams and fn.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "families.h"
#include "math.h"
#include "matmul.h"
#include "norm.h"
#include "quantize.h"
#include "rows.h"
#include "sum.h"

namespace rewright {
namespace {

constexpr int64_t kMostStreams = 8;
constexpr int64_t kMostSteps = 1 << 10;  // of Sinkhorn
constexpr int64_t kPart = 256;           // columns of a piece of work: its rows stay in the first cache

int64_t parts(int64_t columns) { return (columns + kPart - 1) / kPart; }

// The tokens of a tensor [B,T,..] as rows: at(i).row is b * T + t.
TokenRows tokens_of(const Step* step, const Tensor& tensor) {
  Tensor tokens;
  tokens.shape = {tensor.dim(0), tensor.dim(1), 1};
  return TokenRows(step, tokens);
}

const Tensor& require_streams(const CallSite& site, const Tensor& streams) {
  require_activation(site, streams);
  site.require(streams.rank() == 4 && streams.dim(2) <= kMostStreams, "streams are not [B,T,n,D] with n up to 8");
  return streams;
}

void require_type(const CallSite& site, const Tensor& tensor, DType dtype, const std::vector<int64_t>& shape,
                  const std::string& what) {
  site.require(tensor && tensor.dtype == dtype && tensor.shape == shape, what + " is of another type");
}

// A vector of coefficients as fp32, read when the plan is loaded.
std::vector<float> read_vector(const CallSite& site, const Tensor& tensor, int64_t count, const std::string& what) {
  const bool fits = tensor && is_float(tensor.dtype) && tensor.rank() == 1 && tensor.dim(0) == count;
  site.require(fits, what + " is not a float [" + std::to_string(count) + "]");
  std::vector<float> values(count);
  load_row(tensor, 0, values.data());
  return values;
}

// Sigmoids of values[count] of which the reference's vectors reach the first `by_vector`.
void sigmoids(float* values, int64_t count, int64_t by_vector) {
  for (int64_t i = 0; i < by_vector; ++i) values[i] = sigmoid(values[i]);
  for (int64_t i = by_vector; i < count; ++i) values[i] = sigmoid_scalar(values[i]);
}

// Sum of a row of a softmax, n <= 8: one after the other, or eight lanes folded in halves.
float sum_of_exponentials(const float* e, int64_t n) {
  if (n == 8) return ((e[0] + e[4]) + (e[2] + e[6])) + ((e[1] + e[5]) + (e[3] + e[7]));
  float sum = e[0];
  for (int64_t i = 1; i < n; ++i) sum += e[i];
  return sum;
}

// How the reference adds up n rows of `columns` columns: one after the other in the first columns, which it takes
// in groups, and in the columns that are left over with four sums side by side (the terms behind the last whole
// four go to the first sum). Up to four rows both are the same.
int64_t columns_in_order(int64_t columns) { return columns < 8 ? columns / 4 * 4 : columns / 32 * 32; }

float sum_by_four(const float* x, int64_t stride, int64_t n) {
  float sums[4] = {};
  const int64_t whole = n / 4 * 4;
  for (int64_t i = 0; i < n; ++i) sums[i < whole ? i % 4 : 0] += x[i * stride];
  return ((sums[0] + sums[1]) + sums[2]) + sums[3];
}

void divide_columns(float* comb, int64_t n, float eps) {
  for (int64_t c = 0; c < n; ++c) {
    float sum = 0;
    for (int64_t r = 0; r < n; ++r) sum += comb[r * n + c];
    if (n > 4 && c >= columns_in_order(n)) sum = sum_by_four(comb + c, n, n);
    sum += eps;
    for (int64_t r = 0; r < n; ++r) comb[r * n + c] /= sum;
  }
}

// A matrix [n,n] of logits -> doubly stochastic.
void sinkhorn(float* comb, int64_t n, int64_t steps, float eps) {
  for (float* row = comb; row < comb + n * n; row += n) {
    const float most = *std::max_element(row, row + n);
    for (int64_t c = 0; c < n; ++c) row[c] = exp_ulp1(row[c] - most);
    const float inverse = 1.0f / sum_of_exponentials(row, n);
    for (int64_t c = 0; c < n; ++c) row[c] = row[c] * inverse + eps;
  }
  divide_columns(comb, n, eps);
  for (int64_t step = 1; step < steps; ++step) {
    for (float* row = comb; row < comb + n * n; row += n) {
      const float sum = sum_in_order(row, n) + eps;
      for (int64_t c = 0; c < n; ++c) row[c] /= sum;
    }
    divide_columns(comb, n, eps);
  }
}

struct Coefficients {
  float pre[kMostStreams], post[kMostStreams], comb[kMostStreams * kMostStreams];
};

// hc_split of one token.
class Split {
 public:
  Split(const CallSite& site, const Tensor& scale, const Tensor& base, int64_t streams, int64_t steps, double eps)
      : n_(streams), steps_(steps), eps_(static_cast<float>(eps)) {
    site.require(1 <= n_ && n_ <= kMostStreams, "there are 1 to 8 streams");
    site.require(0 <= steps_ && steps_ <= kMostSteps, "iters is out of range");
    scale_ = read_vector(site, scale, 3, "scale");
    base_ = read_vector(site, base, logits(), "base");
  }

  int64_t logits() const { return (2 + n_) * n_; }

  // Of the token at `place` among the `all` tokens of its sequence.
  void compute(const float* mix, int64_t all, int64_t place, Coefficients& to) const {
    const int64_t n = n_, by_vector = in_vectors(all * n, place * n, n);
    for (int64_t i = 0; i < n; ++i) to.pre[i] = mix[i] * scale_[0] + base_[i];
    for (int64_t i = 0; i < n; ++i) to.post[i] = mix[n + i] * scale_[1] + base_[n + i];
    for (int64_t i = 0; i < n * n; ++i) to.comb[i] = mix[2 * n + i] * scale_[2] + base_[2 * n + i];
    sigmoids(to.pre, n, by_vector);
    sigmoids(to.post, n, by_vector);
    for (int64_t i = 0; i < n; ++i) to.pre[i] += eps_;
    for (int64_t i = 0; i < n; ++i) to.post[i] *= 2.0f;
    sinkhorn(to.comb, n, steps_, eps_);
  }

 private:
  int64_t n_, steps_;
  float eps_;
  std::vector<float> scale_, base_;
};

// hc_head_split of one token, in place.
class HeadSplit {
 public:
  HeadSplit(const CallSite& site, const Tensor& scale, const Tensor& base, int64_t count, double eps)
      : eps_(static_cast<float>(eps)), scale_(read_vector(site, scale, 1, "scale")), base_(read_vector(site, base, count, "base")) {}

  void compute(float* mix, int64_t all, int64_t place) const {
    const int64_t n = static_cast<int64_t>(base_.size());
    for (int64_t i = 0; i < n; ++i) mix[i] = mix[i] * scale_[0] + base_[i];
    sigmoids(mix, n, in_vectors(all * n, place * n, n));
    for (int64_t i = 0; i < n; ++i) mix[i] += eps_;
  }

 private:
  float eps_;
  std::vector<float> scale_, base_;
};

// Sequence length and place of a token, as `in_vectors` counts them.
struct Place {
  Place() = default;
  Place(const Step* step, const TokenRows& tokens, int64_t index) {
    if (!tokens.by_token()) return;
    const TokenRows::Group token = tokens.at(index);
    all = step->n_valid[token.batch];
    place = token.token;
  }
  int64_t all = 1, place = 0;
};

// out[d] = sum over j of factors[j] * x[j * stride + d], the first `in_order` columns one term after the other.
void weighted_sum(const float* x, int64_t stride, const float* factors, int64_t n, int64_t count, int64_t in_order,
                  float* out) {
  std::fill_n(out, count, 0.0f);
  for (int64_t j = 0; j < n; ++j) {
    const float* stream = x + j * stride;
    const float factor = factors[j];
    for (int64_t d = 0; d < count; ++d) out[d] += stream[d] * factor;
  }
  if (n <= 4) return;
  for (int64_t d = std::max<int64_t>(0, in_order); d < count; ++d) {
    float terms[kMostStreams];
    for (int64_t j = 0; j < n; ++j) terms[j] = x[j * stride + d] * factors[j];
    out[d] = sum_by_four(terms, 1, n);
  }
}

// hc_combine of columns of one token.
class Combine {
 public:
  Combine(const CallSite& site, const Tensor& y, const Tensor& streams, const Tensor& post, const Tensor& comb,
          const Tensor& result)
      : y_(require_activation(site, y)), streams_(require_streams(site, streams)), post_(post), comb_(comb), result_(result) {
    const int64_t b = streams.dim(0), t = streams.dim(1), n = streams.dim(2);
    site.require(y.shape == std::vector<int64_t>{b, t, streams.dim(3)}, "y and the streams disagree");
    require_type(site, post, DType::kF32, {b, t, n}, "post");
    require_type(site, comb, DType::kF32, {b, t, n, n}, "comb");
    require_type(site, result, streams.dtype, streams.shape, "the result");
  }

  static size_t scratch_bytes() { return (kMostStreams + 2) * kPart * sizeof(float); }

  // Columns first .. first + count (at most kPart) of token `row` -> the result, and, rounded as there, out[n]
  // [count] with `stride` floats between streams where there is an `out`.
  void compute(int64_t row, int64_t first, int64_t count, float* out, int64_t stride, float* scratch) const {
    const int64_t n = streams_.dim(2);
    float* y = scratch;
    float* mixed = y + kPart;
    float* x = mixed + kPart;
    load_part(y_, row, first, count, y);
    for (int64_t j = 0; j < n; ++j) load_part(streams_, row * n + j, first, count, x + j * kPart);
    for (int64_t k = 0; k < n; ++k) {
      float factors[kMostStreams];
      for (int64_t j = 0; j < n; ++j) factors[j] = comb_.row<float>(row * n + j)[k];
      // The reference sees the columns of all streams as one row.
      const int64_t in_order = columns_in_order(n * streams_.cols()) - k * streams_.cols() - first;
      weighted_sum(x, kPart, factors, n, count, in_order, mixed);
      const float factor = post_.row<float>(row)[k];
      for (int64_t d = 0; d < count; ++d) mixed[d] = factor * y[d] + mixed[d];
      store_part(result_, row * n + k, first, count, mixed);
      if (!out) continue;
      std::copy_n(mixed, count, out + k * stride);
      round_to(result_.dtype, out + k * stride, count);
    }
  }

 private:
  Tensor y_, streams_, post_, comb_, result_;
};

// hc_mix of a step's tokens: their streams as fp32, the products, the norm factors.
class Mix {
 public:
  // Of up to `tokens` rows of `width` columns.
  Mix(CallSite& site, const Tensor& fn, int64_t tokens, int64_t width, double eps)
      : fn_(site, fn, Tensor{}), tokens_(tokens), eps_(static_cast<float>(eps)) {
    site.require(fn_.stack() == 1 && fn_.k() == width, "fn does not fit the streams");
    x_ = site.take_workspace<float>(tokens * width);
    products_ = site.take_workspace<float>(tokens * fn_.tiles() * kTile);
    factors_ = site.take_workspace<float>(tokens);
  }

  int64_t logits() const { return fn_.n(); }
  float* x(int64_t index) const { return x_ + index * fn_.k(); }
  size_t scratch_bytes() const { return fn_.scratch_bytes(tokens_); }

  // This worker's share, between two barriers. `size(i)`: tokens from i on that belong to one sequence.
  template <typename Size>
  void multiply(Worker& worker, int64_t count, Size size) const {
    Range share = worker.share(fn_.tiles());
    for (int64_t next = 0; next < count;) {  // a few sequences at a time
      RowGroup groups[kGroups];
      size_t used = 0;
      const int64_t start = next;
      for (; used < kGroups && next < count; next += groups[used++].count) groups[used] = {next - start, size(next)};
      for (int64_t tile = share.begin; tile < share.end; ++tile) {
        float* out = products_ + (tile * tokens_ + start) * kTile;
        fn_.tile(0, tile, x(start), fn_.k(), groups, used, false, out, worker.scratch());
      }
    }
    share = worker.share(count);
    for (int64_t i = share.begin; i < share.end; ++i) {
      factors_[i] = 1.0f / std::sqrt(mean_square(x(i), fn_.k()) + eps_);
    }
  }

  // Logits of the index-th token.
  void load(int64_t index, float* to) const {
    for (int64_t tile = 0; tile < fn_.tiles(); ++tile) {
      const float* products = products_ + (tile * tokens_ + index) * kTile;
      for (int64_t i = 0; i < fn_.width(tile); ++i) to[tile * kTile + i] = products[i] * factors_[index];
    }
  }

 private:
  static constexpr size_t kGroups = 16;
  Matrix fn_;
  int64_t tokens_;
  float eps_;
  float *x_ = nullptr, *products_ = nullptr, *factors_ = nullptr;
};

int64_t tokens_in(const Tensor& streams) { return streams.dim(0) * streams.dim(1); }
int64_t width_of(const Tensor& streams) { return streams.dim(2) * streams.dim(3); }

// This worker's share of the step's streams as fp32.
void load_streams(Worker& worker, const Tensor& streams, const TokenRows& tokens, const Mix& mix) {
  const int64_t n = streams.dim(2), d = streams.dim(3);
  const Range share = worker.share(tokens.count() * n);
  for (int64_t i = share.begin; i < share.end; ++i) {
    load_row(streams, tokens.at(i / n).row * n + i % n, mix.x(i / n) + i % n * d);
  }
}

class HcExpand : public Kernel {
 public:
  explicit HcExpand(CallSite& site)
      : x_(require_activation(site, site.operand(0))), y_(require_streams(site, site.result(0))), tokens_(tokens_of(site.step, y_)) {
    site.require(x_.rank() == 3 && site.integer("streams") == y_.dim(2), "x is not [B,T,D], or streams are not as many");
    require_type(site, y_, x_.dtype, {x_.dim(0), x_.dim(1), y_.dim(2), x_.dim(2)}, "the result");
  }

  void run(Worker& worker) override {
    const int64_t n = y_.dim(2), bytes = x_.cols() * bits_of(x_.dtype) / 8;
    const Range share = worker.share(tokens_.count() * n);
    for (int64_t i = share.begin; i < share.end; ++i) {
      const int64_t row = tokens_.at(i / n).row;
      std::memmove(y_.row<char>(row * n + i % n), x_.row<char>(row), bytes);
    }
  }

 private:
  Tensor x_, y_;
  TokenRows tokens_;
};

class HcMix : public Kernel {
 public:
  explicit HcMix(CallSite& site)
      : streams_(require_streams(site, site.operand(0))),
        y_(site.result(0)),
        tokens_(tokens_of(site.step, streams_)),
        mix_(site, site.required(1), tokens_in(streams_), width_of(streams_), site.number("eps")) {
    require_type(site, y_, DType::kF32, {streams_.dim(0), streams_.dim(1), mix_.logits()}, "the result");
  }

  size_t scratch_bytes() const override { return mix_.scratch_bytes(); }

  void run(Worker& worker) override {
    load_streams(worker, streams_, tokens_, mix_);
    worker.barrier();
    mix_.multiply(worker, tokens_.count(), [this](int64_t i) { return tokens_.group_size(i); });
    worker.barrier();
    const Range share = worker.share(tokens_.count());
    for (int64_t i = share.begin; i < share.end; ++i) mix_.load(i, y_.row<float>(tokens_.at(i).row));
  }

 private:
  Tensor streams_, y_;
  TokenRows tokens_;
  Mix mix_;
};

class HcSplit : public Kernel {
 public:
  explicit HcSplit(CallSite& site)
      : step_(site.step),
        mix_(require_activation(site, site.operand(0))),
        split_(site, site.required(1), site.required(2), site.integer("streams"), site.integer("iters"), site.number("eps")),
        n_(site.integer("streams")),
        pre_(site.result(0)),
        post_(site.result(1)),
        comb_(site.result(2)),
        tokens_(site.step, mix_) {
    site.require(mix_.rank() == 3, "mix is not [B,T,M]");
    const int64_t b = mix_.dim(0), t = mix_.dim(1);
    require_type(site, mix_, DType::kF32, {b, t, split_.logits()}, "mix");
    require_type(site, pre_, DType::kF32, {b, t, n_}, "pre");
    require_type(site, post_, DType::kF32, {b, t, n_}, "post");
    require_type(site, comb_, DType::kF32, {b, t, n_, n_}, "comb");
  }

  void run(Worker& worker) override {
    const Range share = worker.share(tokens_.count());
    for (int64_t i = share.begin; i < share.end; ++i) {
      const int64_t row = tokens_.at(i).row;
      const Place at(step_, tokens_, i);
      Coefficients c;
      split_.compute(mix_.row<float>(row), at.all, at.place, c);
      store_row(pre_, row, c.pre);
      store_row(post_, row, c.post);
      for (int64_t r = 0; r < n_; ++r) store_row(comb_, row * n_ + r, c.comb + r * n_);
    }
  }

 private:
  const Step* step_;
  Tensor mix_;
  Split split_;
  int64_t n_;
  Tensor pre_, post_, comb_;
  TokenRows tokens_;
};

class HcHeadSplit : public Kernel {
 public:
  explicit HcHeadSplit(CallSite& site)
      : step_(site.step),
        mix_(require_activation(site, site.operand(0))),
        y_(site.result(0)),
        split_(site, site.required(1), site.required(2), mix_.cols(), site.number("eps")),
        tokens_(site.step, mix_) {
    site.require(mix_.dtype == DType::kF32 && mix_.rank() == 3, "mix is not f32[B,T,n]");
    require_type(site, y_, DType::kF32, mix_.shape, "the result");
  }

  size_t scratch_bytes() const override { return mix_.cols() * sizeof(float); }

  void run(Worker& worker) override {
    float* values = worker.scratch();
    const Range share = worker.share(tokens_.count());
    for (int64_t i = share.begin; i < share.end; ++i) {
      const Place at(step_, tokens_, i);
      load_row(mix_, tokens_.at(i).row, values);
      split_.compute(values, at.all, at.place);
      store_row(y_, tokens_.at(i).row, values);
    }
  }

 private:
  const Step* step_;
  Tensor mix_, y_;
  HeadSplit split_;
  TokenRows tokens_;
};

class HcCollapse : public Kernel {
 public:
  explicit HcCollapse(CallSite& site)
      : streams_(require_streams(site, site.operand(0))), pre_(site.required(1)), y_(site.result(0)), tokens_(tokens_of(site.step, streams_)) {
    const int64_t b = streams_.dim(0), t = streams_.dim(1);
    require_type(site, pre_, DType::kF32, {b, t, streams_.dim(2)}, "pre");
    require_type(site, y_, streams_.dtype, {b, t, streams_.dim(3)}, "the result");
  }

  size_t scratch_bytes() const override { return (kMostStreams + 1) * kPart * sizeof(float); }

  void run(Worker& worker) override {
    const int64_t n = streams_.dim(2), columns = y_.cols(), pieces = parts(columns);
    float* out = worker.scratch();
    float* x = out + kPart;
    const Range share = worker.share(tokens_.count() * pieces);
    for (int64_t i = share.begin; i < share.end; ++i) {
      const int64_t row = tokens_.at(i / pieces).row, first = i % pieces * kPart, count = std::min(kPart, columns - first);
      for (int64_t j = 0; j < n; ++j) load_part(streams_, row * n + j, first, count, x + j * kPart);
      weighted_sum(x, kPart, pre_.row<float>(row), n, count, columns_in_order(columns) - first, out);
      store_part(y_, row, first, count, out);
    }
  }

 private:
  Tensor streams_, pre_, y_;
  TokenRows tokens_;
};

class HcCombine : public Kernel {
 public:
  explicit HcCombine(CallSite& site)
      : combine_(site, site.operand(0), site.operand(1), site.required(2), site.required(3), site.result(0)),
        columns_(site.operand(0).cols()),
        tokens_(tokens_of(site.step, site.operand(1))) {}

  size_t scratch_bytes() const override { return Combine::scratch_bytes(); }

  void run(Worker& worker) override {
    const int64_t pieces = parts(columns_);
    const Range share = worker.share(tokens_.count() * pieces);
    for (int64_t i = share.begin; i < share.end; ++i) {
      const int64_t first = i % pieces * kPart, count = std::min(kPart, columns_ - first);
      combine_.compute(tokens_.at(i / pieces).row, first, count, nullptr, 0, worker.scratch());
    }
  }

 private:
  Combine combine_;
  int64_t columns_;
  TokenRows tokens_;
};

// hc_pre once the streams are there as fp32: logits, coefficients, the collapsed row with norm and quantisation.
class Pre {
 public:
  // `weight` is the index of operand fn, `result` that of the first result.
  Pre(CallSite& site, const Tensor& streams, size_t weight, size_t result)
      : step_(site.step),
        dtype_(streams.dtype),
        n_(streams.dim(2)),
        d_(streams.dim(3)),
        tokens_(tokens_of(site.step, streams)),
        mix_(site, site.required(weight), tokens_in(streams), width_of(streams), site.number("eps")),
        split_(site, site.required(weight + 1), site.required(weight + 2), n_, site.integer("iters"), site.number("hc_eps")),
        norm_eps_(static_cast<float>(site.number("norm_eps", 0.0))) {
    site.require(site.integer("n") == n_, "the streams are not n");
    site.require(mix_.logits() == split_.logits(), "fn does not give the logits of n streams");
    if (site.operand(weight + 3)) norm_.emplace_back(site, site.operand(weight + 3), d_);
    const int64_t b = streams.dim(0), t = streams.dim(1);
    if (site.flag("keep", true)) {
      x_ = site.result(result++);
      require_type(site, x_, dtype_, {b, t, d_}, "x");
    }
    const std::string fmt = site.text("fmt", "");
    if (!fmt.empty()) {
      to_ = Quantizer(site, {b, t, d_}, site.operand(weight + 4), result);
    }
    post_ = site.result(result);
    comb_ = site.result(result + 1);
    require_type(site, post_, DType::kF32, {b, t, n_}, "post");
    require_type(site, comb_, DType::kF32, {b, t, n_, n_}, "comb");
  }

  const TokenRows& tokens() const { return tokens_; }
  const Mix& mix() const { return mix_; }
  size_t scratch_bytes() const { return std::max(mix_.scratch_bytes(), d_ * sizeof(float)); }

  // After a barrier.
  void run(Worker& worker) const {
    mix_.multiply(worker, tokens_.count(), [this](int64_t i) { return tokens_.group_size(i); });
    worker.barrier();
    float* values = worker.scratch();
    const Range share = worker.share(tokens_.count());
    for (int64_t i = share.begin; i < share.end; ++i) {
      const int64_t row = tokens_.at(i).row;
      const Place at(step_, tokens_, i);
      float logits[(2 + kMostStreams) * kMostStreams];
      Coefficients c;
      mix_.load(i, logits);
      split_.compute(logits, at.all, at.place, c);
      store_row(post_, row, c.post);
      for (int64_t r = 0; r < n_; ++r) store_row(comb_, row * n_ + r, c.comb + r * n_);
      weighted_sum(mix_.x(i), d_, c.pre, n_, d_, columns_in_order(d_), values);
      round_to(dtype_, values, d_);
      if (!norm_.empty()) {
        rms_norm_row(values, d_, norm_[0].data(), norm_eps_);
        round_to(dtype_, values, d_);
      }
      if (x_) store_row(x_, row, values);
      if (to_) to_.store(row, values);
    }
  }

 private:
  const Step* step_;
  DType dtype_;
  int64_t n_, d_;
  TokenRows tokens_;
  Mix mix_;
  Split split_;
  std::vector<NormWeight> norm_;  // one, or none
  float norm_eps_;
  Tensor x_, post_, comb_;
  Quantizer to_;
};

class HcPre : public Kernel {
 public:
  explicit HcPre(CallSite& site) : streams_(require_streams(site, site.operand(0))), pre_(site, streams_, 1, 0) {}

  size_t scratch_bytes() const override { return pre_.scratch_bytes(); }

  void run(Worker& worker) override {
    load_streams(worker, streams_, pre_.tokens(), pre_.mix());
    worker.barrier();
    pre_.run(worker);
  }

 private:
  Tensor streams_;
  Pre pre_;
};

class HcPostPre : public Kernel {
 public:
  explicit HcPostPre(CallSite& site)
      : combine_(site, site.operand(0), site.operand(1), site.required(2), site.required(3), site.result(0)),
        columns_(site.operand(0).cols()),
        pre_(site, site.result(0), 4, 1) {}

  size_t scratch_bytes() const override { return std::max(Combine::scratch_bytes(), pre_.scratch_bytes()); }

  void run(Worker& worker) override {
    const int64_t pieces = parts(columns_);
    const Range share = worker.share(pre_.tokens().count() * pieces);
    for (int64_t i = share.begin; i < share.end; ++i) {
      const int64_t token = i / pieces, first = i % pieces * kPart, count = std::min(kPart, columns_ - first);
      float* out = pre_.mix().x(token) + first;
      combine_.compute(pre_.tokens().at(token).row, first, count, out, columns_, worker.scratch());
    }
    worker.barrier();
    pre_.run(worker);
  }

 private:
  Combine combine_;
  int64_t columns_;
  Pre pre_;
};

// The final collapse, of every valid token or of each sequence's last one.
class HcHead : public Kernel {
 public:
  explicit HcHead(CallSite& site)
      : step_(site.step),
        streams_(require_streams(site, site.operand(0))),
        n_valid_(site.operand(1)),
        y_(site.result(0)),
        tokens_(tokens_of(site.step, streams_)),
        mix_(site, site.required(2), tokens_in(streams_), width_of(streams_), site.number("eps")),
        split_(site, site.required(3), site.required(4), streams_.dim(2), site.number("hc_eps")),
        norm_eps_(static_cast<float>(site.number("norm_eps", 0.0))) {
    const int64_t b = streams_.dim(0), t = streams_.dim(1), d = streams_.dim(3);
    site.require(site.integer("n") == streams_.dim(2) && mix_.logits() == streams_.dim(2), "the streams or fn are not n");
    if (site.operand(5)) norm_.emplace_back(site, site.operand(5), d);
    if (n_valid_) {
      require_type(site, n_valid_, DType::kI32, {b}, "n_valid");
      require_type(site, y_, streams_.dtype, {b, d}, "the result");
    } else {
      require_type(site, y_, streams_.dtype, {b, t, d}, "the result");
    }
  }

  size_t scratch_bytes() const override { return std::max(mix_.scratch_bytes(), streams_.cols() * sizeof(float)); }

  void run(Worker& worker) override {
    const int64_t n = streams_.dim(2), d = streams_.dim(3), count = n_valid_ ? streams_.dim(0) : tokens_.count();
    Range share = worker.share(count * n);
    for (int64_t i = share.begin; i < share.end; ++i) {
      load_row(streams_, row(i / n) * n + i % n, mix_.x(i / n) + i % n * d);
    }
    worker.barrier();
    // A last token is a sequence of its own.
    mix_.multiply(worker, count, [this](int64_t i) { return n_valid_ ? 1 : tokens_.group_size(i); });
    worker.barrier();
    float* values = worker.scratch();
    share = worker.share(count);
    for (int64_t i = share.begin; i < share.end; ++i) {
      const Place at = n_valid_ ? Place{} : Place(step_, tokens_, i);
      float pre[kMostStreams];
      mix_.load(i, pre);
      split_.compute(pre, at.all, at.place);
      weighted_sum(mix_.x(i), d, pre, n, d, columns_in_order(d), values);
      round_to(y_.dtype, values, d);
      if (!norm_.empty()) rms_norm_row(values, d, norm_[0].data(), norm_eps_);
      store_row(y_, n_valid_ ? i : row(i), values);
    }
  }

 private:
  // The index-th token among all [B,T].
  int64_t row(int64_t index) const {
    if (!n_valid_) return tokens_.at(index).row;
    const int64_t tokens = streams_.dim(1), last = n_valid_.row<int32_t>(0)[index] - int64_t{1};
    return index * tokens + std::clamp<int64_t>(last, 0, tokens - 1);
  }

  const Step* step_;
  Tensor streams_, n_valid_, y_;
  TokenRows tokens_;
  Mix mix_;
  HeadSplit split_;
  std::vector<NormWeight> norm_;  // one, or none
  float norm_eps_;
};

}  // namespace

void add_hyper_connection_kernels(Registry& registry) {
  registry["host.hc_expand"] = {"hc_expand(x; streams: int) -> ()", make_kernel<HcExpand>};
  registry["host.hc_mix"] = {"hc_mix(streams, fn; eps: float) -> ()", make_kernel<HcMix>};
  registry["host.hc_split"] = {
      "hc_split(mix, scale, base; streams: int, iters: int, eps: float) -> (pre, post, comb)", make_kernel<HcSplit>};
  registry["host.hc_head_split"] = {"hc_head_split(mix, scale, base; eps: float) -> ()", make_kernel<HcHeadSplit>};
  registry["host.hc_collapse"] = {"hc_collapse(streams, pre) -> ()", make_kernel<HcCollapse>};
  registry["host.hc_combine"] = {"hc_combine(y, streams, post, comb) -> ()", make_kernel<HcCombine>};
  registry["host.hc_pre"] = {
      "hc_pre(streams, fn, scale, base, norm?, fixed?; n: int, iters: int, eps: float, hc_eps: float, norm_eps: float, "
      "fmt: str, block: int, static: bool, keep: bool) -> (*)",
      make_kernel<HcPre>};
  registry["host.hc_post_pre"] = {
      "hc_post_pre(y, before, post, comb, fn, scale, base, norm?, fixed?; n: int, iters: int, eps: float, "
      "hc_eps: float, norm_eps: float, fmt: str, block: int, static: bool, keep: bool) -> (*)",
      make_kernel<HcPostPre>};
  registry["host.hc_head"] = {
      "hc_head(streams, n_valid?, fn, scale, base, norm?; n: int, eps: float, hc_eps: float, norm_eps: float) -> ()",
      make_kernel<HcHead>};
}

}  // namespace rewright
