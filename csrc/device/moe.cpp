#include "../kernels/moe/expert_sum.h"
#include "../kernels/moe/route.h"
#include "../kernels/moe/swiglu.h"
#include "families.h"
#include "shapes.h"

namespace rewright {

namespace {

// What both choices have in common: logits, n_valid and results for k experts of a token.
RouteParams route_params(const DeviceSite& site, const Tensor& n_valid, int64_t k) {
  const Tensor &logits = site.required(0), &chosen = site.result(0), &weights = site.result(1);
  require_tokens(site, logits);
  require_step_vector(site, n_valid, site.step->n_valid);
  site.require(logits.dtype == DType::kF32 && logits.cols() <= kMostExperts, "logits are not f32 for up to 384 experts");
  site.require(0 < k && k <= kMostChosen, "a token has 1 to 8 experts");
  require_type(site, chosen, DType::kI32, {logits.dim(0), logits.dim(1), k}, "experts");
  require_type(site, weights, DType::kF32, chosen.shape, "weights");
  RouteParams p{};
  p.logits = static_cast<const float*>(logits.data);
  p.n_valid = site.step->n_valid;
  p.chosen = static_cast<int*>(chosen.data);
  p.weights = static_cast<float*>(weights.data);
  p.logits_pitch = logits.pitch;
  p.chosen_pitch = chosen.pitch;
  p.weights_pitch = weights.pitch;
  p.rows = row_count(site, logits);
  p.tokens = site.step->tokens;
  p.experts = static_cast<int>(logits.cols());
  p.k = static_cast<int>(k);
  p.scale = static_cast<float>(site.number("scale"));
  return p;
}

std::vector<DeviceLaunch> route(DeviceSite& site) {
  const Tensor& bias = site.required(1);
  RouteParams p = route_params(site, site.operand(2), site.integer("k"));
  require_vector(site, bias, p.experts, "the bias");
  site.require(p.k <= p.experts, "more choices than experts");
  p.bias = bias.data;
  p.bias_element = element_of(site, bias);
  return {site.launch("route", blocks_of(p.rows, 4), 128, p)};
}

std::vector<DeviceLaunch> route_hash(DeviceSite& site) {
  const Tensor &table = site.required(1), &ids = site.required(2);
  site.require((table.dtype == DType::kI64 || table.dtype == DType::kI32) && table.rank() == 2, "the table is not int[V,k]");
  require_type(site, ids, DType::kI32, {site.step->batch, site.step->tokens}, "tokens");
  RouteParams p = route_params(site, site.operand(3), table.dim(1));
  p.table = table.data;
  p.table_pitch = table.pitch;
  p.vocabulary = row_count(site, table);
  p.wide_ids = table.dtype == DType::kI64;
  p.ids = static_cast<const int*>(ids.data);
  p.ids_pitch = ids.pitch;
  return {site.launch("route_hash", blocks_of(p.rows, 4), 128, p)};
}

std::vector<DeviceLaunch> swiglu(DeviceSite& site) {
  const Tensor &gate = site.required(0), &up = site.required(1), &weights = site.operand(2), &y = site.result(0);
  require_type(site, up, gate.dtype, gate.shape, "up");
  require_type(site, y, gate.dtype, gate.shape, "the result");
  require_groups(site, {&gate, &up, &y}, 4);
  SwigluParams p{};
  p.per = 1;
  if (weights) {
    site.require(gate.rank() >= 2, "gate has no rows");
    require_type(site, weights, DType::kF32, {gate.shape.begin(), gate.shape.end() - 1}, "weights");
    p.weights = static_cast<const float*>(weights.data);
    p.weights_pitch = weights.pitch;
    p.per = static_cast<int>(weights.cols());
  }
  p.gate = gate.data;
  p.up = up.data;
  p.y = y.data;
  p.gate_pitch = gate.pitch;
  p.up_pitch = up.pitch;
  p.y_pitch = y.pitch;
  p.columns = static_cast<int>(gate.cols());
  p.element = element_of(site, gate);
  p.parts = parts_of(gate);
  p.limit = static_cast<float>(site.number("limit"));
  return {site.launch("swiglu", static_cast<unsigned>(row_count(site, gate)) * p.parts, 256, p)};
}

std::vector<DeviceLaunch> expert_sum(DeviceSite& site) {
  const Tensor &routed = site.required(0), &experts = site.required(1), &shared = site.required(2), &y = site.result(0);
  site.require(experts.dtype == DType::kI32 && experts.rank() == 3, "experts is not i32[B,T,k]");
  const int64_t b = experts.dim(0), t = experts.dim(1), k = experts.dim(2), columns = shared.cols();
  site.require(0 < k && k <= kMostSummed, "a token has 1 to 8 experts");
  site.require(routed.shape == std::vector<int64_t>{b, t, k, columns}, "routed rows and experts disagree");
  site.require(shared.shape == std::vector<int64_t>{b, t, columns}, "the shared rows and experts disagree");
  require_type(site, y, shared.dtype, shared.shape, "the sum");
  require_groups(site, {&routed, &shared, &y}, 4);
  ExpertSumParams p{};
  p.routed = routed.data;
  p.experts = static_cast<const int*>(experts.data);
  p.shared = shared.data;
  p.y = y.data;
  p.routed_pitch = routed.pitch;
  p.experts_pitch = experts.pitch;
  p.shared_pitch = shared.pitch;
  p.y_pitch = y.pitch;
  p.k = static_cast<int>(k);
  p.columns = static_cast<int>(columns);
  p.routed_element = element_of(site, routed);
  p.element = element_of(site, shared);
  p.parts = parts_of(y);
  return {site.launch("expert_sum", static_cast<unsigned>(row_count(site, y)) * p.parts, 256, p)};
}

}  // namespace

void add_moe_kernels(DeviceRegistry& all) {
  all["sm80.route"] = {"route(logits, bias, n_valid; k: int, scale: float) -> (experts, weights)", route};
  all["sm80.route_hash"] = {"route_hash(logits, table, tokens, n_valid; scale: float) -> (experts, weights)",
                            route_hash};
  all["sm80.swiglu"] = {"swiglu(gate, up, weights?; limit: float) -> ()", swiglu};
  all["sm80.expert_sum"] = {"expert_sum(routed, experts, shared) -> ()", expert_sum};
}

}  // namespace rewright
