// Attention over the window and the compressed entries, with sinks.
//
// host.sparse_attention: softmax over a query's list of keys, one vector being key and value;
// host.attention: with the head norm and RoPE before it and the inverse RoPE behind. A piece of work is
// one token and up to 16 of its heads. Keys are gathered and widened in blocks that stay in the first
// cache, once for the scores and once for the values; scores of all keys are kept. Packed keys are unpacked
// once for all pieces of a token, as bf16. Bound by multiply-adds.
//
// A list holds the window oldest first, then the entries in the order given, in as many places as any
// query of the chunk uses; places that a query does not use count as zeros, which keeps the order of
// sums that of the reference.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <optional>

#include "families.h"
#include "formats.h"
#include "math.h"
#include "matmul.h"
#include "norm.h"
#include "rope.h"
#include "rows.h"
#include "state_rows.h"
#include "sum.h"

namespace rewright {
namespace {

constexpr int64_t kHeads = kTile;  // of one piece
constexpr int64_t kKeys = 32;      // of one block
constexpr int64_t kUnpacked = 2048;  // keys that are kept unpacked at most: the second cache holds them
constexpr float kAbsent = -std::numeric_limits<float>::infinity();

int64_t padded(int64_t count) { return (count + kTile - 1) / kTile * kTile; }

// What both kernels have in common: operands behind the queries, and the arithmetic of one piece.
class Attention : public Kernel {
 protected:
  // `first` is the index of operand kv; the RoPE tables, where there are some, stand before pos.
  Attention(CallSite& site, size_t first, size_t pos, int64_t heads, int64_t dim, DType dtype)
      : step_(site.step), kv_(site.operand(first)),
        indices_(site.operand(first + 3)), heads_(heads), dim_(dim), dtype_(dtype), ratio_(site.integer("ratio")),
        scale_(static_cast<float>(site.number("scale"))) {
    const int64_t batch = step_->batch, tokens = step_->tokens;
    site.require(heads > 0 && dim > 0, "there are no heads");
    window_ = StateRows(site, site.required(first + 1), site.text("window_rows", ""), dim, dtype,
                        "the window does not fit the queries");
    if (const Tensor& compressed = site.operand(first + 2)) {
      compressed_ = StateRows(site, compressed, site.text("compressed_rows", ""), dim, dtype,
                              "the entries do not fit the queries");
    }
    site.require(!kv_ || (kv_.dtype == dtype && kv_.shape == std::vector<int64_t>{batch, tokens, dim}), "kv does not fit");
    site.require(kv_ || tokens == 1, "the ring cannot hold the keys of several tokens for the first");
    site.require(static_cast<bool>(compressed_) == (ratio_ > 0) && ratio_ >= 0, "entries and a ratio go together");
    site.require(!indices_ || compressed_, "indices without entries");
    const int64_t capacity = site.integer("capacity");
    if (compressed_) {
      site.require(compressed_.slots() == window_.slots() && capacity >= 0 && compressed_.size() >= capacity / ratio_,
                   "the entries hold less than the capacity");
      entries_ = compressed_.size();
    }
    if (indices_) {
      site.require(indices_.dtype == DType::kI32 && indices_.rank() == 3 && indices_.dim(0) == batch &&
                       indices_.dim(1) == tokens && indices_.dim(2) > 0,
                   "indices are not i32[B,T,k]");
    }
    const Tensor& sink = site.required(first + 4);
    site.require(is_float(sink.dtype) && sink.count() == heads, "the sink does not fit the heads");
    sink_.resize(heads);
    load_row(sink, 0, sink_.data());
    for (size_t i = pos; i < pos + 3; ++i) site.required(i);
    most_keys_ = window_.size() + (indices_ ? std::min(indices_.dim(2), entries_) : entries_);
    pieces_ = (heads_ + kHeads - 1) / kHeads;
    unpacks_ = (window_.packed() || compressed_.packed()) && most_keys_ <= kUnpacked;
  }

 public:
  size_t scratch_bytes() const override {
    const int64_t wide = padded(dim_), keys = padded(most_keys_);
    // q by head and transposed; a block of keys; scores by key and by head; sums of values; parts.
    const int64_t floats = kHeads * wide * 2 + kKeys * wide + keys * kHeads * 2 + 2 * kHeads * wide + kKeys * kTile + kTile;
    return floats * sizeof(float) + keys * sizeof(int32_t) + (unpacks_ ? keys * wide * sizeof(uint16_t) : 0);
  }

