// The lightning indexer: index queries, scores of compressed entries, and the choice of the best.
//
// host.index_query: RoPE, Hadamard rotation and rounding of each query head, every step rounded as if it had
// been stored. host.index_score: for each entry that a query sees the sum over heads of relu(q_h . k) times
// the head's weight, dot, product and sum rounded to q's dtype each. host.index_topk: the k best of a row of
// scores. host.index_select: both, the scores living in the workspace. Bound by the multiply-adds of the
// dots: heads * c for each query and entry. Work is shared out in blocks of entries of one sequence, whose
// keys are transposed once for all of the worker's queries.
#include <algorithm>
#include <bit>
#include <cstring>
#include <functional>
#include <limits>

#include "families.h"
#include "formats.h"
#include "rope.h"
#include "rounding.h"
#include "rows.h"
#include "state_rows.h"
#include "step_vectors.h"
#include "sum_orders.h"
#include "vector.h"

namespace rewright {
namespace {

constexpr float kHidden = -std::numeric_limits<float>::infinity();

class IndexQuery : public Kernel {
 public:
  explicit IndexQuery(CallSite& site)
      : step_(site.step),
        x_(require_activation(site, site.operand(0))),
        y_(site.result(0)),
        heads_(site.integer("heads")),
        tables_(site, site.operand(1), site.operand(2), width(site)),
        rounding_(site, width(site), x_.dtype),
        rows_(step_, x_) {
    require_tokens(site, x_);
    require_step_vector(site, site.operand(3), step_->pos);
    const std::vector<int64_t> shape{step_->batch, step_->tokens, heads_, width(site)};
    site.require(is_power_of_two(shape.back()), "heads are no power of two wide");
    site.require(y_.dtype == rounding_.dtype() && y_.shape == shape, "the queries do not fit");
  }

  size_t scratch_bytes() const override { return y_.cols() * sizeof(float); }

  void run(Worker& worker) override {
    float* row = worker.scratch();
    const int64_t c = y_.cols();
    const Range share = worker.share(rows_.count() * heads_);
    for (int64_t i = share.begin; i < share.end; ++i) {
      const TokenRows::Group at = rows_.at(i / heads_);
      const int64_t head = i % heads_;
      load_part(x_, at.row, head * c, c, row);
      tables_.turn(row, c, int64_t{step_->pos[at.batch]} + at.token);
      round_to(x_.dtype, row, c);
      hadamard_row(row, c);
      round_to(x_.dtype, row, c);
      rounding_.apply(row);
      store_row(y_, at.row * heads_ + head, row);
    }
  }

 private:
  int64_t width(const CallSite& site) const {
    site.require(heads_ > 0 && x_.cols() % heads_ == 0, "the heads do not divide a row");
    return x_.cols() / heads_;
  }

  const Step* step_;
  Tensor x_, y_;
  int64_t heads_;
  RopeTables tables_;
  Rounding rounding_;
  TokenRows rows_;
};

// Order of a dot product's sum. The reference multiplies all queries of a sequence with all its entries at
// once, and its matrix library on a CPU with 8 lanes sums in an order that the shape of this product gives.
enum class DotOrder {
  kOneByOne,    // tiny products: one after the other
  kFour,        // four running sums by k % 4
  kFourPeeled,  // the same after the first four terms in a row
  kEight,       // eight running sums by k % 8
  kChain,       // one fused chain for each block of k, blocks added up
};

// Which order each dot has. `wide` is the axis that lies side by side in the reference's result (heads of a
// single query, entries of several), of which the last elements that fill no vector have an order of
// their own.
struct DotOrders {
  DotOrders(int64_t tokens, int64_t heads, int64_t entries, int64_t c) {
    by_head = tokens == 1;
    const int64_t wide = by_head ? heads : entries;
    const int64_t rows = by_head ? entries : tokens * heads;
    constexpr int64_t kTiny = 400, kWide = 12, kRows = 4;
    common = rest = DotOrder::kChain;
    in_vectors = wide / kRows * kRows;
    if (std::min(wide, kTiny) * std::min(rows, kTiny) * std::min(c, kTiny) < kTiny) {
      common = rest = DotOrder::kOneByOne;
    } else if (wide == 1) {
      common = rest = DotOrder::kFourPeeled;
    } else if (wide < kWide || rows < kRows) {
      common = rows == 1 ? DotOrder::kFourPeeled : DotOrder::kFour;
      rest = DotOrder::kEight;
    }
  }

