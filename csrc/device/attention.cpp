#include "../kernels/attention/attention.h"

#include <algorithm>

#include "families.h"

namespace rewright {

namespace {

// A call of attention or sparse_attention, resolved.
struct Attention {
  AttentionParams p{};
  bool fast = false;  // on tensor cores, split and combined; otherwise one generic kernel

  Attention(DeviceSite& site, bool fused) : site_(site), fused_(fused) {
    const Tensor& q = site.required(0);
    const int64_t batch = site.step->batch, tokens = site.step->tokens;
    const int rank = fused ? 3 : 4;
    site.require(q.rank() == rank && q.dim(0) == batch && q.dim(1) == tokens, "q does not fit the step");
    heads_ = fused ? site.integer("heads") : q.dim(2);
    site.require(heads_ > 0 && q.cols() > 0 && (!fused || q.cols() % heads_ == 0), "the heads do not divide q");
    dim_ = fused ? q.cols() / heads_ : q.cols();
    p.element = element_of(site, q);
    const int64_t bytes = p.element == 1 ? 4 : 2;
    p.q = q.data;
    p.q_head = fused ? dim_ * bytes : q.pitch;
    p.q_pitch = fused ? q.pitch : q.pitch * heads_;

    const Tensor &kv = site.operand(1), &window = site.required(2), &compressed = site.operand(3), &indices = site.operand(4);
    const Tensor& sink = site.required(5);
    const auto fits = [&](const Tensor& keys) { return keys.rank() == 3 && keys.dtype == q.dtype && keys.cols() == dim_; };
    site.require(fits(window) && window.dim(1) > 0, "the window does not fit the queries");
    site.require(!kv || (fits(kv) && kv.dim(0) == batch && kv.dim(1) == tokens), "kv does not fit");
    site.require(kv || tokens == 1, "the ring cannot hold the keys of several tokens for the first");
    const int64_t ratio = site.integer("ratio"), capacity = site.integer("capacity");
    site.require(static_cast<bool>(compressed) == (ratio > 0) && ratio >= 0, "entries and a ratio go together");
    site.require(!indices || compressed, "indices without entries");
    p.kv = kv.data;
    p.kv_pitch = kv.pitch;
    p.window = window.data;
    p.window_pitch = window.pitch;
    p.window_keys = static_cast<int>(window.dim(1));
    keys_ = window.dim(1);
    if (compressed) {
      site.require(fits(compressed) && compressed.dim(0) == window.dim(0) && capacity >= 0 &&
                       compressed.dim(1) >= capacity / ratio,
                   "the entries do not fit the queries");
      p.compressed = compressed.data;
      p.compressed_pitch = compressed.pitch;
      p.slot_entries = static_cast<int>(compressed.dim(1));
      p.entries = static_cast<int>(capacity / ratio);
      p.ratio = static_cast<int>(ratio);
      keys_ += capacity / ratio;
    }
    if (indices) {
      site.require(indices.dtype == DType::kI32 && indices.rank() == 3 && indices.dim(0) == batch &&
                       indices.dim(1) == tokens && indices.dim(2) > 0 && indices.pitch % 4 == 0,
                   "indices are not i32[B,T,k]");
      p.indices = static_cast<const int*>(indices.data);
      p.index_pitch = indices.pitch;
      p.listed = static_cast<int>(indices.dim(2));
      keys_ = window.dim(1) + indices.dim(2);
    }
    site.require(sink.count() == heads_ && sink.rank() == 1, "the sink does not fit the heads");
    p.sink = sink.data;
    p.sink_element = element_of(site, sink);
    bool tables_fit = true;
    if (fused) {
      const Tensor &cos = site.required(6), &sin = site.required(7);
      site.require(cos.dtype == DType::kF32 && sin.dtype == DType::kF32 && cos.rank() == 2 && cos.shape == sin.shape &&
                       cos.dim(0) > 0 && 2 * cos.cols() <= dim_ && cos.pitch % 4 == 0 && sin.pitch % 4 == 0,
                   "the tables of cosines and sines do not fit");
      p.cos = static_cast<const float*>(cos.data);
      p.sin = static_cast<const float*>(sin.data);
      p.cos_pitch = cos.pitch;
      p.sin_pitch = sin.pitch;
      p.pairs = static_cast<int>(cos.cols());
      p.table_rows = static_cast<int>(cos.dim(0));
      p.eps = static_cast<float>(site.number("eps"));
      tables_fit = p.pairs % 4 == 0 && aligned(cos) && aligned(sin);
    }
    const size_t pos = fused ? 8 : 6;
    p.pos = static_cast<const int*>(site.required(pos).data);
    p.n_valid = static_cast<const int*>(site.required(pos + 1).data);
    p.slot = static_cast<const int*>(site.required(pos + 2).data);
    p.tokens = static_cast<int>(tokens);
    p.heads = static_cast<int>(heads_);
    p.dim = static_cast<int>(dim_);
    p.scale = static_cast<float>(site.number("scale"));
    fast = p.element == 0 && (dim_ == 128 || dim_ == 256 || dim_ == 512) && tables_fit && aligned(q) && aligned(window) &&
           aligned(kv) && aligned(compressed);
  }