 protected:
  struct Scratch {
    float *q, *q_panel, *keys, *scores, *weights, *values, *total, *part;
    int32_t* list;
    uint16_t* unpacked;  // bf16 [keys][wide] of the token below, null where keys are read as they lie
    int batch = -1, token = -1;
  };

  Scratch divide(float* memory) const {
    const int64_t wide = padded(dim_), keys = padded(most_keys_);
    Scratch s;
    s.q = memory;
    s.q_panel = s.q + kHeads * wide;
    s.keys = s.q_panel + kHeads * wide;
    s.scores = s.keys + kKeys * wide;
    s.weights = s.scores + keys * kHeads;
    s.values = s.weights + keys * kHeads;
    s.total = s.values + kHeads * wide;
    s.part = s.total + kHeads * wide;
    s.list = reinterpret_cast<int32_t*>(s.part + kKeys * kTile + kTile);
    s.unpacked = unpacks_ ? reinterpret_cast<uint16_t*>(s.list + keys) : nullptr;
    return s;
  }

  // Places of the list of every query of a sequence in this step: of the window, and of the entries.
  struct Places {
    int64_t window, entries;
  };

  Places places(int batch) const {
    const int64_t p = step_->pos[batch], n = step_->n_valid[batch];
    Places result{std::min<int64_t>(window_.size(), p + n), 0};
    if (!compressed_) return result;
    const int64_t finished = std::min<int64_t>((p + n) / ratio_, entries_);
    result.entries = indices_ ? std::min(indices_.dim(2), finished) : finished;
    return result;
  }

  // The keys of the list of a token as row numbers: window rows (of ring and chunk) are -2 - position,
  // entries their index; -1 for a place that is not used.
  int64_t list(int batch, int token, const Places& places, int32_t* out) const {
    const int64_t p = step_->pos[batch], at = p + token;
    const int64_t oldest = std::max<int64_t>(0, at - window_.size() + 1);
    int64_t count = 0;
    for (; count < places.window; ++count) out[count] = oldest + count <= at ? static_cast<int32_t>(-2 - (oldest + count)) : -1;
    if (places.entries == 0) return count;
    const int64_t visible = std::min<int64_t>((at + 1) / ratio_, entries_);
    const int32_t* chosen = indices_ ? indices_.row<int32_t>(int64_t{batch} * step_->tokens + token) : nullptr;
    for (int64_t j = 0; j < places.entries; ++j) {
      const int32_t entry = chosen ? chosen[j] : static_cast<int32_t>(j);
      out[count++] = entry >= 0 && entry < visible ? entry : -1;
    }
    return count;
  }

  // Keys first .. first + count of a list as fp32 rows, zeros where a place is not used.
  void gather(int batch, const int32_t* list, int64_t count, float* to) const {
    const int64_t wide = padded(dim_), p = step_->pos[batch], slot = step_->slot[batch];
    for (int64_t i = 0; i < count; ++i, to += wide) {
      if (list[i] == -1) {
        std::memset(to, 0, wide * sizeof(float));
        continue;
      }
      const int64_t position = -2 - int64_t{list[i]};
      if (list[i] >= 0) {
        compressed_.load(slot, list[i], to);
      } else if (kv_ && position >= p) {
        load_row(kv_, int64_t{batch} * step_->tokens + position - p, to);
      } else {
        window_.load(slot, position % window_.size(), to);
      }
      std::fill(to + dim_, to + wide, 0.0f);
    }
  }

  // Unpacks the keys of a token's list unless they are there.
  void unpack(int batch, int token, int64_t count, Scratch& s) const {
    if (!s.unpacked || (s.batch == batch && s.token == token)) return;
    const int64_t wide = padded(dim_);
    for (int64_t k = 0; k < count; k += kKeys) {
      const int64_t block = std::min(kKeys, count - k);
      gather(batch, s.list + k, block, s.keys);
      // (Every key is bf16: the rest of its bits is zero.)
      for (int64_t i = 0; i < block * wide; ++i) {
        s.unpacked[k * wide + i] = static_cast<uint16_t>(std::bit_cast<uint32_t>(s.keys[i]) >> 16);
      }
    }
    s.batch = batch;
    s.token = token;
  }

