#include "../kernels/norm/norm.h"

#include "families.h"

namespace rewright {

namespace {

std::vector<DeviceLaunch> rms_norm(DeviceSite& site) {
  const Tensor &x = site.required(0), &weight = site.required(1), &y = site.result(0);
  site.require(y.dtype == x.dtype && y.shape == x.shape, "x and its norm differ in type");
  site.require(weight.rank() == 1 && weight.count() == x.cols(), "the norm's weight does not fit");
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
  return {site.launch("rms_norm", static_cast<unsigned>(x.rows()), 256, p)};
}

}  // namespace

void add_norm_kernels(DeviceRegistry& all) {
  all["sm80.rms_norm"] = {"rms_norm(x, weight; eps: float) -> ()", rms_norm};
}

}  // namespace rewright
