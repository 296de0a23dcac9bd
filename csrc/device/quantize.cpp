#include "../kernels/quantize/quantize.h"

#include <limits>

#include "families.h"
#include "shapes.h"

namespace rewright {

namespace {

// codes and scales are those of `columns` values of each row of `like` in blocks; one row of scales may stand
// for all.
void require_codes(const DeviceSite& site, const Tensor& like, int64_t columns, int64_t block, const Tensor& codes,
                   const Tensor& scales, bool shared = false) {
  std::vector<int64_t> shape = like.shape;
  site.require(!shape.empty() && block > 0 && columns % block == 0, "blocks do not divide a row");
  shape.back() = columns;
  site.require(codes.shape == shape, "the codes do not fit");
  shape.back() /= block;
  if (shared) shape = {shape.back()};
  site.require(scales.shape == shape, "the scales do not fit");
}

QuantizeParams quantize_params(DeviceSite& site, const Tensor& x, const Tensor& codes, const Tensor& scales, const ColumnRange& range) {
  const int64_t block = site.integer("block");
  require_groups(site, {&x}, 2);
  site.require(block <= kMostBlock && block % 2 == 0 && range.start % 2 == 0, "blocks are odd or too large");
  QuantizeParams p{};
  p.format = code_format(site, site.text("fmt", ""));
  site.require(codes.dtype == (p.format == kE2M1Codes ? DType::kE2M1 : DType::kF8E4M3), "the codes are of another type");
  site.require(scales.dtype == DType::kE8M0, "the scales are not e8m0");
  site.require(p.format == kE2M1Codes || codes.pitch % 2 == 0, "rows of codes are not aligned to 2 bytes");
  p.x = x.data;
  p.codes = codes.data;
  p.x_pitch = x.pitch;
  p.codes_pitch = codes.pitch;
  p.blocks = static_cast<int>(scales.cols());
  p.count = static_cast<long long>(row_count(site, x)) * p.blocks;
  site.require(p.count <= std::numeric_limits<int>::max(), "x is too large");
  p.block = static_cast<int>(block);
  p.start = range.start;
  p.element = element_of(site, x);
  return p;
}

DeviceLaunch launch_quantize(DeviceSite& site, const QuantizeParams& p) { return site.launch("quantize", blocks_of(p.count, 8), 256, p); }

std::vector<DeviceLaunch> quantize(DeviceSite& site) {
  const Tensor &x = site.required(0), &codes = site.result(0), &scales = site.result(1);
  const ColumnRange range = column_range(site, x.cols());
  require_codes(site, x, range.stop - range.start, site.integer("block"), codes, scales);
  QuantizeParams p = quantize_params(site, x, codes, scales, range);
  p.scales = scales.data;
  p.scales_pitch = scales.pitch;
  return {launch_quantize(site, p)};
}

std::vector<DeviceLaunch> quantize_static(DeviceSite& site) {
  const Tensor &x = site.required(0), &fixed = site.required(1), &codes = site.result(0);
  require_codes(site, x, x.cols(), site.integer("block"), codes, fixed, true);
  QuantizeParams p = quantize_params(site, x, codes, fixed, {0, static_cast<int>(x.cols())});
  p.fixed = static_cast<const unsigned char*>(fixed.data);
  return {launch_quantize(site, p)};
}

std::vector<DeviceLaunch> dequantize(DeviceSite& site) {
  const Tensor &codes = site.required(0), &scales = site.required(1), &base = site.operand(2), &y = site.result(0);
  const ColumnRange range = column_range(site, y.cols());
  const int64_t block = site.integer("block");
  site.require(y.dtype == activation_dtype(site, site.text("out", "")), "the result is of another type");
  require_groups(site, {&y}, 2);
  require_codes(site, y, range.stop - range.start, block, codes, scales);
  site.require(codes.dtype == DType::kF8E4M3 || codes.dtype == DType::kE2M1, "codes are neither e4m3 nor e2m1");
  site.require(scales.dtype == DType::kE8M0 || scales.dtype == DType::kF32, "scales are neither e8m0 nor f32");
  site.require(block % 2 == 0 && range.start % 2 == 0, "blocks are odd");
  site.require(static_cast<bool>(base) == !site.list("dims").empty(), "base and dims go together");
  DequantizeParams p{};
  if (base) {
    site.require(base.dtype == y.dtype && base.shape == y.shape, "base does not fit");
    require_groups(site, {&base}, 2);
    p.base = base.data;
    p.base_pitch = base.pitch;
  }
  p.codes = codes.data;
  p.scales = scales.data;
  p.y = y.data;
  p.codes_pitch = codes.pitch;
  p.scales_pitch = scales.pitch;
  p.y_pitch = y.pitch;
  p.columns = static_cast<int>(y.cols());
  p.start = range.start;
  p.stop = range.stop;
  p.block = static_cast<int>(block);
  p.format = codes.dtype == DType::kE2M1 ? kE2M1Codes : kE4M3Codes;
  p.element = element_of(site, y);
  p.wide_scales = scales.dtype == DType::kF32;
  return {site.launch("dequantize", row_count(site, y), 256, p)};
}

}  // namespace

void add_quantize_kernels(DeviceRegistry& all) {
  all["sm80.quantize"] = {"quantize(x; fmt: str, block: int, dims: ints) -> (, scale)", quantize};
  all["sm80.quantize_static"] = {"quantize_static(x, fixed; fmt: str, block: int) -> ()", quantize_static};
  all["sm80.dequantize"] = {"dequantize(codes, scale, base?; block: int, out: str, dims: ints) -> ()", dequantize};
}

}  // namespace rewright