  // Shares the workspace out; formulas as in codegen/kernels/sm80_workspace.py.
  void split() {
    const int64_t tiles = (keys_ + kKeysPerTile - 1) / kKeysPerTile, rows = site_.rows();
    p.splits = static_cast<int>(std::min(std::max<int64_t>(kBlocks / (rows * groups()), 1), tiles));
    p.tiles = static_cast<int>(tiles);
    one_tile_ = p.splits == tiles;
    p.scores = site_.take_workspace<float>(rows * groups() * tiles * kHeadsPerBlock * kKeysPerTile);
    p.tops = site_.take_workspace<float>(rows * groups() * tiles * kHeadsPerBlock);
  }

  void result() {
    const Tensor &q = site_.required(0), &y = site_.result(0);
    site_.require(y.dtype == q.dtype && y.rank() >= 3 && y.dim(0) == q.dim(0) && y.dim(1) == q.dim(1) &&
                      y.count() == q.count() && y.cols() % dim_ == 0 && (fused_ || y.shape == q.shape),
                  "the result does not fit the queries");
    site_.require(!fast || (y.pitch % 4 == 0 && reinterpret_cast<uintptr_t>(y.data) % 4 == 0), "the result is not aligned");
    p.y = y.data;
    p.y_pitch = y.pitch;
    p.y_heads = static_cast<int>(y.cols() / dim_);
  }

  DeviceLaunch split_launch() const {
    const unsigned shared = static_cast<unsigned>((kHeadsPerBlock + (one_tile_ ? 1 : 2) * kKeysPerTile) * dim_ * 2);
    return site_.launch((one_tile_ ? "attention_tile_" : "attention_split_") + std::to_string(dim_),
                        static_cast<unsigned>(site_.rows() * p.splits * groups()), 256, p, shared);
  }
  DeviceLaunch combine_launch() const {
    DeviceLaunch combine = site_.launch("attention_combine", static_cast<unsigned>(site_.rows() * groups() * (dim_ / kDimsPerBlock)), 256, p);
    combine.waits = true;
    return combine;
  }
  DeviceLaunch any_launch() const {
    return site_.launch("attention_any", static_cast<unsigned>(site_.rows() * heads_), 128, p,
                        static_cast<unsigned>(2 * dim_ * sizeof(float)));
  }

 private:
  static constexpr int64_t kBlocks = 256;  // of a launch, about two on each multiprocessor

  int64_t groups() const { return (heads_ + kHeadsPerBlock - 1) / kHeadsPerBlock; }

  static bool aligned(const Tensor& tensor) {
    return tensor.pitch % 16 == 0 && reinterpret_cast<uintptr_t>(tensor.data) % 16 == 0;
  }

  DeviceSite& site_;
  bool fused_, one_tile_ = false;
  int64_t heads_ = 0, dim_ = 0, keys_ = 0;
};

std::vector<DeviceLaunch> attention_split(DeviceSite& site) {
  Attention call(site, true);
  if (!call.fast) return {};  // all of it is in the second launch
  call.split();
  return {call.split_launch()};
}

std::vector<DeviceLaunch> attention_combine(DeviceSite& site) {
  Attention call(site, true);
  call.result();
  if (!call.fast) return {call.any_launch()};
  call.split();
  return {call.combine_launch()};
}

std::vector<DeviceLaunch> whole(DeviceSite& site, bool fused) {
  Attention call(site, fused);
  call.result();
  if (!call.fast) return {call.any_launch()};
  call.split();
  return {call.split_launch(), call.combine_launch()};
}

std::vector<DeviceLaunch> attention(DeviceSite& site) { return whole(site, true); }
std::vector<DeviceLaunch> sparse_attention(DeviceSite& site) { return whole(site, false); }

}  // namespace

void add_attention_kernels(DeviceRegistry& all) {
  const std::string fused =
      "attention(q, kv?, window, compressed?, indices?, sink, cos, sin, pos, n_valid, slot; heads: int, eps: float, "
      "tail: ints, ratio: int, capacity: int, scale: float, window_rows: str, compressed_rows: str) -> ()";
  all["sm80.attention_split"] = {fused, attention_split};
  all["sm80.attention_combine"] = {fused, attention_combine};
  all["sm80.attention"] = {fused, attention};
  all["sm80.sparse_attention"] = {
      "sparse_attention(q, kv?, window, compressed?, indices?, sink, pos, n_valid, slot; ratio: int, capacity: int, "
      "scale: float, window_rows: str, compressed_rows: str) -> ()",
      sparse_attention};
}

}  // namespace rewright
