#include "../kernels/hyper_connection/split.h"
#include "../kernels/hyper_connection/streams.h"
#include "families.h"
#include "shapes.h"

namespace rewright {

namespace {

const Tensor& require_streams(const DeviceSite& site, const Tensor& x) {
  site.require(x && x.rank() == 4 && x.dim(2) <= kMostStreams, "streams are not [B,T,n,D] with n up to 8");
  require_groups(site, {&x}, 4);
  row_count(site, x);
  return x;
}

int tokens_of(const Tensor& tensor) { return static_cast<int>(tensor.dim(0) * tensor.dim(1)); }

// Logits row by row: kernels of one op take no partial sums.
const Tensor& require_logits(const DeviceSite& site, const Tensor& mix) {
  site.require(mix && mix.dtype == DType::kF32 && mix.rank() == 3, "mix is not f32[B,T,M]");
  site.require(mix.layout.empty(), "mix lies as " + mix.layout + ", which a kernel of this op alone does not add up");
  row_count(site, mix);
  return mix;
}

std::vector<DeviceLaunch> hc_expand(DeviceSite& site) {
  const Tensor &x = site.required(0), &y = require_streams(site, site.result(0));
  site.require(x.rank() == 3 && site.integer("streams") == y.dim(2), "x is not [B,T,D], or streams are not as many");
  require_type(site, y, x.dtype, {x.dim(0), x.dim(1), y.dim(2), x.dim(2)}, "the result");
  require_groups(site, {&x}, 4);
  HcExpandParams p{};
  p.x = x.data;
  p.y = y.data;
  p.x_pitch = x.pitch;
  p.y_pitch = y.pitch;
  p.streams = static_cast<int>(y.dim(2));
  p.columns = static_cast<int>(x.cols());
  p.element = element_of(site, x);
  return {site.launch("hc_expand", tokens_of(y), 256, p)};
}

std::vector<DeviceLaunch> hc_mix(DeviceSite& site) {
  const Tensor &x = require_streams(site, site.operand(0)), &fn = site.required(1), &y = site.result(0);
  site.require(y.layout.empty(), "logits cannot leave this kernel as " + y.layout);
  site.require(fn.rank() == 2 && fn.cols() == x.dim(2) * x.dim(3) && fn.dim(0) <= kMostLogits,
               "fn is not [M,nD] with M up to 24");
  require_type(site, y, DType::kF32, {x.dim(0), x.dim(1), fn.dim(0)}, "the result");
  require_groups(site, {&fn}, 4);
  HcMixParams p{};
  p.x = x.data;
  p.fn = fn.data;
  p.y = static_cast<float*>(y.data);
  p.x_pitch = x.pitch;
  p.fn_pitch = fn.pitch;
  p.y_pitch = y.pitch;
  p.streams = static_cast<int>(x.dim(2));
  p.columns = static_cast<int>(x.cols());
  p.logits = static_cast<int>(fn.dim(0));
  p.element = element_of(site, x);
  p.fn_element = element_of(site, fn);
  p.eps = static_cast<float>(site.number("eps"));
  return {site.launch("hc_mix", tokens_of(x), 256, p)};
}

std::vector<DeviceLaunch> hc_split(DeviceSite& site) {
  const Tensor &mix = require_logits(site, site.operand(0)), &scale = site.required(1), &base = site.required(2);
  const Tensor &pre = site.result(0), &post = site.result(1), &comb = site.result(2);
  const int64_t n = site.integer("streams"), iters = site.integer("iters");
  site.require(1 <= n && n <= kMostSplitStreams && mix.cols() == (2 + n) * n, "there are 1 to 5 streams");
  site.require(0 <= iters && iters <= 1024, "iters is out of range");
  require_vector(site, scale, 3, "scale");
  require_vector(site, base, mix.cols(), "base");
  require_type(site, pre, DType::kF32, {mix.dim(0), mix.dim(1), n}, "pre");
  require_type(site, post, DType::kF32, {mix.dim(0), mix.dim(1), n}, "post");
  require_type(site, comb, DType::kF32, {mix.dim(0), mix.dim(1), n, n}, "comb");
  HcSplitParams p{};
  p.mix = static_cast<const float*>(mix.data);
  p.scale = scale.data;
  p.base = base.data;
  p.pre = static_cast<float*>(pre.data);
  p.post = static_cast<float*>(post.data);
  p.comb = static_cast<float*>(comb.data);
  p.mix_pitch = mix.pitch;
  p.pre_pitch = pre.pitch;
  p.post_pitch = post.pitch;
  p.comb_pitch = comb.pitch;
  p.rows = tokens_of(mix);
  p.streams = static_cast<int>(n);
  p.iters = static_cast<int>(iters);
  p.scale_element = element_of(site, scale);
  p.base_element = element_of(site, base);
  p.eps = static_cast<float>(site.number("eps"));
  return {site.launch("hc_split", blocks_of(p.rows, 4), 128, p)};
}

std::vector<DeviceLaunch> hc_head_split(DeviceSite& site) {
  const Tensor &mix = require_logits(site, site.operand(0)), &scale = site.required(1), &base = site.required(2);
  const Tensor& y = site.result(0);
  require_vector(site, scale, 1, "scale");
  require_vector(site, base, mix.cols(), "base");
  require_type(site, y, DType::kF32, mix.shape, "the result");
  HcHeadSplitParams p{};
  p.mix = static_cast<const float*>(mix.data);
  p.scale = scale.data;
  p.base = base.data;
  p.y = static_cast<float*>(y.data);
  p.mix_pitch = mix.pitch;
  p.y_pitch = y.pitch;
  p.rows = tokens_of(mix);
  p.streams = static_cast<int>(mix.cols());
  p.scale_element = element_of(site, scale);
  p.base_element = element_of(site, base);
  p.eps = static_cast<float>(site.number("eps"));
  return {site.launch("hc_head_split", blocks_of(mix.count(), 128), 128, p)};
}

std::vector<DeviceLaunch> hc_collapse(DeviceSite& site) {
  const Tensor &x = require_streams(site, site.operand(0)), &pre = site.required(1), &y = site.result(0);
  require_type(site, pre, DType::kF32, {x.dim(0), x.dim(1), x.dim(2)}, "pre");
  require_type(site, y, x.dtype, {x.dim(0), x.dim(1), x.dim(3)}, "the result");
  require_groups(site, {&y}, 4);
  HcCollapseParams p{};
  p.x = x.data;
  p.pre = static_cast<const float*>(pre.data);
  p.y = y.data;
  p.x_pitch = x.pitch;
  p.pre_pitch = pre.pitch;
  p.y_pitch = y.pitch;
  p.streams = static_cast<int>(x.dim(2));
  p.columns = static_cast<int>(x.cols());
  p.element = element_of(site, x);
  p.parts = parts_of(y);
  return {site.launch("hc_collapse", tokens_of(x) * p.parts, 256, p)};
}

std::vector<DeviceLaunch> hc_combine(DeviceSite& site) {
  const Tensor &y = site.required(0), &x = require_streams(site, site.operand(1)), &out = site.result(0);
  const Tensor &post = site.required(2), &comb = site.required(3);
  const int64_t b = x.dim(0), t = x.dim(1), n = x.dim(2);
  site.require(y.shape == std::vector<int64_t>{b, t, x.dim(3)}, "y and the streams disagree");
  require_type(site, post, DType::kF32, {b, t, n}, "post");
  require_type(site, comb, DType::kF32, {b, t, n, n}, "comb");
  require_type(site, out, x.dtype, x.shape, "the result");
  require_groups(site, {&y, &out}, 4);
  HcCombineParams p{};
  p.y = y.data;
  p.x = x.data;
  p.post = static_cast<const float*>(post.data);
  p.comb = static_cast<const float*>(comb.data);
  p.out = out.data;
  p.y_pitch = y.pitch;
  p.x_pitch = x.pitch;
  p.post_pitch = post.pitch;
  p.comb_pitch = comb.pitch;
  p.out_pitch = out.pitch;
  p.streams = static_cast<int>(n);
  p.columns = static_cast<int>(x.cols());
  p.y_element = element_of(site, y);
  p.element = element_of(site, x);
  p.parts = parts_of(y);
  return {site.launch("hc_combine", tokens_of(x) * p.parts, 256, p)};
}

}  // namespace

void add_hyper_connection_kernels(DeviceRegistry& all) {
  all["sm80.hc_expand"] = {"hc_expand(x; streams: int) -> ()", hc_expand};
  all["sm80.hc_mix"] = {"hc_mix(streams, fn; eps: float) -> ()", hc_mix};
  all["sm80.hc_split"] = {"hc_split(mix, scale, base; streams: int, iters: int, eps: float) -> (pre, post, comb)",
                          hc_split};
  all["sm80.hc_head_split"] = {"hc_head_split(mix, scale, base; eps: float) -> ()", hc_head_split};
  all["sm80.hc_collapse"] = {"hc_collapse(streams, pre) -> ()", hc_collapse};
  all["sm80.hc_combine"] = {"hc_combine(y, streams, post, comb) -> ()", hc_combine};
}

}  // namespace rewright
