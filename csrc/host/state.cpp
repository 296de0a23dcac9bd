// Writes of decode state.
//
// host.ring_write: the last rows of a chunk at their position modulo the ring's size. host.entry_write: a
// chunk's finished entries behind those that the cache holds. Both write the state in place and leave the
// slots of masked sequences alone. Bound by memory: what is stored is read and written once.
#include <cstring>

#include "families.h"
#include "rows.h"
#include "step_vectors.h"

namespace rewright {
namespace {

int64_t row_bytes(const Tensor& tensor) { return (tensor.cols() * bits_of(tensor.dtype) + 7) / 8; }

class RingWrite : public Kernel {
 public:
  explicit RingWrite(CallSite& site)
      : step_(site.step), ring_(site.required(0)), rows_(site.required(1)), tokens_(step_, rows_) {
    require_state(site, ring_, site.result(0));
    require_tokens(site, rows_);
    require_step_vector(site, site.operand(2), step_->pos);
    require_step_vector(site, site.operand(3), step_->n_valid);
    require_step_vector(site, site.operand(4), step_->slot);
    site.require(ring_.dtype == rows_.dtype && ring_.cols() == rows_.cols(), "the ring cannot hold the rows");
  }

  void run(Worker& worker) override {
    const Range share = worker.share(tokens_.count());
    for (int64_t i = share.begin; i < share.end; ++i) {
      const TokenRows::Group at = tokens_.at(i);
      if (at.token < first_kept(ring_, step_->n_valid[at.batch])) continue;
      const int64_t to = ring_row(ring_, step_->slot[at.batch], int64_t{step_->pos[at.batch]} + at.token);
      std::memcpy(ring_.row<char>(to), rows_.row<char>(at.row), row_bytes(rows_));
    }
  }

 private:
  const Step* step_;
  Tensor ring_, rows_;
  TokenRows tokens_;
};

class EntryWrite : public Kernel {
 public:
  explicit EntryWrite(CallSite& site)
      : step_(site.step),
        cache_(site.required(0)),
        entries_(site.required(1)),
        count_(site.required(2)),
        ratio_(site.integer("ratio")) {
    require_state(site, cache_, site.result(0));
    require_step_vector(site, site.operand(3), step_->pos);
    require_step_vector(site, site.operand(4), step_->slot);
    site.require(entries_.rank() == 3 && entries_.dim(0) == step_->batch, "the entries are not [B,C,c]");
    site.require(count_.dtype == DType::kI32 && count_.rank() == 1 && count_.dim(0) == step_->batch,
                 "the count is not i32[B]");
    site.require(cache_.dtype == entries_.dtype && cache_.cols() == entries_.cols(), "the cache cannot hold the entries");
    site.require(ratio_ > 0, "the ratio is not positive");
  }

  void run(Worker& worker) override {
    const int64_t candidates = entries_.dim(1);
    const Range share = worker.share(step_->batch * candidates);
    for (int64_t i = share.begin; i < share.end; ++i) {
      const int64_t b = i / candidates, j = i % candidates, entry = step_->pos[b] / ratio_ + j;
      // (A masked row has finished nothing; its count may be unwritten.)
      if (step_->n_valid[b] == 0 || j >= count_.row<int32_t>(0)[b] || entry >= cache_.dim(1)) continue;
      const int64_t to = state_row(cache_, step_->slot[b], entry);
      std::memcpy(cache_.row<char>(to), entries_.row<char>(i), row_bytes(entries_));
    }
  }

 private:
  const Step* step_;
  Tensor cache_, entries_, count_;
  int64_t ratio_;
};

}  // namespace

void add_state_kernels(Registry& registry) {
  registry["host.ring_write"] = {"ring_write(ring, rows, pos, n_valid, slot) -> ()", make_kernel<RingWrite>};
  registry["host.entry_write"] = {"entry_write(cache, entries, count, pos, slot; ratio: int) -> ()",
                                  make_kernel<EntryWrite>};
}

}  // namespace rewright