  bool by_head;
  int64_t in_vectors;
  DotOrder common, rest;
};

// Dots of one row with a panel [c][16], summed one by one or in lanes.
void dots_in_lanes(DotOrder order, const float* panel, const float* x, int64_t c, float* out) {
  const int64_t lanes = order == DotOrder::kOneByOne ? 1 : order == DotOrder::kEight ? 8 : 4;
  float sums[8][kTile] = {};
  int64_t k = 0;
  if (order == DotOrder::kFourPeeled) {
    for (; k < std::min<int64_t>(4, c); ++k) {
      for (int i = 0; i < kTile; ++i) sums[0][i] += x[k] * panel[k * kTile + i];
    }
  }
  for (; k < c; ++k) {
    float* sum = sums[k % lanes];
    for (int i = 0; i < kTile; ++i) sum[i] += x[k] * panel[k * kTile + i];
  }
  if (lanes == 8) {
    for (int lane = 0; lane < 4; ++lane) {
      for (int i = 0; i < kTile; ++i) sums[lane][i] += sums[lane + 4][i];
    }
  }
  for (int i = 0; i < kTile; ++i) out[i] = lanes == 1 ? sums[0][i] : (sums[0][i] + sums[2][i]) + (sums[1][i] + sums[3][i]);
}

// dots[h][16] of `heads` rows x[h][c] with a panel, in fused chains; totals is as large as dots.
void dots_in_chains(const float* panel, const float* x, int64_t heads, int64_t c, float* dots, float* totals) {
  constexpr int64_t kBlock = 192;
  const int64_t block = c <= kBlock ? c : c < 2 * kBlock ? (c + 1) / 2 : kBlock;
  for (int64_t begin = 0; begin < c; begin += block) {
    float* to = begin == 0 ? dots : totals;
    std::fill_n(to, heads * kTile, 0.0f);
    vector().chain(panel + begin * kTile, kTile, x + begin, c, heads, std::min(block, c - begin), to);
    if (begin == 0) continue;
    for (int64_t i = 0; i < heads * kTile; ++i) dots[i] += totals[i];
  }
}

// dots[h][16] -> relu(dot) * weights[h], dot and product rounded to bf16 if they are `narrow`.
template <bool narrow>
void weigh(float* dots, const float* weights, int64_t heads) {
  for (int64_t h = 0; h < heads; ++h) {
    float* row = dots + h * kTile;
    const float weight = weights[h];
    for (int i = 0; i < kTile; ++i) {
      const float dot = narrow ? round_to_bf16(row[i]) : row[i];
      const float product = (dot < 0 ? 0 : dot) * weight;
      row[i] = narrow ? round_to_bf16(product) : product;
    }
  }
}

// Scores of a step's queries, block by block.
class Scorer {
 public:
  explicit Scorer(const CallSite& site)
      : step_(site.step),
        q_(require_activation(site, site.operand(0))),
        weights_(require_activation(site, site.operand(1))),
        ratio_(site.integer("ratio")),
        scale_(static_cast<float>(site.number("weight_scale"))) {
    site.require(q_.rank() == 4 && q_.dim(0) == step_->batch && q_.dim(1) == step_->tokens && q_.dim(2) > 0 && q_.cols() > 0,
                 "q is not [B,T,H,c]");
    heads_ = q_.dim(2);
    require_tokens(site, weights_);
    site.require(weights_.dtype == q_.dtype && weights_.cols() == heads_, "q and weights disagree");
    keys_ = StateRows(site, site.required(2), site.text("keys_rows", ""), q_.cols(), q_.dtype, "q and keys disagree");
    require_step_vector(site, site.operand(3), step_->pos);
    require_step_vector(site, site.operand(4), step_->n_valid);
    require_step_vector(site, site.operand(5), step_->slot);
    const int64_t capacity = site.integer("capacity");
    site.require(ratio_ > 0 && capacity >= 0 && capacity % ratio_ == 0, "the ratio does not divide the capacity");
    entries_ = capacity / ratio_;
    site.require(entries_ <= keys_.size(), "the keys hold less than the capacity");
  }

