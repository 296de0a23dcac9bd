// Pooling of past tokens into compressed entries.
//
// host.add_position_bias: gate scores plus the bias of the token's place in its window. host.compress: each
// channel of an entry is the mean of its window's rows, weighted by the channel's own softmax over tokens.
// host.compress_write: the bias, the pooling, what follows it (norm, RoPE, rotation, rounding, each rounded to
// the dtype that a stored result would have) and the writes of the rings and of the entries' cache. Bound by
// the rows that are read, and by one exponential for each of their elements. Channels are shared out 32 at a
// time, so that the single entry of a decode step keeps every thread busy.
#include <algorithm>
#include <cmath>
#include <limits>

#include "families.h"
#include "norm.h"
#include "rope.h"
#include "rounding.h"
#include "rows.h"
#include "state_rows.h"
#include "step_vectors.h"
#include "sum_orders.h"
#include "vector.h"

namespace rewright {
namespace {

constexpr int64_t kChannels = 32;  // pooled at a time: as many as the reference sums side by side

DType activation_named(const CallSite& site, const std::string& name) {
  site.require(name == "bf16" || name == "f32", "entries are bf16 or f32, not " + name);
  return name == "bf16" ? DType::kBF16 : DType::kF32;
}

// Bias f32 or bf16 [ratio,w] by a token's place in its window.
class PositionBias {
 public:
  PositionBias() = default;  // none
  PositionBias(const CallSite& site, const Tensor& ape, int64_t width) : ape_(ape) {
    site.require(ape && is_float(ape.dtype) && ape.rank() == 2 && ape.dim(0) > 0 && ape.cols() == width,
                 "the position bias does not fit");
  }

  const Tensor& tensor() const { return ape_; }
  // Adds columns first .. first + count of the bias of `position`; scratch holds `count` floats.
  void add(int64_t position, int64_t first, int64_t count, float* values, float* scratch) const {
    if (!ape_) return;
    load_part(ape_, position % ape_.dim(0), first, count, scratch);
    for (int64_t i = 0; i < count; ++i) values[i] += scratch[i];
  }

 private:
  Tensor ape_;
};

class AddPositionBias : public Kernel {
 public:
  explicit AddPositionBias(CallSite& site)
      : step_(site.step), gate_(site.required(0)), y_(site.result(0)), rows_(step_, gate_) {
    require_tokens(site, gate_);
    require_step_vector(site, site.operand(2), step_->pos);
    site.require(gate_.dtype == DType::kF32, "gate scores are not f32");
    site.require(y_.dtype == DType::kF32 && y_.shape == gate_.shape, "the result does not fit");
    bias_ = PositionBias(site, site.operand(1), gate_.cols());
  }

  size_t scratch_bytes() const override { return 2 * gate_.cols() * sizeof(float); }

  void run(Worker& worker) override {
    float* row = worker.scratch();
    const Range share = worker.share(rows_.count());
    for (int64_t i = share.begin; i < share.end; ++i) {
      const TokenRows::Group at = rows_.at(i);
      load_row(gate_, at.row, row);
      bias_.add(int64_t{step_->pos[at.batch]} + at.token, 0, gate_.cols(), row, row + gate_.cols());
      store_row(y_, at.row, row);
    }
  }

 private:
  const Step* step_;
  Tensor gate_, y_;
  PositionBias bias_;
  TokenRows rows_;
};

// The entries that a chunk finishes.
class Pooling {
 public:
  Pooling(const CallSite& site, const Tensor& kv, const Tensor& gate, const Tensor& kv_ring, const Tensor& gate_ring)
      : step_(site.step),
        kv_(kv),
        gate_(gate),
        kv_ring_(kv_ring),
        gate_ring_(gate_ring),
        ratio_(site.integer("ratio")),
        overlap_(site.flag("overlap", false)) {
    require_tokens(site, kv);
    require_tokens(site, gate);
    site.require(kv.dtype == DType::kF32 && gate.dtype == DType::kF32 && kv.cols() == gate.cols() && kv.cols() > 0,
                 "kv and gate do not fit");
    site.require(kv_ring && gate_ring && kv_ring.rank() == 3 && kv_ring.shape == gate_ring.shape && kv_ring.dim(0) > 0,
                 "a ring is not [S,R,w]");
    site.require(kv_ring.dtype == DType::kF32 && gate_ring.dtype == DType::kF32 && kv_ring.cols() == kv.cols(),
                 "a ring cannot hold the rows");
    site.require(ratio_ > 0 && ratio_ <= kv_ring.dim(1) / (overlap_ ? 2 : 1), "a ring holds less than its windows");
    site.require(!overlap_ || kv.cols() % 2 == 0, "rows have no two halves");
    channels_ = overlap_ ? kv.cols() / 2 : kv.cols();
    window_ = overlap_ ? 2 * ratio_ : ratio_;
    blocks_ = (channels_ + kChannels - 1) / kChannels;
    candidates_ = (step_->tokens + ratio_ - 1) / ratio_;
  }

