// A typed view of memory that a plan placed: what kernels read and write.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace rewright {

// Element types of ir/types.py. E2M1 packs two codes in a byte, the low nibble first;
// bytes are rows of packed keys (ir/kv_format.py).
enum class DType : uint8_t { kF64, kF32, kBF16, kF16, kF8E4M3, kE8M0, kE2M1, kI64, kI32, kByte };

int bits_of(DType dtype);
const char* name_of(DType dtype);

struct Tensor {
  void* data = nullptr;  // null: an optional operand that is absent
  DType dtype = DType::kF32;
  std::vector<int64_t> shape;  // logical elements
  int64_t pitch = 0;           // bytes from one row (the last axis) to the next
  std::string layout;          // order of the elements, "" where row by row (ir/weight_layout.py)

  explicit operator bool() const { return data != nullptr; }
  int rank() const { return static_cast<int>(shape.size()); }
  int64_t dim(int axis) const { return shape[axis < 0 ? axis + shape.size() : axis]; }
  int64_t cols() const { return shape.empty() ? 1 : shape.back(); }
  int64_t rows() const;    // product of all axes but the last
  int64_t count() const;   // elements
  int64_t nbytes() const;  // of the memory it spans, padding between rows included

  template <typename T>
  T* row(int64_t index) const {
    return reinterpret_cast<T*>(static_cast<char*>(data) + index * pitch);
  }
};

// "bf16[1,1,4|128]" -> type; throws PlanError for anything else. `data` stays null.
Tensor parse_type(const std::string& text);

}  // namespace rewright
