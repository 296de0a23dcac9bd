#include "../kernels/index/index.h"

#include <algorithm>
#include <cmath>

#include "families.h"

namespace rewright {

namespace {

bool aligned(const Tensor& tensor) {
  return tensor.pitch % 16 == 0 && reinterpret_cast<uintptr_t>(tensor.data) % 16 == 0;
}

const int* vector_of(const DeviceSite& site, size_t operand) {
  const Tensor& vector = site.required(operand);
  site.require(vector.dtype == DType::kI32 && vector.count() == site.step->batch, "a vector of the step does not fit");
  return static_cast<const int*>(vector.data);
}

std::vector<DeviceLaunch> index_query(DeviceSite& site) {
  const Tensor &x = site.required(0), &cos = site.required(1), &sin = site.required(2), &y = site.result(0);
  const int64_t heads = site.integer("heads");
  site.require(x.rank() == 3 && x.dim(0) == site.step->batch && x.dim(1) == site.step->tokens && heads > 0 &&
                   x.cols() % heads == 0,
               "the heads do not divide a row");
  const int64_t dim = x.cols() / heads;
  site.require(dim > 0 && (dim & (dim - 1)) == 0, "heads are no power of two wide");
  site.require(cos.dtype == DType::kF32 && sin.dtype == DType::kF32 && cos.rank() == 2 && cos.shape == sin.shape &&
                   cos.dim(0) > 0 && 2 * cos.cols() <= dim && cos.pitch % 4 == 0 && sin.pitch % 4 == 0,
               "the tables of cosines and sines do not fit");
  IndexQueryParams p{};
  p.element = element_of(site, x);
  p.result_element = p.element;
  const std::string fmt = site.text("fmt", "");
  if (!fmt.empty()) {
    site.require(fmt == "e4m3" || fmt == "e2m1", "codes are e4m3 or e2m1, not " + fmt);
    const std::string out = site.text("out", "");
    site.require(out == "bf16" || out == "f32", "rounded rows are bf16 or f32, not " + out);
    const int64_t block = site.integer("block");
    site.require(block > 0 && dim % block == 0, "blocks do not divide a row");
    p.block = static_cast<int>(block);
    p.e4m3 = fmt == "e4m3";
    p.result_element = out == "f32";
  }
  const std::vector<int64_t> shape{site.step->batch, site.step->tokens, heads, dim};
  site.require(y.shape == shape && element_of(site, y) == p.result_element, "the queries do not fit");
  p.x = x.data;
  p.y = y.data;
  p.cos = static_cast<const float*>(cos.data);
  p.sin = static_cast<const float*>(sin.data);
  p.pos = vector_of(site, 3);
  p.x_pitch = x.pitch;
  p.y_pitch = y.pitch;
  p.cos_pitch = cos.pitch;
  p.sin_pitch = sin.pitch;
  p.rows = site.rows();
  p.tokens = site.step->tokens;
  p.heads = static_cast<int>(heads);
  p.dim = static_cast<int>(dim);
  p.pairs = static_cast<int>(cos.cols());
  p.table_rows = static_cast<int>(cos.dim(0));
  p.root = static_cast<float>(1.0 / std::sqrt(static_cast<double>(dim)));
  const unsigned blocks = static_cast<unsigned>((p.rows * heads + 3) / 4);
  return {site.launch("index_query", blocks, 128, p, static_cast<unsigned>(4 * dim * sizeof(float)))};
}

// A call of index_score or index_select, whose operands begin alike; where the scores go is still to be said.
IndexScoreParams scoring(const DeviceSite& site) {
  const Tensor &q = site.required(0), &weights = site.required(1), &keys = site.required(2);
  const int64_t batch = site.step->batch, tokens = site.step->tokens;
  site.require(q.rank() == 4 && q.dim(0) == batch && q.dim(1) == tokens && q.dim(2) > 0 && q.cols() > 0, "q is not [B,T,H,c]");
  site.require(weights.rank() == 3 && weights.dtype == q.dtype && weights.dim(0) == batch && weights.dim(1) == tokens &&
                   weights.cols() == q.dim(2),
               "q and weights disagree");
  site.require(keys.rank() == 3 && keys.dtype == q.dtype && keys.cols() == q.cols(), "q and keys disagree");
  const int64_t ratio = site.integer("ratio"), capacity = site.integer("capacity");
  site.require(ratio > 0 && capacity >= 0 && capacity % ratio == 0 && capacity / ratio <= keys.dim(1),
               "the keys hold less than the capacity");
  IndexScoreParams p{};
  p.q = q.data;
  p.weights = weights.data;
  p.keys = keys.data;
  p.pos = vector_of(site, 3);
  p.n_valid = vector_of(site, 4);
  p.slot = vector_of(site, 5);
  p.q_pitch = q.pitch;
  p.weights_pitch = weights.pitch;
  p.keys_pitch = keys.pitch;
  p.tokens = static_cast<int>(tokens);
  p.heads = static_cast<int>(q.dim(2));
  p.dim = static_cast<int>(q.cols());
  p.slot_entries = static_cast<int>(keys.dim(1));
  p.entries = static_cast<int>(capacity / ratio);
  p.ratio = static_cast<int>(ratio);
  p.element = element_of(site, q);
  p.weight_scale = static_cast<float>(site.number("weight_scale"));
  return p;
}

DeviceLaunch score_launch(const DeviceSite& site, IndexScoreParams p) {
  const bool fast = p.element == 0 && p.dim == 128 && p.heads <= 1024 && aligned(site.required(0)) && aligned(site.required(2));
  const int entries = fast ? 64 : 128;  // of a block at a time
  const int most = std::max(1, 4 * site.device->multiprocessors());
  p.blocks = std::clamp((p.entries + entries - 1) / entries, 1, most);
  const unsigned shared = fast ? static_cast<unsigned>((p.heads + 15) / 16 * 16 * sizeof(float)) : 0;
  return site.launch(fast ? "index_score_128" : "index_score_any", static_cast<unsigned>(site.rows() * p.blocks), 128, p, shared);
}

std::vector<DeviceLaunch> index_score(DeviceSite& site) {
  IndexScoreParams p = scoring(site);
  const Tensor& y = site.result(0);
  const std::vector<int64_t> shape{site.step->batch, site.step->tokens, p.entries};
  site.require(y.shape == shape && y.dtype == site.required(0).dtype, "the scores do not fit");
  p.scores = y.data;
  p.scores_pitch = y.pitch;
  p.fill = 1;
  return {score_launch(site, p)};
}

// A choice among scores of which `p` says where they are.
DeviceLaunch topk_launch(const DeviceSite& site, IndexTopkParams p, int element) {
  const Tensor& chosen = site.result(0);
  const int64_t k = site.integer("k");
  const std::vector<int64_t> shape{site.step->batch, site.step->tokens, k};
  site.require(0 < k && k <= std::min(p.entries, kMostChosen), "k is out of range");
  site.require(chosen.dtype == DType::kI32 && chosen.shape == shape && chosen.pitch % 4 == 0, "the chosen entries do not fit");
  p.chosen = static_cast<int*>(chosen.data);
  p.chosen_pitch = chosen.pitch;
  p.tokens = site.step->tokens;
  p.ratio = static_cast<int>(site.integer("ratio"));
  site.require(p.ratio > 0, "the ratio is not positive");
  p.k = static_cast<int>(k);
  p.vector = p.scores_pitch % 16 == 0 && reinterpret_cast<uintptr_t>(p.scores) % 16 == 0;
  p.sorted = 1;
  while (p.sorted < k) p.sorted *= 2;
  return site.launch(element == 1 ? "index_topk_f32" : "index_topk_bf16", static_cast<unsigned>(site.rows()), 1024, p,
                     static_cast<unsigned>(p.sorted * sizeof(uint64_t)));
}

std::vector<DeviceLaunch> index_topk(DeviceSite& site) {
  const Tensor& scores = site.required(0);
  site.require(scores.rank() == 3 && scores.dim(0) == site.step->batch && scores.dim(1) == site.step->tokens,
               "scores are not [B,T,n]");
  IndexTopkParams p{};
  p.scores = scores.data;
  p.scores_pitch = scores.pitch;
  p.pos = vector_of(site, 1);
  p.n_valid = vector_of(site, 2);
  p.entries = static_cast<int>(scores.cols());
  return {topk_launch(site, p, element_of(site, scores))};
}

// Scores in the workspace, rows of whole 16 bytes; sizes as in codegen/kernels/sm80_workspace.py.
IndexScoreParams selecting(DeviceSite& site) {
  IndexScoreParams p = scoring(site);
  const int64_t pitch = (int64_t{p.entries} * (p.element == 1 ? 4 : 2) + 15) / 16 * 16;
  p.scores = site.take_workspace<char>(site.rows() * pitch);
  p.scores_pitch = pitch;
  return p;
}

IndexTopkParams choosing(const IndexScoreParams& from) {
  IndexTopkParams p{};
  p.scores = from.scores;
  p.scores_pitch = from.scores_pitch;
  p.pos = from.pos;
  p.n_valid = from.n_valid;
  p.entries = from.entries;
  p.own = 1;
  return p;
}

std::vector<DeviceLaunch> index_select_score(DeviceSite& site) { return {score_launch(site, selecting(site))}; }

std::vector<DeviceLaunch> index_select_topk(DeviceSite& site) {
  const IndexScoreParams scores = selecting(site);
  return {topk_launch(site, choosing(scores), scores.element)};
}

std::vector<DeviceLaunch> index_select(DeviceSite& site) {
  const IndexScoreParams scores = selecting(site);
  return {score_launch(site, scores), topk_launch(site, choosing(scores), scores.element)};
}

}  // namespace

void add_index_kernels(DeviceRegistry& all) {
  all["sm80.index_query"] = {"index_query(q, cos, sin, pos; heads: int, fmt: str, block: int, out: str) -> ()", index_query};
  all["sm80.index_score"] = {
      "index_score(q, weights, keys, pos, n_valid, slot; ratio: int, capacity: int, weight_scale: float, "
      "keys_rows: str) -> ()",
      index_score};
  all["sm80.index_topk"] = {"index_topk(scores, pos, n_valid; ratio: int, k: int) -> ()", index_topk};
  const std::string select =
      "index_select(q, weights, keys, pos, n_valid, slot; ratio: int, capacity: int, weight_scale: float, "
      "k: int, keys_rows: str) -> ()";
  all["sm80.index_select_score"] = {select, index_select_score};
  all["sm80.index_select_topk"] = {select, index_select_topk};
  all["sm80.index_select"] = {select, index_select};
}

}  // namespace rewright
