#include "../kernels/keys/keys.h"

#include "families.h"
#include "shapes.h"

namespace rewright {

namespace {

// What both ops have in common; the rows go to `y`.
KvParams kv_params(const DeviceSite& site, const Tensor& y) {
  const Tensor& x = site.required(0);
  require_tokens(site, x);
  require_step_vector(site, site.operand(4), site.step->pos);
  require_groups(site, {&x}, 2);
  KvParams p{};
  p.x = x.data;
  p.y = y.data;
  p.form = row_form(site, x.cols(), x.dtype, site.operand(1), site.operand(2), site.operand(3), y);
  p.pos = site.step->pos;
  p.n_valid = site.step->n_valid;
  p.slot = site.step->slot;
  p.x_pitch = x.pitch;
  p.y_pitch = y.pitch;
  p.tokens = site.step->tokens;
  return p;
}

std::vector<DeviceLaunch> kv_rows(DeviceSite& site) {
  const Tensor& y = site.result(0);
  const KvParams p = kv_params(site, y);
  site.require(y.shape == site.required(0).shape, "the rows do not fit");
  return {site.launch("kv_rows", row_count(site, y), 256, p)};
}

std::vector<DeviceLaunch> kv_write(DeviceSite& site) {
  const Tensor& window = site.required(7);
  require_step_vector(site, site.operand(5), site.step->n_valid);
  require_step_vector(site, site.operand(6), site.step->slot);
  require_state(site, window, site.result(0));
  row_count(site, window);
  KvParams p = kv_params(site, window);
  p.slots = static_cast<int>(window.dim(0));
  p.window = static_cast<int>(window.dim(1));
  return {site.launch("kv_write", row_count(site, site.required(0)), 256, p)};
}

}  // namespace

void add_key_kernels(DeviceRegistry& all) {
  all["sm80.kv_rows"] = {
      "kv_rows(x, weight, cos, sin, pos; eps: float, fmt: str, block: int, dims: ints, out: str) -> ()", kv_rows};
  all["sm80.kv_write"] = {
      "kv_write(x, weight, cos, sin, pos, n_valid, slot, window; eps: float, fmt: str, block: int, dims: ints, "
      "out: str, window_rows: str) -> ()",
      kv_write};
}

}  // namespace rewright
