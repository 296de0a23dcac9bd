#include "../kernels/compress/compress.h"

#include "families.h"
#include "shapes.h"

namespace rewright {

namespace {

std::vector<DeviceLaunch> add_position_bias(DeviceSite& site) {
  const Tensor &gate = site.required(0), &ape = site.required(1), &y = site.result(0);
  require_tokens(site, gate);
  require_step_vector(site, site.operand(2), site.step->pos);
  site.require(gate.dtype == DType::kF32, "gate scores are not f32");
  require_type(site, y, DType::kF32, gate.shape, "the result");
  site.require(ape.rank() == 2 && ape.cols() == gate.cols(), "the position bias does not fit");
  AddPositionBiasParams p{};
  p.gate = static_cast<const float*>(gate.data);
  p.ape = ape.data;
  p.y = static_cast<float*>(y.data);
  p.pos = site.step->pos;
  p.gate_pitch = gate.pitch;
  p.ape_pitch = ape.pitch;
  p.y_pitch = y.pitch;
  p.tokens = site.step->tokens;
  p.columns = static_cast<int>(gate.cols());
  p.ratio = row_count(site, ape);
  p.ape_element = element_of(site, ape);
  return {site.launch("add_position_bias", row_count(site, gate), 256, p)};
}

PoolParams pool_params(const DeviceSite& site, const Tensor& kv, const Tensor& gate, const Tensor& kv_ring,
                       const Tensor& gate_ring) {
  require_tokens(site, kv);
  require_type(site, gate, kv.dtype, kv.shape, "gate");
  site.require(kv.dtype == DType::kF32, "kv and gate are not f32");
  site.require(kv_ring && kv_ring.dtype == DType::kF32 && kv_ring.rank() == 3 && kv_ring.cols() == kv.cols(),
               "a ring cannot hold the rows");
  require_type(site, gate_ring, DType::kF32, kv_ring.shape, "a ring");
  require_groups(site, {&kv, &gate, &kv_ring, &gate_ring}, 2);
  const bool overlap = site.flag("overlap", false);
  const int64_t ratio = site.integer("ratio"), parts = overlap ? 2 : 1;
  row_count(site, kv_ring);
  site.require(0 < ratio && ratio <= kv_ring.dim(1) / parts, "a ring holds less than its windows");
  site.require(kv.cols() % (2 * parts) == 0, "rows have no halves of whole pairs");
  PoolParams p{};
  p.kv = static_cast<const float*>(kv.data);
  p.gate = static_cast<const float*>(gate.data);
  p.kv_ring = static_cast<float*>(kv_ring.data);
  p.gate_ring = static_cast<float*>(gate_ring.data);
  p.pos = site.step->pos;
  p.n_valid = site.step->n_valid;
  p.slot = site.step->slot;
  p.kv_pitch = kv.pitch;
  p.gate_pitch = gate.pitch;
  p.kv_ring_pitch = kv_ring.pitch;
  p.gate_ring_pitch = gate_ring.pitch;
  p.tokens = site.step->tokens;
  p.ratio = static_cast<int>(ratio);
  p.candidates = (p.tokens + p.ratio - 1) / p.ratio;
  p.slots = static_cast<int>(kv_ring.dim(0));
  p.ring = static_cast<int>(kv_ring.dim(1));
  p.window = static_cast<int>(parts) * p.ratio;
  p.width = static_cast<int>(kv.cols());
  p.channels = p.width / static_cast<int>(parts);
  return p;
}

std::vector<DeviceLaunch> compress(DeviceSite& site) {
  const Tensor &entries = site.result(0), &count = site.result(1);
  require_step_vector(site, site.operand(4), site.step->pos);
  require_step_vector(site, site.operand(5), site.step->n_valid);
  require_step_vector(site, site.operand(6), site.step->slot);
  CompressParams p{};
  p.pool = pool_params(site, site.required(0), site.required(1), site.required(2), site.required(3));
  require_type(site, entries, activation_dtype(site, site.text("out", "")),
               {site.step->batch, p.pool.candidates, p.pool.channels}, "entries");
  require_type(site, count, DType::kI32, {site.step->batch}, "the count");
  require_groups(site, {&entries}, 2);
  p.entries = entries.data;
  p.count = static_cast<int*>(count.data);
  p.entries_pitch = entries.pitch;
  p.element = element_of(site, entries);
  return {site.launch("compress", row_count(site, entries), 256, p)};
}

std::vector<DeviceLaunch> compress_write(DeviceSite& site) {
  const Tensor &ape = site.required(2), &cache = site.required(5);
  require_step_vector(site, site.operand(9), site.step->pos);
  require_step_vector(site, site.operand(10), site.step->n_valid);
  require_step_vector(site, site.operand(11), site.step->slot);
  for (size_t i = 0; i < 3; ++i) require_state(site, site.operand(3 + i), site.result(i));
  CompressWriteParams p{};
  p.pool = pool_params(site, site.required(0), site.required(1), site.required(3), site.required(4));
  site.require(ape.rank() == 2 && ape.dim(0) == p.pool.ratio && ape.cols() == p.pool.width, "the position bias does not fit");
  require_groups(site, {&ape}, 2);
  p.pool.ape = ape.data;
  p.pool.ape_pitch = ape.pitch;
  p.pool.ape_element = element_of(site, ape);
  p.form = row_form(site, p.pool.channels, activation_dtype(site, site.text("pooled", "")), site.operand(6),
                    site.operand(7), site.operand(8), cache);
  row_count(site, cache);
  p.cache = cache.data;
  p.cache_pitch = cache.pitch;
  p.entries = static_cast<int>(cache.dim(1));
  const unsigned batch = site.step->batch;
  if (p.pool.candidates == 1) return {site.launch("compress_write", batch, 256, p)};
  return {site.launch("compress_write_entries", batch * p.pool.candidates, 256, p),
          site.launch("compress_write_rows", batch * p.pool.tokens, 256, p)};
}

}  // namespace

void add_compress_kernels(DeviceRegistry& all) {
  all["sm80.add_position_bias"] = {"add_position_bias(gate, ape, pos) -> ()", add_position_bias};
  all["sm80.compress"] = {
      "compress(kv, gate, kv_ring, gate_ring, pos, n_valid, slot; ratio: int, overlap: bool, out: str) -> (, count)",
      compress};
  all["sm80.compress_write"] = {
      "compress_write(kv, gate, ape, kv_ring, gate_ring, cache, norm, cos, sin, pos, n_valid, slot; ratio: int, "
      "overlap: bool, pooled: str, eps: float, rotate: bool, fmt: str, block: int, dims: ints, out: str, "
      "cache_rows: str) -> "
      "(kv_ring, gate_ring, cache)",
      compress_write};
}

}  // namespace rewright
