// Writes of decode state.
//
// host.ring_write: the last rows of a chunk at their position modulo the ring's size. host.entry_write: a
// chunk's finished entries behind those that the cache holds. Both write the state in place and leave the
// slots of masked sequences alone. Bound by memory: what is stored is read and written once.
#include "families.h"
#include "rows.h"
#include "state_rows.h"
#include "step_vectors.h"

namespace rewright {
namespace {

class RingWrite : public Kernel {
 public:
  explicit RingWrite(CallSite& site)
      : step_(site.step), rows_(site.required(1)), tokens_(step_, rows_) {
    require_state(site, site.operand(0), site.result(0));
    require_tokens(site, rows_);
    require_step_vector(site, site.operand(2), step_->pos);
    require_step_vector(site, site.operand(3), step_->n_valid);
    require_step_vector(site, site.operand(4), step_->slot);
    ring_ = StateRows(site, site.operand(0), site.text("ring_rows", ""), rows_.cols(), rows_.dtype,
                      "the ring cannot hold the rows");
  }

  size_t scratch_bytes() const override { return ring_.packed() ? rows_.cols() * sizeof(float) : 0; }

  void run(Worker& worker) override {
    const Range share = worker.share(tokens_.count());
    for (int64_t i = share.begin; i < share.end; ++i) {
      const TokenRows::Group at = tokens_.at(i);
      if (at.token < ring_.first_kept(step_->n_valid[at.batch])) continue;
      const int64_t position = int64_t{step_->pos[at.batch]} + at.token;
      ring_.copy(step_->slot[at.batch], position % ring_.size(), rows_, at.row, worker.scratch());
    }
  }

 private:
  const Step* step_;
  Tensor rows_;
  StateRows ring_;
  TokenRows tokens_;
};

class EntryWrite : public Kernel {
 public:
  explicit EntryWrite(CallSite& site)
      : step_(site.step),
        entries_(site.required(1)),
        count_(site.required(2)),
        ratio_(site.integer("ratio")) {
    require_state(site, site.operand(0), site.result(0));
    require_step_vector(site, site.operand(3), step_->pos);
    require_step_vector(site, site.operand(4), step_->slot);
    site.require(entries_.rank() == 3 && entries_.dim(0) == step_->batch, "the entries are not [B,C,c]");
    site.require(count_.dtype == DType::kI32 && count_.rank() == 1 && count_.dim(0) == step_->batch,
                 "the count is not i32[B]");
    cache_ = StateRows(site, site.operand(0), site.text("cache_rows", ""), entries_.cols(), entries_.dtype,
                       "the cache cannot hold the entries");
    site.require(ratio_ > 0, "the ratio is not positive");
  }

  size_t scratch_bytes() const override { return cache_.packed() ? entries_.cols() * sizeof(float) : 0; }

  void run(Worker& worker) override {
    const int64_t candidates = entries_.dim(1);
    const Range share = worker.share(step_->batch * candidates);
    for (int64_t i = share.begin; i < share.end; ++i) {
      const int64_t b = i / candidates, j = i % candidates, entry = step_->pos[b] / ratio_ + j;
      // (A masked row has finished nothing; its count may be unwritten.)
      if (step_->n_valid[b] == 0 || j >= count_.row<int32_t>(0)[b] || entry >= cache_.size()) continue;
      cache_.copy(step_->slot[b], entry, entries_, i, worker.scratch());
    }
  }

 private:
  const Step* step_;
  StateRows cache_;
  Tensor entries_, count_;
  int64_t ratio_;
};

}  // namespace

void add_state_kernels(Registry& registry) {
  registry["host.ring_write"] = {"ring_write(ring, rows, pos, n_valid, slot; ring_rows: str) -> ()", make_kernel<RingWrite>};
  registry["host.entry_write"] = {"entry_write(cache, entries, count, pos, slot; ratio: int, cache_rows: str) -> ()",
                                  make_kernel<EntryWrite>};
}

}  // namespace rewright