  const Tensor& q() const { return q_; }
  int64_t entries() const { return entries_; }
  // Entries that the last query of a sequence sees, and those that query `token` sees.
  int64_t visible(int64_t batch) const { return after(batch, step_->n_valid[batch]); }
  int64_t visible(int64_t batch, int64_t token) const { return after(batch, token + 1); }

  size_t scratch_bytes() const {
    return (panel_floats() + heads_ * q_.cols() + q_.cols() + heads_ * (2 * kTile + 1)) * sizeof(float);
  }

  // Scores of this worker's share, for every valid token and every entry below visible(batch), in parts of a
  // row: store(batch, token, first entry, count, scores). Entries that a token does not see are -inf.
  template <typename Store>
  void score(Worker& worker, Store store) const {
    float* panels = worker.scratch();
    float* row = panels + panel_floats();
    int64_t items = 0;
    for (int b = 0; b < step_->batch; ++b) items += items_of(b);
    const Range share = worker.share(items);
    int64_t loaded_batch = -1, loaded_block = -1;
    for (int64_t i = share.begin; i < share.end; ++i) {
      int64_t b = 0, j = i;
      while (j >= items_of(b)) j -= items_of(b++);
      const int64_t block = j / step_->n_valid[b], token = j % step_->n_valid[b];
      const int64_t first = block * kBlock, count = std::min(kBlock, visible(b) - first);
      const int64_t seen = std::clamp<int64_t>(visible(b, token) - first, 0, count);
      if (seen > 0 && (loaded_batch != b || loaded_block != block)) {
        load_keys(b, first, count, panels, row);
        loaded_batch = b;
        loaded_block = block;
      }
      float scores[kBlock];
      if (seen > 0) score_block(b, token, first, seen, panels, row, scores);
      std::fill_n(scores + seen, count - seen, kHidden);
      store(b, token, first, count, scores);
    }
  }

 private:
  static constexpr int64_t kBlock = 2 * kTile;

  // Entries that exist after so many tokens of this step.
  int64_t after(int64_t batch, int64_t tokens) const {
    return step_->n_valid[batch] == 0 ? 0 : std::min((step_->pos[batch] + tokens) / ratio_, entries_);
  }
  int64_t items_of(int64_t batch) const { return step_->n_valid[batch] * ((visible(batch) + kBlock - 1) / kBlock); }
  int64_t panel_floats() const { return kBlock * q_.cols(); }

  // Keys of entries first .. first + count as panels [c][16].
  void load_keys(int64_t batch, int64_t first, int64_t count, float* panels, float* row) const {
    const int64_t c = q_.cols();
    for (int64_t i = 0; i < kBlock; ++i) {
      float* panel = panels + i / kTile * c * kTile + i % kTile;
      if (i < count) {
        keys_.load(step_->slot[batch], first + i, row);
      } else {
        std::fill_n(row, c, 0.0f);
      }
      for (int64_t k = 0; k < c; ++k) panel[k * kTile] = row[k];
    }
  }

