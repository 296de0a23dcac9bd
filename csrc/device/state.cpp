#include "../kernels/state/state.h"

#include "families.h"
#include "shapes.h"

namespace rewright {

namespace {

std::vector<DeviceLaunch> ring_write(DeviceSite& site) {
  const Tensor &ring = site.required(0), &rows = site.required(1);
  require_state(site, ring, site.result(0));
  require_tokens(site, rows);
  require_step_vector(site, site.operand(2), site.step->pos);
  require_step_vector(site, site.operand(3), site.step->n_valid);
  require_step_vector(site, site.operand(4), site.step->slot);
  site.require(ring.dtype == rows.dtype && ring.cols() == rows.cols(), "the ring cannot hold the rows");
  row_count(site, ring);
  RingWriteParams p{};
  p.rows = rows.data;
  p.ring = ring.data;
  p.pos = site.step->pos;
  p.n_valid = site.step->n_valid;
  p.slot = site.step->slot;
  p.rows_pitch = rows.pitch;
  p.ring_pitch = ring.pitch;
  p.bytes = row_bytes(site, rows);
  p.tokens = site.step->tokens;
  p.slots = static_cast<int>(ring.dim(0));
  p.size = static_cast<int>(ring.dim(1));
  p.unit = copy_unit(site, ring, rows);
  return {site.launch("ring_write", row_count(site, rows), 128, p)};
}

std::vector<DeviceLaunch> entry_write(DeviceSite& site) {
  const Tensor &cache = site.required(0), &entries = site.required(1), &count = site.required(2);
  require_state(site, cache, site.result(0));
  require_type(site, count, DType::kI32, {site.step->batch}, "the count");
  require_step_vector(site, site.operand(3), site.step->pos);
  require_step_vector(site, site.operand(4), site.step->slot);
  site.require(entries.rank() == 3 && entries.dim(0) == site.step->batch, "the entries are not [B,C,c]");
  site.require(cache.dtype == entries.dtype && cache.cols() == entries.cols(), "the cache cannot hold the entries");
  const int64_t ratio = site.integer("ratio");
  site.require(0 < ratio && ratio < int64_t{1} << 31, "the ratio is out of range");
  row_count(site, cache);
  EntryWriteParams p{};
  p.entries = entries.data;
  p.cache = cache.data;
  p.count = static_cast<const int*>(count.data);
  p.pos = site.step->pos;
  p.n_valid = site.step->n_valid;
  p.slot = site.step->slot;
  p.entries_pitch = entries.pitch;
  p.cache_pitch = cache.pitch;
  p.bytes = row_bytes(site, entries);
  p.candidates = static_cast<int>(entries.dim(1));
  p.ratio = static_cast<int>(ratio);
  p.slots = static_cast<int>(cache.dim(0));
  p.size = static_cast<int>(cache.dim(1));
  p.unit = copy_unit(site, cache, entries);
  return {site.launch("entry_write", row_count(site, entries), 128, p)};
}

}  // namespace

void add_state_kernels(DeviceRegistry& all) {
  all["sm80.ring_write"] = {"ring_write(ring, rows, pos, n_valid, slot; ring_rows: str) -> ()", ring_write};
  all["sm80.entry_write"] = {"entry_write(cache, entries, count, pos, slot; ratio: int, cache_rows: str) -> ()", entry_write};
}

}  // namespace rewright
