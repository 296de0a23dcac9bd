#include "../kernels/rope/rope.h"

#include <cmath>

#include "families.h"
#include "shapes.h"

namespace rewright {

namespace {

constexpr int64_t kMostStride = int64_t{1} << 31;  // products with positions cannot overflow
constexpr int64_t kMostRotated = 512;              // elements of a row in shared memory

std::vector<DeviceLaunch> rope(DeviceSite& site) {
  const Tensor &x = site.required(0), &y = site.result(0);
  require_step_vector(site, site.operand(3), site.step->pos);
  site.require(x.rank() >= 3 && x.dim(0) == site.step->batch, "x is not [B,T,..,d]");
  site.require(y.dtype == x.dtype && y.shape == x.shape, "x and its turned form differ in type");
  require_groups(site, {&x, &y}, 2);
  RopeParams p{};
  p.x = x.data;
  p.y = y.data;
  p.table = rope_table(site, site.operand(1), site.operand(2), x.cols());
  p.pos = site.step->pos;
  p.x_pitch = x.pitch;
  p.y_pitch = y.pitch;
  p.stride = site.integer("stride", 1);
  site.require(1 <= p.stride && p.stride <= kMostStride, "the stride is out of range");
  p.rows = row_count(site, x);
  p.tokens = static_cast<int>(x.dim(1));
  p.inner = static_cast<int>(p.rows / (x.dim(0) * x.dim(1)));
  p.columns = static_cast<int>(x.cols());
  p.element = element_of(site, x);
  p.inverse = site.flag("inverse", false);
  return {site.launch("rope", blocks_of(p.rows, 8), 256, p)};
}

std::vector<DeviceLaunch> hadamard(DeviceSite& site) {
  const Tensor &x = site.required(0), &y = site.result(0);
  site.require(y.dtype == x.dtype && y.shape == x.shape, "x and its rotated form differ in type");
  HadamardParams p{};
  p.x = x.data;
  p.y = y.data;
  p.x_pitch = x.pitch;
  p.y_pitch = y.pitch;
  p.rows = row_count(site, x);
  site.require(x.cols() <= kMostRotated && (x.cols() & (x.cols() - 1)) == 0, "rows are no power of two up to 512");
  p.columns = static_cast<int>(x.cols());
  p.element = element_of(site, x);
  p.scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(x.cols())));
  return {site.launch("hadamard", blocks_of(p.rows, 4), 128, p)};
}

}  // namespace

void add_rope_kernels(DeviceRegistry& all) {
  all["sm80.rope"] = {"rope(x, cos, sin, pos; stride: int, inverse: bool) -> ()", rope};
  all["sm80.hadamard"] = {"hadamard(x) -> ()", hadamard};
}

}  // namespace rewright