  // A token's query heads as [H][c] floats.
  const float* queries(int64_t token, float* buffer) const {
    const int64_t c = q_.cols(), first = token * heads_;
    if (q_.dtype == DType::kBF16 && q_.pitch == c * 2 && c % kTile == 0) {
      vector().widen_bf16(q_.row<uint16_t>(first), heads_ * c, buffer);
      return buffer;
    }
    if (q_.dtype == DType::kF32 && q_.pitch == c * 4) return q_.row<float>(first);
    for (int64_t h = 0; h < heads_; ++h) load_row(q_, first + h, buffer + h * c);
    return buffer;
  }

  void score_block(int64_t batch, int64_t token, int64_t first, int64_t seen, const float* panels, float* scratch,
                   float* scores) const {
    const int64_t c = q_.cols(), row = batch * step_->tokens + token;
    const bool narrow = q_.dtype == DType::kBF16;
    const DotOrders orders(step_->n_valid[batch], heads_, visible(batch), c);
    float* dots = scratch + heads_ * c;
    float* totals = dots + heads_ * kTile;
    float* weights = totals + heads_ * kTile;
    load_row(weights_, row, weights);
    for (int64_t h = 0; h < heads_; ++h) weights[h] *= scale_;
    round_to(q_.dtype, weights, heads_);
    const float* x = queries(row, scratch);
    for (int64_t start = 0; start < seen; start += kTile) {
      const float* panel = panels + start * c;
      if (orders.common == DotOrder::kChain) {
        dots_in_chains(panel, x, heads_, c, dots, totals);
      } else {
        for (int64_t h = 0; h < heads_; ++h) {
          mixed_dots(orders, h, first + start, panel, x + h * c, dots + h * kTile);
        }
      }
      narrow ? weigh<true>(dots, weights, heads_) : weigh<false>(dots, weights, heads_);
      float sums[kTile];
      sum_heads(batch, first + start, dots, narrow, sums);
      std::copy_n(sums, std::min<int64_t>(kTile, seen - start), scores + start);
    }
  }

  void mixed_dots(const DotOrders& orders, int64_t head, int64_t entry, const float* panel, const float* x, float* out) const {
    const int64_t at = orders.by_head ? head : entry;
    dots_in_lanes(at < orders.in_vectors ? orders.common : orders.rest, panel, x, q_.cols(), out);
    if (orders.by_head || at >= orders.in_vectors || at + kTile <= orders.in_vectors) return;
    float rest[kTile];
    dots_in_lanes(orders.rest, panel, x, q_.cols(), rest);
    for (int64_t i = orders.in_vectors - at; i < kTile; ++i) out[i] = rest[i];
  }

  // Sum over heads: of a single query they lie side by side in the reference, of several queries the
  // entries do.
  void sum_heads(int64_t batch, int64_t entry, const float* dots, bool narrow, float* sums) const {
    using Tile = Columns<kTile>;
    const auto load = [dots](int64_t h) {
      Tile tile;
      std::copy_n(dots + h * kTile, kTile, tile.v);
      return tile;
    };
    const int64_t entries = visible(batch);
    Tile tile;
    if (step_->n_valid[batch] == 1 || entries == 1) {
      tile = sum_contiguous<Tile>(load, heads_, narrow);
    } else {
      const int64_t cascaded = cascaded_columns(entries, narrow);
      if (entry < cascaded) tile = sum_cascaded<Tile>(load, heads_);
      if (entry + kTile > cascaded) {
        const Tile rest = sum_interleaved<Tile>(load, heads_);
        for (int64_t i = std::max<int64_t>(0, cascaded - entry); i < kTile; ++i) tile.v[i] = rest.v[i];
      }
    }
    std::copy_n(tile.v, kTile, sums);
    round_to(q_.dtype, sums, kTile);
  }

  const Step* step_;
  Tensor q_, weights_;
  StateRows keys_;
  int64_t ratio_, heads_ = 0, entries_ = 0;
  float scale_;
};

// The k best of a row of scores that comes in parts: best first, equal ones by ascending index. Scores become
// integers of the same order, with the index below, so that no two are equal; NaN counts as the largest.
class Selection {
 public:
  static size_t scratch_bytes(int64_t k) { return 2 * k * sizeof(uint64_t); }

