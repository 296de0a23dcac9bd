#include "../kernels/norm/norm.h"

#include "families.h"
#include "shapes.h"

namespace rewright {

namespace {

std::vector<DeviceLaunch> rms_norm(DeviceSite& site) {
  const Tensor &x = site.required(0), &weight = site.required(1), &y = site.result(0);
  site.require(y.dtype == x.dtype && y.shape == x.shape, "x and its norm differ in type");
  require_vector(site, weight, x.cols(), "the norm's weight");
  require_groups(site, {&x, &weight, &y}, 2);
  RmsNormParams p{};
  p.x = x.data;
  p.weight = weight.data;
  p.y = y.data;
  p.x_pitch = x.pitch;
  p.y_pitch = y.pitch;
  p.columns = static_cast<int>(x.cols());
  p.element = element_of(site, x);
  p.weight_element = element_of(site, weight);
  p.eps = static_cast<float>(site.number("eps"));
  return {site.launch("rms_norm", row_count(site, x), 256, p)};
}

std::vector<DeviceLaunch> head_rms_norm(DeviceSite& site) {
  const Tensor &x = site.required(0), &y = site.result(0);
  site.require(y.dtype == x.dtype && y.shape == x.shape, "x and its norm differ in type");
  require_groups(site, {&x, &y}, 2);
  HeadRmsNormParams p{};
  p.x = x.data;
  p.y = y.data;
  p.x_pitch = x.pitch;
  p.y_pitch = y.pitch;
  p.rows = row_count(site, x);
  p.columns = static_cast<int>(x.cols());
  p.element = element_of(site, x);
  p.eps = static_cast<float>(site.number("eps"));
  p.n_valid = site.step->n_valid;
  p.per_sequence = p.rows / site.step->batch;
  p.heads = p.per_sequence / site.step->tokens;
  return {site.launch("head_rms_norm", blocks_of(p.rows, 8), 256, p)};
}

}  // namespace

void add_norm_kernels(DeviceRegistry& all) {
  all["sm80.rms_norm"] = {"rms_norm(x, weight; eps: float) -> ()", rms_norm};
  all["sm80.head_rms_norm"] = {"head_rms_norm(x; eps: float) -> ()", head_rms_norm};
}

}  // namespace rewright
