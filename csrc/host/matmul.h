// Products of fp32 rows with stored weights, sums in a stated order.
#pragma once

#include <algorithm>
#include <cstddef>

#include "../runtime/kernel.h"
#include "vector.h"

namespace rewright {

// Order of a product's sum over k. The reference's matrix library on a CPU with 8 lanes sums a single
// row, two or three rows, and more rows in three different orders; results of the reduced-precision
// model depend on them (docs/numerics.md), so these are those orders, on every machine.
enum class Order {
  kLanesPeeled,  // one row: four running sums by k % 4 after the first four terms in a row; products rounded
  kLanes,        // two or three rows: four running sums by k % 4; products rounded
  kChain,        // more: one fused chain for each block of k, blocks added up
};

Order order_of(int64_t rows);

// sums[r][0..16) = x[r] . panel in Order::kChain, panel [k][ldp] fp32, x [rows][ldx]; `part` holds
// rows * 16 floats.
void chain_product(const float* panel, int64_t ldp, const float* x, int64_t ldx, int64_t rows, int64_t k, float* sums,
                   float* part);

// End of the block of such a chain over k terms in which term `begin` lies.
int64_t chain_end(int64_t begin, int64_t k);

// Rows of one sequence: they are summed in the order that their number gives, whatever else runs.
struct RowGroup {
  int64_t first, count;
};

// A stored matrix [N,K], or a stack of them [E,N,K], in layout tile16.
class Matrix {
 public:
  // `scale` absent for float weights. Throws PlanError for formats that do not go together.
  Matrix(const CallSite& site, const Tensor& weight, const Tensor& scale);

  int64_t n() const { return n_; }
  int64_t k() const { return k_; }
  int64_t stack() const { return stack_; }
  int64_t tiles() const { return (n_ + kTile - 1) / kTile; }
  int64_t width(int64_t tile) const { return std::min<int64_t>(kTile, n_ - tile * kTile); }
  DType dtype() const { return weight_.dtype; }

  // out[row][0..16) = x[row] . rows tile*16 .. of matrix `index`, for every row of every group; columns
  // from width(tile) on are garbage. x is [rows][ldx] fp32, 64-byte aligned if ldx % 16 == 0.
  // `bf16` takes the order that the reference has for products of bf16 by bf16, whatever the number of rows:
  // 64 fused running sums by k % 64, folded in halves.
  void tile(int64_t index, int64_t tile, const float* x, int64_t ldx, const RowGroup* groups, size_t group_count,
            bool bf16, float* out, float* scratch) const;

  // Bytes of scratch that `tile` needs for that many rows.
  size_t scratch_bytes(int64_t rows, bool bf16 = false) const;

 private:
  void tile_bf16(int64_t index, int64_t tile, const float* x, int64_t ldx, const RowGroup* groups, size_t group_count,
                 float* out, float* scratch) const;
  const float* panel(int64_t index, int64_t tile, int64_t begin, int64_t end, float* buffer) const;

  Tensor weight_, scale_;
  int64_t stack_, n_, k_;
};

// The fp32 form of an activation's valid rows: [rows][K], dequantised where it comes with scales.
class ActivationRows {
 public:
  // `inner` rows a token are rows of their own.
  ActivationRows(const CallSite& site, const Tensor& x, const Tensor& x_scale);

  int64_t k() const { return x_.cols(); }
  int64_t most_rows() const { return x_.rows(); }
  const Tensor& tensor() const { return x_; }
  // This worker's share of the conversion into to[rows][K]; the caller waits at a barrier afterwards.
  void load(Worker& worker, const Step* step, float* to) const;
  // One row (of the tensor) into to[K].
  void load_row(int64_t row, float* to) const;

 private:
  Tensor x_, scale_;
  bool fixed_ = false;  // one row of scales for all
  int64_t block_;
};

}  // namespace rewright