  Selection(int64_t k, void* scratch) : k_(k), keys_(static_cast<uint64_t*>(scratch)) {}

  void add(int64_t first, int64_t count, const float* scores) {
    for (int64_t i = 0; i < count; ++i) {
      const uint64_t key = uint64_t{ordered(scores[i])} << 32 | (~static_cast<uint64_t>(first + i) & 0xffffffff);
      if (key <= floor_) continue;
      keys_[count_++] = key;
      if (count_ < 2 * k_) continue;
      std::nth_element(keys_, keys_ + k_ - 1, keys_ + count_, std::greater<>());
      floor_ = keys_[k_ - 1];
      count_ = k_;
    }
  }

  // Writes k indices, -1 from place `limit` on and where there is no entry.
  void finish(int64_t limit, int32_t* chosen) {
    const int64_t found = std::min(k_, count_);
    if (count_ > k_) std::nth_element(keys_, keys_ + k_ - 1, keys_ + count_, std::greater<>());
    std::sort(keys_, keys_ + found, std::greater<>());
    for (int64_t i = 0; i < k_; ++i) {
      chosen[i] = i < std::min(found, limit) ? static_cast<int32_t>(~keys_[i] & 0xffffffff) : -1;
    }
  }

 private:
  static uint32_t ordered(float value) {
    if (value != value) return 0xffffffff;
    const uint32_t bits = std::bit_cast<uint32_t>(value + 0.0f);  // -0 counts as 0
    return bits >> 31 ? ~bits : bits | 0x80000000;
  }

  int64_t k_, count_ = 0;
  uint64_t* keys_;
  uint64_t floor_ = 0;  // keys up to here are not among the best
};

void require_chosen(const CallSite& site, int64_t k, int64_t entries) {
  const Tensor& chosen = site.result(0);
  const std::vector<int64_t> shape{site.step->batch, site.step->tokens, k};
  site.require(0 < k && k <= entries, "k is out of range");
  site.require(chosen.dtype == DType::kI32 && chosen.shape == shape && chosen.pitch % sizeof(int32_t) == 0,
               "the chosen entries do not fit");
}

class IndexScore : public Kernel {
 public:
  explicit IndexScore(CallSite& site) : step_(site.step), scorer_(site), y_(site.result(0)), rows_(step_, scorer_.q()) {
    const std::vector<int64_t> shape{step_->batch, step_->tokens, scorer_.entries()};
    site.require(y_.dtype == scorer_.q().dtype && y_.shape == shape, "the scores do not fit");
  }

  size_t scratch_bytes() const override { return std::max(scorer_.scratch_bytes(), kFill * sizeof(float)); }

  void run(Worker& worker) override {
    scorer_.score(worker, [this](int64_t b, int64_t t, int64_t first, int64_t count, const float* scores) {
      store_part(y_, b * step_->tokens + t, first, count, scores);
    });
    std::fill_n(worker.scratch(), kFill, kHidden);
    const Range share = worker.share(rows_.count());
    for (int64_t i = share.begin; i < share.end; ++i) {
      const TokenRows::Group at = rows_.at(i);
      const int64_t row = int64_t{at.batch} * step_->tokens + at.token;
      for (int64_t first = scorer_.visible(at.batch); first < y_.cols(); first += kFill) {
        store_part(y_, row, first, std::min(kFill, y_.cols() - first), worker.scratch());
      }
    }
  }

 private:
  static constexpr int64_t kFill = 1024;
  const Step* step_;
  Scorer scorer_;
  Tensor y_;
  TokenRows rows_;
};

class IndexTopK : public Kernel {
 public:
  explicit IndexTopK(CallSite& site)
      : step_(site.step),
        scores_(require_activation(site, site.operand(0))),
        chosen_(site.result(0)),
        ratio_(site.integer("ratio")),
        k_(site.integer("k")),
        rows_(step_, scores_) {
    require_tokens(site, scores_);
    require_step_vector(site, site.operand(1), step_->pos);
    require_step_vector(site, site.operand(2), step_->n_valid);
    site.require(ratio_ > 0, "the ratio is not positive");
    require_chosen(site, k_, scores_.cols());
  }

