#include "../kernels/rows/rows.h"

#include <limits>

#include "families.h"
#include "shapes.h"

namespace rewright {

namespace {

std::vector<DeviceLaunch> embed(DeviceSite& site) {
  const Tensor &tokens = site.required(0), &weight = site.required(1), &y = site.result(0);
  site.require(tokens.dtype == DType::kI32 && tokens.rank() == 2, "tokens are not i32[B,T]");
  site.require(weight.rank() == 2 && weight.dim(0) <= std::numeric_limits<int>::max(), "the table is not [V,D]");
  require_type(site, y, activation_dtype(site, site.text("out", "")), {tokens.dim(0), tokens.dim(1), weight.dim(1)},
               "the result");
  require_groups(site, {&weight, &y}, 4);
  EmbedParams p{};
  p.tokens = static_cast<const int*>(tokens.data);
  p.weight = weight.data;
  p.y = y.data;
  p.tokens_pitch = tokens.pitch;
  p.weight_pitch = weight.pitch;
  p.y_pitch = y.pitch;
  p.per_batch = static_cast<int>(tokens.dim(1));
  p.vocabulary = row_count(site, weight);
  p.columns = static_cast<int>(y.cols());
  p.weight_element = element_of(site, weight);
  p.element = element_of(site, y);
  return {site.launch("embed", row_count(site, y), 256, p)};
}

std::vector<DeviceLaunch> take_last(DeviceSite& site) {
  const Tensor &x = site.required(0), &y = site.result(0);
  require_step_vector(site, site.operand(1), site.step->n_valid);
  site.require(x.rank() >= 3 && x.dim(0) == site.step->batch, "x is not [B,T,..,D]");
  std::vector<int64_t> shape = x.shape;
  shape.erase(shape.begin() + 1);
  require_type(site, y, x.dtype, shape, "the result");
  TakeLastParams p{};
  p.x = x.data;
  p.n_valid = site.step->n_valid;
  p.y = y.data;
  p.x_pitch = x.pitch;
  p.y_pitch = y.pitch;
  p.bytes = row_bytes(site, x);
  p.tokens = static_cast<int>(x.dim(1));
  p.inner = static_cast<int>(row_count(site, y) / y.dim(0));
  p.unit = copy_unit(site, y, x);
  return {site.launch("take_last", row_count(site, y), 256, p)};
}

std::vector<DeviceLaunch> add(DeviceSite& site) {
  const Tensor &x = site.required(0), &y = site.required(1), &sum = site.result(0);
  require_type(site, y, x.dtype, x.shape, "y");
  require_type(site, sum, x.dtype, x.shape, "the sum");
  require_groups(site, {&x, &y, &sum}, 4);
  AddParams p{};
  p.x = x.data;
  p.y = y.data;
  p.sum = sum.data;
  p.x_pitch = x.pitch;
  p.y_pitch = y.pitch;
  p.sum_pitch = sum.pitch;
  p.columns = static_cast<int>(x.cols());
  p.element = element_of(site, x);
  return {site.launch("add", row_count(site, x), 256, p)};
}

std::vector<DeviceLaunch> reshape(DeviceSite& site) {
  const Tensor &x = site.required(0), &y = site.result(0);
  site.require(y.dtype == x.dtype && y.count() == x.count() && x.count() > 0, "x and the result differ in size");
  ReshapeParams p{};
  p.x = x.data;
  p.y = y.data;
  p.x_pitch = x.pitch;
  p.y_pitch = y.pitch;
  p.unit = copy_unit(site, y, x);
  p.x_words = row_bytes(site, x) / p.unit;
  p.y_words = row_bytes(site, y) / p.unit;
  p.words = x.rows() * p.x_words;
  site.require(p.words <= std::numeric_limits<int>::max() * int64_t{256}, "x is too large");
  return {site.launch("reshape", blocks_of(p.words, 256), 256, p)};
}

}  // namespace

void add_row_kernels(DeviceRegistry& all) {
  all["sm80.embed"] = {"embed(tokens, weight; out: str) -> ()", embed};
  all["sm80.take_last"] = {"take_last(x, n_valid) -> ()", take_last};
  all["sm80.add"] = {"add(x, y) -> ()", add};
  all["sm80.reshape"] = {"reshape(x; tail: ints, keep: int) -> ()", reshape};
}

}  // namespace rewright
