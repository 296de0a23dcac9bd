// Products of one op: streamed eight rows at a time where the weight is laid out for it, else one by one.
#include "../kernels/linear/linear.h"

#include "families.h"
#include "stream_builder.h"

namespace rewright {

namespace {

// The rows [first, first + count) of a tensor of rows; of scales that all rows share, those.
Tensor rows_of(const Tensor& tensor, int64_t first, int64_t count, int64_t rows_each = 1) {
  Tensor part = tensor;
  if (!tensor || tensor.rank() == 1) return part;
  part.data = tensor.row<void>(first * rows_each);
  part.shape = {1, count};
  for (size_t axis = 2; axis < tensor.shape.size(); ++axis) part.shape.push_back(tensor.shape[axis]);
  return part;
}

int weight_kind(const DeviceSite& site, const Tensor& weight) {
  if (weight.layout == "mma8") return kPackedE4m3;
  if (weight.layout == "mma4") return kPackedE2m1;
  if (weight.layout == "mma16" && weight.dtype == DType::kBF16) return kPackedBf16;
  site.require(weight.layout.empty(), "a matrix has an unknown layout");
  switch (weight.dtype) {
    case DType::kF8E4M3: return kPlainE4m3;
    case DType::kE2M1: return kPlainE2m1;
    case DType::kBF16: return kPlainBf16;
    case DType::kF32: return kPlainF32;
    default: site.require(false, "a matrix is of an unknown type");
  }
  return 0;
}

MatrixProductParams plain(DeviceSite& site, const Tensor& x, const Tensor& x_scale, const Tensor& weight, const Tensor& scale,
                          const Tensor& out) {
  MatrixProductParams p{};
  p.x = x.data;
  p.x_pitch = x.pitch;
  p.x_kind = x_scale ? 2 : element_of(site, x);
  p.x_scale = static_cast<const unsigned char*>(x_scale.data);
  p.x_scale_pitch = scales_pitch(x_scale);
  site.require(!x_scale || x_scale.cols() * 128 == x.cols(), "codes have other scales than one for 128");
  p.weight = weight.data;
  p.kind = weight_kind(site, weight);
  p.n = static_cast<int>(weight.dim(-2));
  p.k = static_cast<int>(weight.cols());
  p.scale = scale.data;
  p.scale_f32 = scale.dtype == DType::kF32;
  p.scale_packed = scale.layout == "mma4_scale";
  p.scale_columns = static_cast<int>(scale.cols());
  p.out = out.data;
  p.out_pitch = out.pitch;
  p.out_f32 = element_of(site, out);
  p.groups = p.choices = 1;
  return p;
}

std::vector<DeviceLaunch> launch_plain(DeviceSite& site, const MatrixProductParams& p, int64_t rows) {
  DeviceLaunch made = site.launch("matrix_product", (p.n + 7) / 8, 256, p);
  made.grid[1] = static_cast<unsigned>(rows);
  return {made};
}

bool streams(const DeviceSite& site, const Tensor& x, const Tensor& x_scale, const Tensor& weight, const Tensor& scale) {
  return stream_format(weight, static_cast<bool>(x_scale)) >= 0 && (x_scale || x.dtype == DType::kBF16) && x.pitch % 16 == 0 &&
         (!scale || scale.dtype == DType::kE8M0) && weight.cols() % 128 == 0 && site.workspace_bytes > 0;
}

Part part_of(const DeviceSite& site, const char* op, std::vector<Tensor> operands, const Tensor& out) {
  Part part;
  part.where = site.where;
  part.op = op;
  for (const Tensor& operand : operands) part.present.push_back(static_cast<bool>(operand));
  part.operands = std::move(operands);
  part.results = {out};
  return part;
}

// Launches of at most eight rows of the step each, which `one` makes on a site of so many rows.
template <typename F>
std::vector<DeviceLaunch> by_eights(DeviceSite& site, F one) {
  std::vector<DeviceLaunch> all;
  for (int first = 0; first < site.rows(); first += kMostTokens) {
    const int count = std::min(kMostTokens, site.rows() - first);
    Step step;
    step.batch = 1;
    step.tokens = count;
    DeviceSite part = site;  // each begins with the whole workspace: they run one after another
    part.step = &step;
    for (DeviceLaunch& made : one(part, first, count)) all.push_back(std::move(made));
  }
  return all;
}

std::vector<DeviceLaunch> linear(DeviceSite& site) {
  const Tensor &x = site.required(0), &x_scale = site.operand(1), &weight = site.required(2), &scale = site.operand(3), &out = site.result(0);
  if (!streams(site, x, x_scale, weight, scale) || x.rows() != site.rows()) {
    return launch_plain(site, plain(site, x, x_scale, weight, scale, out), x.rows());
  }
  return by_eights(site, [&](DeviceSite& part, int first, int count) {
    StreamBuilder build(part);
    const Tensor rows = rows_of(x, first, count), scales = rows_of(x_scale, first, count);
    const int input = x_scale ? build.codes(rows, scales) : build.given(rows);
    build.product(part_of(site, "linear", {rows, scales, weight, scale}, rows_of(out, first, count)), input);
    return build.launches();
  });
}

std::vector<DeviceLaunch> grouped_linear(DeviceSite& site) {
  const Tensor &x = site.required(0), &weight = site.required(1), &scale = site.operand(2), &out = site.result(0);
  const int groups = static_cast<int>(x.dim(2));
  const bool whole = weight.dim(0) / groups % 16 == 0 && x.pitch == x.cols() * 2;
  if (!streams(site, x, {}, weight, scale) || !whole) {
    MatrixProductParams p = plain(site, x, {}, weight, scale, out);
    p.groups = groups;
    p.out_flat = out.rank() == 3;
    return launch_plain(site, p, site.rows());
  }
  return by_eights(site, [&](DeviceSite& part, int first, int count) {
    StreamBuilder build(part);
    const Tensor rows = rows_of(x, first, count, groups);
    const int input = build.given(rows, true);
    build.grouped(weight, scale, rows_of(out, first, count, out.rank() == 3 ? 1 : groups), groups, input);
    return build.launches();
  });
}

std::vector<DeviceLaunch> expert_linear(DeviceSite& site) {
  const Tensor &x = site.required(0), &x_scale = site.operand(1), &weight = site.required(2), &scale = site.operand(3),
               &experts = site.required(4), &out = site.result(0);
  MatrixProductParams p = plain(site, x, x_scale, weight, scale, out);
  p.experts = static_cast<const int*>(experts.data);
  p.experts_pitch = experts.pitch;
  p.choices = static_cast<int>(experts.cols());
  p.expert_count = static_cast<int>(weight.dim(0));
  p.x_by_choice = x.rank() == 4;
  p.expert_bytes = weight.nbytes() / weight.dim(0);
  p.expert_scale_bytes = scale ? scale.nbytes() / scale.dim(0) : 0;
  return launch_plain(site, p, experts.rows() * p.choices);
}

}  // namespace

void add_linear_kernels(DeviceRegistry& all) {
  all["sm80.linear"] = {"linear(x, x_scale?, weight, scale?; out: str) -> ()", linear};
  all["sm80.grouped_linear"] = {"grouped_linear(x, weight, scale?; flat: bool) -> ()", grouped_linear};
  all["sm80.expert_linear"] = {"expert_linear(x, x_scale?, weight, scale?, experts; out: str) -> ()", expert_linear};
}

}  // namespace rewright