  int64_t channels() const { return channels_; }
  int64_t ratio() const { return ratio_; }
  int64_t candidates() const { return candidates_; }
  int64_t first(int64_t batch) const { return step_->pos[batch] / ratio_; }
  int64_t finished(int64_t batch) const {
    return (int64_t{step_->pos[batch]} + step_->n_valid[batch]) / ratio_ - first(batch);
  }
  size_t scratch_bytes() const { return (window_ + 4) * kChannels * sizeof(float); }

  // Pools this worker's share, with `bias` on the chunk's gate scores (those in the ring have it). Gives
  // store(batch, candidate, first channel, count, values).
  template <typename Store>
  void pool(Worker& worker, const PositionBias& bias, Store store) const {
    int64_t entries = 0;
    for (int b = 0; b < step_->batch; ++b) entries += finished(b);
    const Range share = worker.share(entries * blocks_);
    for (int64_t i = share.begin; i < share.end; ++i) {
      int64_t b = 0, j = i / blocks_;
      while (j >= finished(b)) j -= finished(b++);
      const int64_t begin = i % blocks_ * kChannels, count = std::min(kChannels, channels_ - begin);
      float* out = worker.scratch();
      pool_channels(b, j, begin, count, bias, out, out + kChannels);
      store(b, j, begin, count, out);
    }
  }

 private:
  // One row of a window, counted from the first token of the window's first half.
  struct Source {
    const Tensor *kv, *gate;  // null before the first token
    int64_t row, column, position;
  };
  Source source(int64_t batch, int64_t entry, int64_t index) const {
    const int64_t position = (entry - (overlap_ ? 1 : 0)) * ratio_ + index;
    const int64_t column = overlap_ && index >= ratio_ ? channels_ : 0;
    if (position < 0) return {nullptr, nullptr, 0, column, position};
    const int64_t past = step_->pos[batch];
    if (position < past) return {&kv_ring_, &gate_ring_, ring_row(kv_ring_, step_->slot[batch], position), column, position};
    return {&kv_, &gate_, batch * step_->tokens + position - past, column, position};
  }

  // Scratch holds (window + 3) * kChannels floats.
  void pool_channels(int64_t batch, int64_t candidate, int64_t begin, int64_t count, const PositionBias& bias, float* out,
                     float* scratch) const {
    const int64_t entry = first(batch) + candidate;
    float* largest = scratch;
    float* total = scratch + kChannels;
    float* other = scratch + 2 * kChannels;
    float* weights = scratch + 3 * kChannels;  // [window][count]
    std::fill_n(largest, count, -std::numeric_limits<float>::infinity());
    for (int64_t r = 0; r < window_; ++r) {
      float* z = weights + r * count;
      const Source at = source(batch, entry, r);
      if (!at.kv) {  // nothing precedes entry 0: rows of weight zero
        std::fill_n(z, count, -std::numeric_limits<float>::infinity());
        continue;
      }
      load_part(*at.gate, at.row, at.column + begin, count, z);
      if (at.gate == &gate_) bias.add(at.position, at.column + begin, count, z, other);
      for (int64_t c = 0; c < count; ++c) largest[c] = z[c] > largest[c] ? z[c] : largest[c];
    }
    for (int64_t r = 0; r < window_; ++r) {
      for (int64_t c = 0; c < count; ++c) weights[r * count + c] -= largest[c];
    }
    exponential(weights, begin, count);
    std::fill_n(total, count, 0.0f);
    for (int64_t r = 0; r < window_; ++r) {
      for (int64_t c = 0; c < count; ++c) total[c] += weights[r * count + c];
    }
    for (int64_t r = 0; r < window_; ++r) {
      float* w = weights + r * count;
      const Source at = source(batch, entry, r);
      if (at.kv) {
        load_part(*at.kv, at.row, at.column + begin, count, other);
      } else {
        std::fill_n(other, count, 0.0f);
      }
      for (int64_t c = 0; c < count; ++c) w[c] = w[c] / total[c] * other[c];
    }
    if (count == kChannels) {
      const auto load = [&](int64_t r) {
        Columns<kChannels> row;
        std::copy_n(weights + r * kChannels, kChannels, row.v);
        return row;
      };
      const auto sum = sum_cascaded<Columns<kChannels>>(load, window_);
      std::copy_n(sum.v, kChannels, out);
      return;
    }
    const int64_t cascaded = cascaded_columns(channels_, false);
    for (int64_t c = 0; c < count; ++c) {
      const auto load = [&](int64_t r) { return weights[r * count + c]; };
      out[c] = begin + c < cascaded ? sum_cascaded<float>(load, window_) : sum_interleaved<float>(load, window_);
    }
  }