  size_t scratch_bytes() const override { return Selection::scratch_bytes(k_) + kPart * sizeof(float); }

  void run(Worker& worker) override {
    float* part = worker.scratch();
    const Range share = worker.share(rows_.count());
    for (int64_t i = share.begin; i < share.end; ++i) {
      const TokenRows::Group at = rows_.at(i);
      const int64_t pos = step_->pos[at.batch];
      const int64_t visible = std::min((pos + step_->n_valid[at.batch]) / ratio_, scores_.cols());
      Selection best(k_, part + kPart);
      for (int64_t first = 0; first < visible; first += kPart) {
        const int64_t count = std::min(kPart, visible - first);
        load_part(scores_, at.row, first, count, part);
        best.add(first, count, part);
      }
      best.finish((pos + 1 + at.token) / ratio_, chosen_.row<int32_t>(at.row));
    }
  }

 private:
  static constexpr int64_t kPart = 1024;
  const Step* step_;
  Tensor scores_, chosen_;
  int64_t ratio_, k_;
  TokenRows rows_;
};

class IndexSelect : public Kernel {
 public:
  explicit IndexSelect(CallSite& site)
      : step_(site.step), scorer_(site), chosen_(site.result(0)), k_(site.integer("k")), rows_(step_, scorer_.q()) {
    require_chosen(site, k_, scorer_.entries());
    const int64_t rows = int64_t{step_->batch} * step_->tokens;
    site.require(scorer_.entries() <= (int64_t{1} << 46) / rows, "there are too many scores");
    scores_ = site.take_workspace<float>(rows * scorer_.entries());
  }

  size_t scratch_bytes() const override { return std::max(scorer_.scratch_bytes(), Selection::scratch_bytes(k_)); }

  void run(Worker& worker) override {
    scorer_.score(worker, [this](int64_t b, int64_t t, int64_t first, int64_t count, const float* scores) {
      std::copy_n(scores, count, row(b, t) + first);
    });
    worker.barrier();
    const Range share = worker.share(rows_.count());
    for (int64_t i = share.begin; i < share.end; ++i) {
      const TokenRows::Group at = rows_.at(i);
      const int64_t visible = scorer_.visible(at.batch, at.token);
      Selection best(k_, worker.scratch());
      best.add(0, visible, row(at.batch, at.token));
      best.finish(visible, chosen_.row<int32_t>(int64_t{at.batch} * step_->tokens + at.token));
    }
  }

 private:
  float* row(int64_t batch, int64_t token) const { return scores_ + (batch * step_->tokens + token) * scorer_.entries(); }

  const Step* step_;
  Scorer scorer_;
  Tensor chosen_;
  int64_t k_;
  TokenRows rows_;
  float* scores_ = nullptr;
};

}  // namespace

void add_index_kernels(Registry& registry) {
  registry["host.index_query"] = {
      "index_query(q, cos, sin, pos; heads: int, fmt: str, block: int, out: str) -> ()", make_kernel<IndexQuery>};
  registry["host.index_score"] = {
      "index_score(q, weights, keys, pos, n_valid, slot; ratio: int, capacity: int, weight_scale: float, "
      "keys_rows: str) -> ()",
      make_kernel<IndexScore>};
  registry["host.index_topk"] = {"index_topk(scores, pos, n_valid; ratio: int, k: int) -> ()", make_kernel<IndexTopK>};
  registry["host.index_select"] = {
      "index_select(q, weights, keys, pos, n_valid, slot; ratio: int, capacity: int, weight_scale: float, "
      "k: int, keys_rows: str) -> ()",
      make_kernel<IndexSelect>};
}

}  // namespace rewright