  // Keys first .. first + count of the list of the token that is at work, as fp32 rows in s.keys.
  void fetch(int batch, int64_t first, int64_t count, const Scratch& s) const {
    if (!s.unpacked) {
      gather(batch, s.list + first, count, s.keys);
      return;
    }
    const int64_t wide = padded(dim_);
    vector().widen_bf16(s.unpacked + first * wide, count * wide, s.keys);
  }

  // s.q[head][wide] -> s.total[head][wide], attended and divided but not yet rounded, for `heads` heads
  // from `first` on.
  void attend(int batch, int token, const Places& places, int64_t first, int64_t heads, Scratch& s) const {
    const int64_t wide = padded(dim_);
    const int64_t count = list(batch, token, places, s.list), lists = padded(count);
    unpack(batch, token, count, s);
    std::memset(s.q_panel, 0, dim_ * kHeads * sizeof(float));
    for (int64_t h = 0; h < heads; ++h) {
      for (int64_t d = 0; d < dim_; ++d) s.q_panel[d * kHeads + h] = s.q[h * wide + d];
    }
    for (int64_t k = 0; k < count; k += kKeys) {
      const int64_t block = std::min(kKeys, count - k);
      fetch(batch, k, block, s);
      chain_product(s.q_panel, kHeads, s.keys, wide, block, dim_, s.scores + k * kHeads, s.part);
    }
    float denominators[kHeads];
    for (int64_t h = 0; h < heads; ++h) {
      float* weights = s.weights + h * lists;
      float top = kAbsent;
      for (int64_t k = 0; k < count; ++k) {
        weights[k] = s.list[k] == -1 ? kAbsent : s.scores[k * kHeads + h] * scale_;
        top = std::max(top, weights[k]);
      }
      for (int64_t k = 0; k < count; ++k) weights[k] -= top;
      vector().exp(weights, count);
      denominators[h] = sum_in_order(weights, count) + exp_rounded(sink_[first + h] - top);
      round_to(dtype_, weights, count);
    }
    // values[tile of 16 dims][head][16], one chain over the keys for each block of the chain's order.
    std::memset(s.total, 0, heads * wide * sizeof(float));
    std::memset(s.values, 0, heads * wide * sizeof(float));
    for (int64_t k = 0; k < count;) {
      const int64_t chain = chain_end(k, count), end = std::min(k + kKeys, chain);
      fetch(batch, k, end - k, s);
      for (int64_t d = 0; d < wide; d += kTile) {
        vector().chain(s.keys + d, wide, s.weights + k, lists, heads, end - k, s.values + d * heads);
      }
      if (end == chain) {
        for (int64_t i = 0; i < heads * wide; ++i) {
          s.total[i] += s.values[i];
          s.values[i] = 0;
        }
      }
      k = end;
    }
    // Back to rows by head; s.values is free again.
    for (int64_t d = 0; d < wide; d += kTile) {
      for (int64_t h = 0; h < heads; ++h) {
        for (int64_t i = 0; i < kTile; ++i) s.values[h * wide + d + i] = s.total[d * heads + h * kTile + i] / denominators[h];
      }
    }
    std::memcpy(s.total, s.values, heads * wide * sizeof(float));
  }

  const Step* step_;
  Tensor kv_, indices_;
  StateRows window_, compressed_;
  int64_t heads_, dim_;
  DType dtype_;
  int64_t ratio_;
  float scale_;
  std::vector<float> sink_;
  int64_t entries_ = 0, most_keys_ = 0, pieces_ = 1;
  bool unpacks_ = false;
};

class SparseAttention : public Attention {
 public:
  explicit SparseAttention(CallSite& site)
      : Attention(site, 1, 6, heads_of(site), site.required(0).cols(), site.required(0).dtype),
        q_(require_activation(site, site.operand(0))), y_(site.result(0)) {
    site.require(q_.rank() == 4 && q_.dim(0) == step_->batch && q_.dim(1) == step_->tokens, "q is not [B,T,H,d]");
    site.require(y_.dtype == q_.dtype && y_.shape == q_.shape, "the result's type does not fit");
  }