  // The reference computes the last channels, which fill no vector, with the C library.
  void exponential(float* x, int64_t begin, int64_t count) const {
    const int64_t in_vectors = channels_ / kSumLanes * kSumLanes;
    if (begin + count <= in_vectors) return vector().exp_ulp1(x, window_ * count);
    for (int64_t r = 0; r < window_; ++r) {
      const int64_t vectors = std::max<int64_t>(0, in_vectors - begin);
      vector().exp_ulp1(x + r * count, vectors);
      for (int64_t c = vectors; c < count; ++c) x[r * count + c] = std::exp(x[r * count + c]);
    }
  }

  const Step* step_;
  Tensor kv_, gate_, kv_ring_, gate_ring_;
  int64_t ratio_, window_, channels_, blocks_, candidates_;
  bool overlap_;
};

class Compress : public Kernel {
 public:
  explicit Compress(CallSite& site)
      : step_(site.step),
        pooling_(site, site.operand(0), site.operand(1), site.operand(2), site.operand(3)),
        entries_(site.result(0)),
        count_(site.result(1)) {
    require_step_vector(site, site.operand(4), step_->pos);
    require_step_vector(site, site.operand(5), step_->n_valid);
    require_step_vector(site, site.operand(6), step_->slot);
    const std::vector<int64_t> shape{step_->batch, pooling_.candidates(), pooling_.channels()};
    site.require(entries_.dtype == activation_named(site, site.text("out", "")) && entries_.shape == shape,
                 "the entries do not fit");
    site.require(count_.dtype == DType::kI32 && count_.rank() == 1 && count_.dim(0) == step_->batch,
                 "the count is not i32[B]");
  }

  size_t scratch_bytes() const override {
    return std::max(pooling_.scratch_bytes(), entries_.cols() * sizeof(float));
  }

  void run(Worker& worker) override {
    const int64_t candidates = pooling_.candidates();
    pooling_.pool(worker, PositionBias{}, [&](int64_t b, int64_t j, int64_t first, int64_t count, const float* values) {
      store_part(entries_, b * candidates + j, first, count, values);
    });
    std::fill_n(worker.scratch(), entries_.cols(), 0.0f);
    const Range share = worker.share(step_->batch * candidates);
    for (int64_t i = share.begin; i < share.end; ++i) {
      if (i % candidates >= pooling_.finished(i / candidates)) store_row(entries_, i, worker.scratch());
    }
    if (worker.rank() > 0) return;
    for (int b = 0; b < step_->batch; ++b) count_.row<int32_t>(0)[b] = static_cast<int32_t>(pooling_.finished(b));
  }

 private:
  const Step* step_;
  Pooling pooling_;
  Tensor entries_, count_;
};

class CompressWrite : public Kernel {
 public:
  explicit CompressWrite(CallSite& site)
      : step_(site.step),
        kv_(site.required(0)),
        gate_(site.required(1)),
        kv_ring_(site.required(3)),
        gate_ring_(site.required(4)),
        pooling_(site, kv_, gate_, kv_ring_, gate_ring_),
        bias_(site, site.operand(2), gate_.cols()),
        pooled_(activation_named(site, site.text("pooled", ""))),
        norm_(site, site.operand(6), pooling_.channels()),
        eps_(static_cast<float>(site.number("eps"))),
        tables_(site, site.operand(7), site.operand(8), pooling_.channels()),
        rotate_(site.flag("rotate", false)),
        rounding_(site, pooling_.channels(), pooled_),
        rows_(step_, kv_) {
    require_step_vector(site, site.operand(9), step_->pos);
    require_step_vector(site, site.operand(10), step_->n_valid);
    require_step_vector(site, site.operand(11), step_->slot);
    require_state(site, kv_ring_, site.result(0));
    require_state(site, gate_ring_, site.result(1));
    require_state(site, site.operand(5), site.result(2));
    site.require(bias_.tensor().dim(0) == pooling_.ratio(), "the position bias has another ratio");
    site.require(!rotate_ || is_power_of_two(pooling_.channels()), "entries to rotate are no power of two wide");
    cache_ = StateRows(site, site.operand(5), site.text("cache_rows", ""), pooling_.channels(), rounding_.dtype(),
                       "the cache cannot hold the entries");
    entries_ = site.take_workspace<float>(step_->batch * pooling_.candidates() * pooling_.channels());
  }

