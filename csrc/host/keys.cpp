// The key/value row of a token, and its way into the window ring.
//
// host.kv_rows: RMS norm, RoPE and rounding of each row, every step rounded to the row's dtype as if it had
// been stored. host.kv_write: the same, stored at the row's position modulo the ring's size. Bound by
// memory: each row is read and written once.
#include "families.h"
#include "norm.h"
#include "rope.h"
#include "rounding.h"
#include "rows.h"
#include "state_rows.h"
#include "step_vectors.h"

namespace rewright {
namespace {

class KeyRows : public Kernel {
 public:
  explicit KeyRows(CallSite& site) : KeyRows(site, site.result(0)) {
    site.require(y_.dtype == rounding_.dtype() && y_.shape == x_.shape, "the rows do not fit");
  }

  size_t scratch_bytes() const override { return x_.cols() * sizeof(float); }

  void run(Worker& worker) override {
    const Range share = worker.share(rows_.count());
    for (int64_t i = share.begin; i < share.end; ++i) {
      const TokenRows::Group at = rows_.at(i);
      compute(at, worker.scratch());
      store_row(y_, at.row, worker.scratch());
    }
  }

 protected:
  KeyRows(CallSite& site, const Tensor& y)
      : step_(site.step),
        x_(require_activation(site, site.operand(0))),
        y_(y),
        weight_(site, site.operand(1), x_.cols()),
        tables_(site, site.operand(2), site.operand(3), x_.cols()),
        eps_(static_cast<float>(site.number("eps"))),
        rounding_(site, x_.cols(), x_.dtype),
        rows_(step_, x_) {
    require_step_vector(site, site.operand(4), step_->pos);
    require_tokens(site, x_);
  }

  void compute(const TokenRows::Group& at, float* row) const {
    load_row(x_, at.row, row);
    rms_norm_row(row, x_.cols(), weight_.data(), eps_);
    round_to(x_.dtype, row, x_.cols());
    tables_.turn(row, x_.cols(), int64_t{step_->pos[at.batch]} + at.token);
    round_to(x_.dtype, row, x_.cols());
    rounding_.apply(row);
  }

  const Step* step_;
  Tensor x_, y_;
  NormWeight weight_;
  RopeTables tables_;
  float eps_;
  Rounding rounding_;
  TokenRows rows_;
};

class KeyWrite : public KeyRows {
 public:
  explicit KeyWrite(CallSite& site) : KeyRows(site, site.operand(7)) {
    require_step_vector(site, site.operand(5), step_->n_valid);
    require_step_vector(site, site.operand(6), step_->slot);
    require_state(site, y_, site.result(0));
    window_ = StateRows(site, y_, site.text("window_rows", ""), x_.cols(), rounding_.dtype(),
                        "the window cannot hold the rows");
  }

  void run(Worker& worker) override {
    const Range share = worker.share(rows_.count());
    for (int64_t i = share.begin; i < share.end; ++i) {
      const TokenRows::Group at = rows_.at(i);
      if (at.token < window_.first_kept(step_->n_valid[at.batch])) continue;
      compute(at, worker.scratch());
      const int64_t position = int64_t{step_->pos[at.batch]} + at.token;
      window_.store(step_->slot[at.batch], position % window_.size(), worker.scratch());
    }
  }

 private:
  StateRows window_;
};

}  // namespace

void add_key_kernels(Registry& registry) {
  registry["host.kv_rows"] = {
      "kv_rows(x, weight, cos, sin, pos; eps: float, fmt: str, block: int, dims: ints, out: str) -> ()",
      make_kernel<KeyRows>};
  registry["host.kv_write"] = {
      "kv_write(x, weight, cos, sin, pos, n_valid, slot, window; eps: float, fmt: str, block: int, dims: ints, "
      "out: str, window_rows: str) -> ()",
      make_kernel<KeyWrite>};
}

}  // namespace rewright