  void run(Worker& worker) override {
    const TokenRows rows(step_, q_);
    Scratch s = divide(worker.scratch());
    const int64_t wide = padded(dim_);
    const Range share = worker.share(rows.count() * pieces_);
    for (int64_t i = share.begin; i < share.end; ++i) {
      const TokenRows::Group token = rows.at(i / pieces_);
      const int64_t first = i % pieces_ * kHeads, heads = std::min(kHeads, heads_ - first);
      for (int64_t h = 0; h < heads; ++h) load_row(q_, token.row + first + h, s.q + h * wide);
      attend(token.batch, token.token, places(token.batch), first, heads, s);
      for (int64_t h = 0; h < heads; ++h) store_row(y_, token.row + first + h, s.total + h * wide);
    }
  }

 private:
  static int64_t heads_of(const CallSite& site) {
    site.require(site.required(0).rank() == 4, "q is not [B,T,H,d]");
    return site.required(0).dim(2);
  }

  Tensor q_, y_;
};

class FusedAttention : public Attention {
 public:
  explicit FusedAttention(CallSite& site)
      : Attention(site, 1, 8, heads_of(site), site.required(0).cols() / heads_of(site), site.required(0).dtype),
        q_(require_activation(site, site.operand(0))), y_(site.result(0)), tables_(site, site.required(6), site.required(7), dim_),
        eps_(static_cast<float>(site.number("eps"))) {
    site.require(q_.rank() == 3 && q_.dim(0) == step_->batch && q_.dim(1) == step_->tokens, "q is not [B,T,H*d]");
    site.require(y_.dtype == q_.dtype && y_.rank() >= 3 && y_.dim(0) == step_->batch && y_.dim(1) == step_->tokens &&
                     y_.count() == q_.count() && y_.cols() % dim_ == 0,
                 "the result's type does not fit");
  }

  void run(Worker& worker) override {
    const TokenRows rows(step_, q_);
    Scratch s = divide(worker.scratch());
    const int64_t wide = padded(dim_), per_row = y_.cols() / dim_, rows_per_token = heads_ / per_row;
    const int64_t pairs = tables_.pairs(), tail = dim_ - 2 * pairs;
    const Range share = worker.share(rows.count() * pieces_);
    for (int64_t i = share.begin; i < share.end; ++i) {
      const TokenRows::Group token = rows.at(i / pieces_);
      const int64_t first = i % pieces_ * kHeads, heads = std::min(kHeads, heads_ - first);
      const int64_t position = step_->pos[token.batch] + token.token;
      const float *cos = tables_.cos(position), *sin = tables_.sin(position);
      for (int64_t h = 0; h < heads; ++h) {
        float* q = s.q + h * wide;
        load_part(q_, token.row, (first + h) * dim_, dim_, q);
        const int64_t all = int64_t{step_->n_valid[token.batch]} * heads_, mine = token.token * heads_ + first + h;
        head_norm_row(q, dim_, eps_, dtype_, mine >= all / kHeadNormLanes * kHeadNormLanes);
        rope_row(q + tail, cos, sin, pairs, false);
        round_to(dtype_, q + tail, 2 * pairs);
      }
      attend(token.batch, token.token, places(token.batch), first, heads, s);
      for (int64_t h = 0; h < heads; ++h) {
        float* row = s.total + h * wide;
        round_to(dtype_, row, dim_);
        rope_row(row + tail, cos, sin, pairs, true);
        const int64_t head = first + h;
        store_part(y_, token.row * rows_per_token + head / per_row, head % per_row * dim_, dim_, row);
      }
    }
  }

 private:
  static int64_t heads_of(const CallSite& site) {
    const int64_t heads = site.integer("heads");
    site.require(heads > 0 && site.required(0).cols() % heads == 0 && site.required(0).cols() >= heads, "heads do not divide q");
    return heads;
  }

  Tensor q_, y_;
  RopeTables tables_;
  float eps_;
};

}  // namespace

void add_attention_kernels(Registry& registry) {
  registry["host.sparse_attention"] = {
      "sparse_attention(q, kv?, window, compressed?, indices?, sink, pos, n_valid, slot; ratio: int, capacity: int, "
      "scale: float, window_rows: str, compressed_rows: str) -> ()",
      make_kernel<SparseAttention>};
  registry["host.attention"] = {
      "attention(q, kv?, window, compressed?, indices?, sink, cos, sin, pos, n_valid, slot; heads: int, eps: float, "
      "tail: ints, ratio: int, capacity: int, scale: float, window_rows: str, compressed_rows: str) -> ()",
      make_kernel<FusedAttention>};
}

}  // namespace rewright
