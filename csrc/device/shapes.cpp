#include "shapes.h"

#include <cmath>
#include <limits>

#include "families.h"

namespace rewright {

void require_groups(const DeviceSite& site, std::initializer_list<const Tensor*> tensors, int64_t count) {
  for (const Tensor* tensor : tensors) {
    element_of(site, *tensor);
    const int64_t bytes = count * bits_of(tensor->dtype) / 8;
    const bool whole = tensor->cols() % count == 0 && tensor->cols() <= std::numeric_limits<int>::max();
    site.require(whole, "rows are no multiple of " + std::to_string(count) + " elements");
    const bool aligned = tensor->pitch % bytes == 0 && reinterpret_cast<uintptr_t>(tensor->data) % bytes == 0;
    site.require(aligned, "rows are not aligned to " + std::to_string(bytes) + " bytes");
  }
}

void require_type(const DeviceSite& site, const Tensor& tensor, DType dtype, const std::vector<int64_t>& shape,
                  const char* what) {
  site.require(tensor && tensor.dtype == dtype && tensor.shape == shape, std::string(what) + " is of another type");
}

void require_vector(const DeviceSite& site, const Tensor& vector, int64_t count, const char* what) {
  site.require(vector && vector.rank() == 1 && vector.count() == count, std::string(what) + " does not fit");
  element_of(site, vector);
}

int64_t row_bytes(const DeviceSite& site, const Tensor& tensor) {
  site.require(bits_of(tensor.dtype) >= 8, "rows of packed codes are not copied");
  return tensor.cols() * bits_of(tensor.dtype) / 8;
}

int copy_unit(const DeviceSite& site, const Tensor& to, const Tensor& from) {
  for (const int unit : {16, 4, 2}) {
    bool fits = true;
    for (const Tensor* tensor : {&to, &from}) {
      fits &= row_bytes(site, *tensor) % unit == 0 && tensor->pitch % unit == 0 &&
              reinterpret_cast<uintptr_t>(tensor->data) % unit == 0;
    }
    if (fits) return unit;
  }
  return 1;
}

int row_count(const DeviceSite& site, const Tensor& tensor) {
  const int64_t rows = tensor.rows();
  site.require(0 < rows && rows <= std::numeric_limits<int>::max() && tensor.cols() > 0, "a tensor is empty or too large");
  return static_cast<int>(rows);
}

unsigned blocks_of(int64_t count, int64_t each) { return static_cast<unsigned>((count + each - 1) / each); }

RopeTable rope_table(const DeviceSite& site, const Tensor& cos, const Tensor& sin, int64_t columns) {
  const bool fits = cos && sin && cos.dtype == DType::kF32 && sin.dtype == DType::kF32 && cos.rank() == 2 &&
                    cos.shape == sin.shape && cos.dim(0) > 0 && cos.dim(0) <= std::numeric_limits<int>::max();
  site.require(fits, "the tables of cosines and sines do not fit");
  site.require(cos.cols() <= columns / 2 && columns % 2 == 0, "the tables turn more than a row, or half of a pair");
  RopeTable table{};
  table.cos = static_cast<const float*>(cos.data);
  table.sin = static_cast<const float*>(sin.data);
  table.cos_pitch = cos.pitch;
  table.sin_pitch = sin.pitch;
  table.positions = static_cast<int>(cos.dim(0));
  table.pairs = static_cast<int>(cos.cols());
  return table;
}

int code_format(const DeviceSite& site, const std::string& name) {
  site.require(name == "e4m3" || name == "e2m1", "codes are e4m3 or e2m1, not " + name);
  return name == "e4m3" ? kE4M3Codes : kE2M1Codes;
}

ColumnRange column_range(const DeviceSite& site, int64_t columns) {
  const std::vector<int64_t> dims = site.list("dims");
  if (dims.empty()) return {0, static_cast<int>(columns)};
  site.require(dims.size() == 2 && 0 <= dims[0] && dims[0] < dims[1] && dims[1] <= columns, "dims do not fit");
  return {static_cast<int>(dims[0]), static_cast<int>(dims[1])};
}

DType activation_dtype(const DeviceSite& site, const std::string& name) {
  site.require(name == "bf16" || name == "f32", "values are bf16 or f32, not " + name);
  return name == "bf16" ? DType::kBF16 : DType::kF32;
}

RowForm row_form(const DeviceSite& site, int64_t columns, DType dtype, const Tensor& weight, const Tensor& cos,
                 const Tensor& sin, const Tensor& result) {
  site.require(0 < columns && columns <= kMostRow && columns % 2 == 0, "rows are odd, or of more than 512 elements");
  require_vector(site, weight, columns, "the norm's weight");
  require_groups(site, {&weight, &result}, 2);
  RowForm form{};
  form.weight = weight.data;
  form.table = rope_table(site, cos, sin, columns);
  form.columns = static_cast<int>(columns);
  form.element = dtype == DType::kF32;
  form.weight_element = element_of(site, weight);
  form.y_element = element_of(site, result);
  form.eps = static_cast<float>(site.number("eps"));
  form.rotate = site.flag("rotate", false);
  form.rotation_scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(columns)));
  site.require(!form.rotate || (columns & (columns - 1)) == 0, "rows to rotate are no power of two wide");
  const std::string fmt = site.text("fmt", "");
  DType out = dtype;
  if (!fmt.empty()) {
    out = activation_dtype(site, site.text("out", ""));
    const bool part = !site.list("dims").empty();
    site.require(!part || out == dtype, "rows of which a part is rounded keep their type");
    const ColumnRange range = column_range(site, columns);
    const int64_t block = site.integer("block");
    site.require(0 < block && block <= kMostBlock && block % 2 == 0 && range.start % 2 == 0, "blocks are odd or too large");
    site.require((range.stop - range.start) % block == 0, "blocks do not divide a row");
    form.format = code_format(site, fmt);
    form.block = static_cast<int>(block);
    form.start = range.start;
    form.stop = range.stop;
  }
  site.require(result.dtype == out && result.cols() == columns, "the result cannot hold the rows");
  return form;
}

}  // namespace rewright
