// What makers of launches check and derive of their operands.
#pragma once

#include <initializer_list>

#include "../host/step_vectors.h"
#include "../kernels/keys/keys.h"
#include "../kernels/quantize/quantize.h"
#include "device_kernel.h"

namespace rewright {

// Throws PlanError unless the rows consist of whole groups of `count` neighbours at addresses that are multiples
// of a group's size: what loads of pairs and fours need. The tensors are bf16 or f32.
void require_groups(const DeviceSite& site, std::initializer_list<const Tensor*> tensors, int64_t count);

// Throws PlanError unless a tensor is present and of that type.
void require_type(const DeviceSite& site, const Tensor& tensor, DType dtype, const std::vector<int64_t>& shape,
                  const char* what);

// Throws PlanError unless a vector is a bf16 or f32 [count].
void require_vector(const DeviceSite& site, const Tensor& vector, int64_t count, const char* what);

int64_t row_bytes(const DeviceSite& site, const Tensor& tensor);

// Bytes of the words that copies of rows between two tensors move: 16, 4, 2 or 1.
int copy_unit(const DeviceSite& site, const Tensor& to, const Tensor& from);

// Rows of a tensor, which a launch can count.
int row_count(const DeviceSite& site, const Tensor& tensor);

// Blocks of `each` for `count` things.
unsigned blocks_of(int64_t count, int64_t each);

// Blocks of a row where a thread of 256 takes four columns.
inline int parts_of(const Tensor& tensor) { return static_cast<int>(blocks_of(tensor.cols(), 1024)); }

// Tables of cosines and sines for rows of `columns` elements.
RopeTable rope_table(const DeviceSite& site, const Tensor& cos, const Tensor& sin, int64_t columns);

// CodeFormat named "e4m3" or "e2m1".
int code_format(const DeviceSite& site, const std::string& name);

// The range of the last axis that `dims` names; all of it where it is not given.
struct ColumnRange {
  int start, stop;
};
ColumnRange column_range(const DeviceSite& site, int64_t columns);

// The form of rows of `columns` elements of dtype `dtype`: attributes eps, fmt, block, dims and out of the call,
// and the norm's weight. `result` holds the rows when they are done.
RowForm row_form(const DeviceSite& site, int64_t columns, DType dtype, const Tensor& weight, const Tensor& cos,
                 const Tensor& sin, const Tensor& result);

// bf16 or f32 by name.
DType activation_dtype(const DeviceSite& site, const std::string& name);

}  // namespace rewright
