#include "rows.h"

#include <cstring>

#include "formats.h"

namespace rewright {

void load_part(const Tensor& tensor, int64_t row, int64_t first, int64_t count, float* out) {
  switch (tensor.dtype) {
    case DType::kF32:
      std::memcpy(out, tensor.row<float>(row) + first, count * sizeof(float));
      break;
    case DType::kBF16: {
      const uint16_t* from = tensor.row<uint16_t>(row) + first;
      for (int64_t i = 0; i < count; ++i) out[i] = bf16_to_float(from[i]);
      break;
    }
    case DType::kF16: {
      const uint16_t* from = tensor.row<uint16_t>(row) + first;
      for (int64_t i = 0; i < count; ++i) out[i] = half_to_float(from[i]);
      break;
    }
    default:  // constructors refuse what is no float
      break;
  }
}

void load_row(const Tensor& tensor, int64_t row, float* out) { load_part(tensor, row, 0, tensor.cols(), out); }

void store_part(const Tensor& tensor, int64_t row, int64_t first, int64_t count, const float* values) {
  if (tensor.dtype == DType::kF32) {
    std::memcpy(tensor.row<float>(row) + first, values, count * sizeof(float));
    return;
  }
  uint16_t* to = tensor.row<uint16_t>(row) + first;
  for (int64_t i = 0; i < count; ++i) to[i] = float_to_bf16(values[i]);
}

void store_row(const Tensor& tensor, int64_t row, const float* values) {
  store_part(tensor, row, 0, tensor.cols(), values);
}

void round_to(DType dtype, float* values, int64_t count) {
  if (dtype != DType::kBF16) return;
  for (int64_t i = 0; i < count; ++i) values[i] = round_to_bf16(values[i]);
}

bool is_float(DType dtype) { return dtype == DType::kF32 || dtype == DType::kBF16 || dtype == DType::kF16; }

const Tensor& require_activation(const CallSite& site, const Tensor& tensor) {
  site.require(static_cast<bool>(tensor) && tensor.count() > 0, "an activation is absent or empty");
  site.require(tensor.dtype == DType::kBF16 || tensor.dtype == DType::kF32, "an activation is neither bf16 nor f32");
  return tensor;
}

TokenRows::TokenRows(const Step* step, const Tensor& tensor) : step_(step), inner_(1), all_(tensor.rows()) {
  by_token_ = tensor.rank() >= 3 && tensor.dim(0) == step->batch && tensor.dim(1) == step->tokens;
  if (by_token_) inner_ = all_ / (int64_t{step->batch} * step->tokens);
}

int64_t TokenRows::count() const {
  if (!by_token_) return all_;
  int64_t total = 0;
  for (int b = 0; b < step_->batch; ++b) total += step_->n_valid[b];
  return total;
}

TokenRows::Group TokenRows::at(int64_t index) const {
  if (!by_token_) return {index, 0, 0};
  int b = 0;
  while (index >= step_->n_valid[b]) index -= step_->n_valid[b++];
  return {(int64_t{b} * step_->tokens + index) * inner_, b, static_cast<int>(index)};
}

int64_t TokenRows::group_size(int64_t index) const {
  if (!by_token_) return 1;
  int b = 0;
  while (index >= step_->n_valid[b]) index -= step_->n_valid[b++];
  return step_->n_valid[b] - index;
}

}  // namespace rewright