  size_t scratch_bytes() const override { return std::max(pooling_.scratch_bytes(), 2 * gate_.cols() * sizeof(float)); }

  void run(Worker& worker) override {
    pooling_.pool(worker, bias_, [&](int64_t b, int64_t j, int64_t first, int64_t count, const float* values) {
      std::copy_n(values, count, entry(b, j) + first);
    });
    worker.barrier();  // the rings have been read, the entries are whole
    write_rings(worker);
    write_entries(worker);
  }

 private:
  float* entry(int64_t batch, int64_t candidate) const {
    return entries_ + (batch * pooling_.candidates() + candidate) * pooling_.channels();
  }

  void write_rings(Worker& worker) const {
    const int64_t width = gate_.cols();
    float* row = worker.scratch();
    const Range share = worker.share(rows_.count());
    for (int64_t i = share.begin; i < share.end; ++i) {
      const TokenRows::Group at = rows_.at(i);
      if (at.token < first_kept(kv_ring_, step_->n_valid[at.batch])) continue;
      const int64_t position = int64_t{step_->pos[at.batch]} + at.token;
      const int64_t to = ring_row(kv_ring_, step_->slot[at.batch], position);
      load_row(kv_, at.row, row);
      store_row(kv_ring_, to, row);
      load_row(gate_, at.row, row);
      bias_.add(position, 0, width, row, row + width);
      store_row(gate_ring_, to, row);
    }
  }

  // (From the last worker down: the first ones have written the row of a decode step.)
  void write_entries(Worker& worker) const {
    int64_t i = 0;
    for (int b = 0; b < step_->batch; ++b) {
      for (int64_t j = 0; j < pooling_.finished(b); ++j, ++i) {
        const int64_t index = pooling_.first(b) + j;
        if (i % worker.size() != worker.size() - 1 - worker.rank() || index >= cache_.size()) continue;
        float* values = entry(b, j);
        finish(values, index * pooling_.ratio());
        cache_.store(step_->slot[b], index, values);
      }
    }
  }

  void finish(float* values, int64_t position) const {
    const int64_t count = pooling_.channels();
    round_to(pooled_, values, count);
    rms_norm_row(values, count, norm_.data(), eps_);
    round_to(pooled_, values, count);
    tables_.turn(values, count, position);
    round_to(pooled_, values, count);
    if (rotate_) {
      hadamard_row(values, count);
      round_to(pooled_, values, count);
    }
    rounding_.apply(values);
  }

  const Step* step_;
  Tensor kv_, gate_, kv_ring_, gate_ring_;
  StateRows cache_;
  Pooling pooling_;
  PositionBias bias_;
  DType pooled_;
  NormWeight norm_;
  float eps_;
  RopeTables tables_;
  bool rotate_;
  Rounding rounding_;
  TokenRows rows_;
  float* entries_ = nullptr;
};

}  // namespace

void add_compress_kernels(Registry& registry) {
  registry["host.add_position_bias"] = {"add_position_bias(gate, ape, pos) -> ()", make_kernel<AddPositionBias>};
  registry["host.compress"] = {
      "compress(kv, gate, kv_ring, gate_ring, pos, n_valid, slot; ratio: int, overlap: bool, out: str) -> (, count)",
      make_kernel<Compress>};
  registry["host.compress_write"] = {
      "compress_write(kv, gate, ape, kv_ring, gate_ring, cache, norm, cos, sin, pos, n_valid, slot; ratio: int, "
      "overlap: bool, pooled: str, eps: float, rotate: bool, fmt: str, block: int, dims: ints, out: str, "
      "cache_rows: str) -> "
      "(kv_ring, gate_ring, cache)",
      make_kernel<CompressWrite>};
}

}  // namespace rewright
