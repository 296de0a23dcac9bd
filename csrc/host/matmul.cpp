#include "matmul.h"

#include <cstring>
#include <vector>

#include "formats.h"
#include "quantize.h"
#include "rows.h"

namespace rewright {
namespace {

constexpr int64_t kPanel = 128;      // elements of k decoded at a time: 8 KB, which stays in the first cache
constexpr int64_t kChainBlock = 192;  // of the reference's matrix library
constexpr int64_t kScaleBlock = 128;  // of e4m3 weights and activations
constexpr int64_t kFineBlock = 32;    // of e2m1 weights
constexpr int64_t kRowFloats = 4 * kTile;
constexpr int64_t kLanes64 = 64;

float scale_at(const Tensor& scale, int64_t row, int64_t column) {
  return scale.dtype == DType::kE8M0 ? e8m0_to_float(scale.row<uint8_t>(row)[column]) : scale.row<float>(row)[column];
}

}  // namespace

int64_t chain_end(int64_t begin, int64_t k) {
  if (k <= kChainBlock) return k;
  const int64_t block = k < 2 * kChainBlock ? (k + 1) / 2 : kChainBlock;
  return std::min(k, (begin / block + 1) * block);
}

void chain_product(const float* panel, int64_t ldp, const float* x, int64_t ldx, int64_t rows, int64_t k, float* sums,
                   float* part) {
  std::memset(sums, 0, rows * kTile * sizeof(float));
  for (int64_t begin = 0; begin < k;) {
    const int64_t end = chain_end(begin, k);
    if (begin == 0) {
      vector().chain(panel, ldp, x, ldx, rows, end, sums);
    } else {
      std::memset(part, 0, rows * kTile * sizeof(float));
      vector().chain(panel + begin * ldp, ldp, x + begin, ldx, rows, end - begin, part);
      for (int64_t i = 0; i < rows * kTile; ++i) sums[i] += part[i];
    }
    begin = end;
  }
}

Order order_of(int64_t rows) {
  return rows == 1 ? Order::kLanesPeeled : rows < 4 ? Order::kLanes : Order::kChain;
}

Matrix::Matrix(const CallSite& site, const Tensor& weight, const Tensor& scale) : weight_(weight), scale_(scale) {
  site.require(static_cast<bool>(weight), "a weight is absent");
  site.require(weight.rank() == 2 || weight.rank() == 3, "a weight is no matrix");
  n_ = weight.dim(-2);
  k_ = weight.dim(-1);
  stack_ = weight.rank() == 3 ? weight.dim(0) : 1;
  site.require(n_ > 0 && k_ > 0 && stack_ > 0, "a weight is empty");
  site.require(weight.pitch * 8 == k_ * bits_of(weight.dtype), "rows of a weight are not back to back");
  if (is_float(weight.dtype)) {
    site.require(!scale, "a float weight takes no scale");
    return;
  }
  site.require(static_cast<bool>(scale), "a quantised weight needs a scale");
  site.require(scale.dtype == DType::kE8M0 || scale.dtype == DType::kF32, "a weight's scale is neither e8m0 nor f32");
  std::vector<int64_t> blocks = weight.shape;
  if (weight.dtype == DType::kE2M1) {
    site.require(k_ % kFineBlock == 0, "rows of an e2m1 weight are no multiple of 32");
    blocks.back() = k_ / kFineBlock;
  } else {
    site.require(weight.dtype == DType::kF8E4M3, "a weight is of a type that no product takes");
    blocks.back() = (k_ + kScaleBlock - 1) / kScaleBlock;
    blocks[blocks.size() - 2] = (n_ + kScaleBlock - 1) / kScaleBlock;
  }
  site.require(scale.shape == blocks, "a weight's scale does not fit");
  site.require(scale.pitch * 8 == blocks.back() * bits_of(scale.dtype), "rows of a scale are not back to back");
}

size_t Matrix::scratch_bytes(int64_t rows, bool bf16) const {
  const int64_t floats = bf16 ? (k_ + kLanes64) * kTile : kPanel * kTile + rows * kRowFloats;
  return (floats + kTile) * sizeof(float);
}

// Elements begin .. end of a tile as [end - begin][16] floats. A float tile of full width is used where
// it lies; any other is widened into the buffer.
const float* Matrix::panel(int64_t index, int64_t tile, int64_t begin, int64_t end, float* buffer) const {
  const int64_t width = this->width(tile), count = end - begin;
  const int64_t first = (index * n_ + tile * kTile) * k_ + begin * width;  // in elements of the storage order
  const Vector& loops = vector();
  if (width < kTile) {
    std::memset(buffer, 0, count * kTile * sizeof(float));
    for (int64_t k = 0; k < count; ++k) {
      for (int64_t i = 0; i < width; ++i) {
        const int64_t at = first + k * width + i, row = tile * kTile + i;
        float value = 0;
        switch (weight_.dtype) {
          case DType::kF32:
            value = static_cast<const float*>(weight_.data)[at];
            break;
          case DType::kBF16:
            value = bf16_to_float(static_cast<const uint16_t*>(weight_.data)[at]);
            break;
          case DType::kF16:
            value = half_to_float(static_cast<const uint16_t*>(weight_.data)[at]);
            break;
          case DType::kF8E4M3:
            value = kE4M3[static_cast<const uint8_t*>(weight_.data)[at]] *
                    scale_at(scale_, index * scale_.dim(-2) + row / kScaleBlock, (begin + k) / kScaleBlock);
            break;
          default: {  // e2m1: bytes [K/2][width], scales [K/32][width]
            const int64_t tile_start = (index * n_ + tile * kTile) * k_;
            const uint8_t byte = static_cast<const uint8_t*>(weight_.data)[tile_start / 2 + (begin + k) / 2 * width + i];
            const int64_t of_scale = tile_start / kFineBlock + (begin + k) / kFineBlock * width + i;
            const float scale = scale_.dtype == DType::kE8M0
                                    ? e8m0_to_float(static_cast<const uint8_t*>(scale_.data)[of_scale])
                                    : static_cast<const float*>(scale_.data)[of_scale];
            value = kE2M1[(begin + k) % 2 ? byte >> 4 : byte & 15] * scale;
          }
        }
        buffer[k * kTile + i] = value;
      }
    }
    return buffer;
  }
  switch (weight_.dtype) {
    case DType::kF32:
      return static_cast<const float*>(weight_.data) + first;
    case DType::kBF16:
      loops.widen_bf16(static_cast<const uint16_t*>(weight_.data) + first, count * kTile, buffer);
      break;
    case DType::kF16:
      loops.widen_half(static_cast<const uint16_t*>(weight_.data) + first, count * kTile, buffer);
      break;
    case DType::kF8E4M3: {
      const int64_t scale_row = index * scale_.dim(-2) + tile * kTile / kScaleBlock;
      for (int64_t k = begin; k < end;) {
        const int64_t stop = std::min(end, (k / kScaleBlock + 1) * kScaleBlock);
        loops.widen_e4m3(static_cast<const uint8_t*>(weight_.data) + first + (k - begin) * kTile, (stop - k) * kTile,
                         scale_at(scale_, scale_row, k / kScaleBlock), buffer + (k - begin) * kTile);
        k = stop;
      }
      break;
    }
    default: {
      // Panels of e2m1 begin at even k: kPanel and the blocks of a chain of such a K are even.
      const uint8_t* bytes = static_cast<const uint8_t*>(weight_.data) + first / 2;
      const int64_t scales = (index * n_ + tile * kTile) * (k_ / kFineBlock);
      for (int64_t k = begin; k < end;) {
        const int64_t stop = std::min(end, (k / kFineBlock + 1) * kFineBlock);
        const int64_t at = scales + k / kFineBlock * kTile;
        alignas(64) float widened[kTile];
        const float* factors = widened;
        if (scale_.dtype == DType::kE8M0) {
          loops.widen_e8m0(static_cast<const uint8_t*>(scale_.data) + at, widened);
        } else {
          factors = static_cast<const float*>(scale_.data) + at;
        }
        loops.widen_e2m1(bytes + (k - begin) / 2 * kTile, (stop - k) / 2, factors, buffer + (k - begin) * kTile);
        k = stop;
      }
    }
  }
  return buffer;
}

// Row by row over the whole tile: 64 sums a row are too many to keep for several rows.
void Matrix::tile_bf16(int64_t index, int64_t tile, const float* x, int64_t ldx, const RowGroup* groups, size_t group_count,
                       float* out, float* scratch) const {
  float* sums = scratch + k_ * kTile;
  const float* weights = panel(index, tile, 0, k_, scratch);
  for (size_t g = 0; g < group_count; ++g) {
    for (int64_t r = groups[g].first; r < groups[g].first + groups[g].count; ++r) {
      std::memset(sums, 0, kLanes64 * kTile * sizeof(float));
      vector().lanes64(weights, x + r * ldx, k_, sums);
      for (int64_t half = kLanes64 / 2; half > 0; half /= 2) {
        for (int64_t i = 0; i < half * kTile; ++i) sums[i] += sums[half * kTile + i];
      }
      std::memcpy(out + r * kTile, sums, kTile * sizeof(float));
    }
  }
}

void Matrix::tile(int64_t index, int64_t tile, const float* x, int64_t ldx, const RowGroup* groups, size_t group_count,
                  bool bf16, float* out, float* scratch) const {
  if (bf16) return tile_bf16(index, tile, x, ldx, groups, group_count, out, scratch);
  float* buffer = scratch;
  float* sums = scratch + kPanel * kTile;  // of each row 64 floats: four running sums, or one and the total
  bool cut = false;  // whether some group's chain ends within k
  for (size_t g = 0; g < group_count; ++g) {
    const Order mine = order_of(groups[g].count);
    cut |= mine == Order::kChain;
    const bool lanes = mine == Order::kLanes || mine == Order::kLanesPeeled;
    // Four sums a row, or one and its total.
    std::memset(sums + groups[g].first * kRowFloats, 0, groups[g].count * (lanes ? 4 : 2) * kTile * sizeof(float));
  }
  const Vector& loops = vector();
  for (int64_t begin = 0; begin < k_;) {
    int64_t end = std::min(k_, begin + kPanel);
    if (cut) end = std::min(end, chain_end(begin, k_));
    const float* weights = panel(index, tile, begin, end, buffer);
    for (size_t g = 0; g < group_count; ++g) {
      const RowGroup& group = groups[g];
      const Order mine = order_of(group.count);
      if (mine == Order::kChain) {
        // The chains of a group lie side by side, [count][16], its totals behind them.
        float* chains = sums + group.first * kRowFloats;
        float* totals = chains + group.count * kTile;
        loops.chain(weights, kTile, x + group.first * ldx + begin, ldx, group.count, end - begin, chains);
        if (end == chain_end(begin, k_)) {
          const bool first = chain_end(0, k_) == end;
          for (int64_t i = 0; i < group.count * kTile; ++i) {
            totals[i] = first ? chains[i] : totals[i] + chains[i];
            chains[i] = 0;
          }
        }
        continue;
      }
      for (int64_t r = group.first; r < group.first + group.count; ++r) {
        float* mine_sums = sums + r * kRowFloats;
        const float* row = x + r * ldx;
        int64_t k = begin;
        if (mine == Order::kLanesPeeled && begin == 0) {
          for (; k < std::min<int64_t>(4, end); ++k) {
            for (int i = 0; i < kTile; ++i) mine_sums[i] += row[k] * weights[k * kTile + i];
          }
        }
        const int64_t whole = (end - k) / 4 * 4;
        loops.lanes(weights + (k - begin) * kTile, row + k, whole, mine_sums);
        for (k += whole; k < end; ++k) {
          float* lane = mine_sums + k % 4 * kTile;
          for (int i = 0; i < kTile; ++i) lane[i] += row[k] * weights[(k - begin) * kTile + i];
        }
      }
    }
    begin = end;
  }
  for (size_t g = 0; g < group_count; ++g) {
    const RowGroup& group = groups[g];
    const Order mine = order_of(group.count);
    for (int64_t r = 0; r < group.count; ++r) {
      float* to = out + (group.first + r) * kTile;
      if (mine == Order::kChain) {
        std::memcpy(to, sums + group.first * kRowFloats + (group.count + r) * kTile, kTile * sizeof(float));
        continue;
      }
      const float* lane = sums + (group.first + r) * kRowFloats;
      for (int i = 0; i < kTile; ++i) {
        to[i] = (lane[i] + lane[2 * kTile + i]) + (lane[kTile + i] + lane[3 * kTile + i]);
      }
    }
  }
}

ActivationRows::ActivationRows(const CallSite& site, const Tensor& x, const Tensor& x_scale)
    : x_(x), scale_(x_scale), block_(kScaleBlock) {
  site.require(static_cast<bool>(x) && x.rank() >= 2 && x.cols() > 0, "an activation is absent or has no rows");
  if (!x_scale) {
    require_activation(site, x);
    return;
  }
  site.require(x.dtype == DType::kF8E4M3 && x_scale.dtype == DType::kE8M0, "a quantised activation is not e4m3 with e8m0");
  if (x_scale.rank() == 1) {  // the same for all rows
    fixed_ = true;
    block_ = x_scale.count() > 0 ? x.cols() / x_scale.count() : 0;
    fixed_scales(site, x_scale, x.cols(), block_);
    return;
  }
  std::vector<int64_t> blocks = x.shape;
  blocks.back() /= block_;
  site.require(x.cols() % block_ == 0 && x_scale.shape == blocks, "an activation's scale does not fit");
}

void ActivationRows::load_row(int64_t row, float* to) const {
  if (!scale_) return rewright::load_row(x_, row, to);
  const uint8_t* codes = x_.row<uint8_t>(row);
  const uint8_t* scales = scale_.row<uint8_t>(fixed_ ? 0 : row);
  for (int64_t k = 0; k < x_.cols(); ++k) to[k] = kE4M3[codes[k]] * e8m0_to_float(scales[k / block_]);
}

void ActivationRows::load(Worker& worker, const Step* step, float* to) const {
  const TokenRows rows(step, x_);
  const int64_t inner = rows.inner(), count = rows.count() * inner;
  const Range share = worker.share(count);
  for (int64_t i = share.begin; i < share.end; ++i) load_row(rows.at(i / inner).row + i % inner, to + i * k());
}

}  // namespace rewright
