// The phases of a decode step (codegen/kernels/sm80.py): launches that compute several ops around a stream
// of weights.
#include "../kernels/stream/start.h"

#include "families.h"
#include "stream_builder.h"

namespace rewright {

namespace {

// Walks the parts of a launch in the order of its kernel's slots.
class Parts {
 public:
  explicit Parts(DeviceSite& site) : site_(site) {}

  const Part* optional(std::initializer_list<const char*> ops) {
    if (at_ == site_.parts.size()) return nullptr;
    for (const char* op : ops) {
      if (site_.parts[at_].op == op) return &site_.parts[at_++];
    }
    return nullptr;
  }
  const Part& required(std::initializer_list<const char*> ops) {
    const Part* part = optional(ops);
    site_.require(part != nullptr, std::string("there is no ") + *ops.begin() + " at its place");
    return *part;
  }
  void done() const { site_.require(at_ == site_.parts.size(), "there are more parts than the kernel computes"); }

 private:
  DeviceSite& site_;
  size_t at_ = 0;
};

void products(Parts& parts, StreamBuilder& build, int input) {
  while (const Part* linear = parts.optional({"linear"})) build.product(*linear, input);
}

std::vector<DeviceLaunch> start(DeviceSite& site) {
  Parts parts(site);
  const Part &embed = parts.required({"embed"}), &expand = parts.required({"hc_expand"}), &mix = parts.required({"hc_mix"});
  parts.done();
  const Tensor& table = embed.operands[1];
  site.require(table.dtype == DType::kBF16 && site.rows() <= kMostTokens, "the embedding does not fit");
  StartParams p{};
  p.tokens = site.step->ids;
  p.table = static_cast<const unsigned short*>(table.data);
  p.pitch = table.pitch;
  p.vocabulary = static_cast<int>(table.dim(0));
  p.rows = site.rows();
  p.combine = StreamBuilder::streams_behind(site, nullptr, expand.results[0], &mix);
  p.combine.slots = kStartTiles;
  p.combine.fetches_fn = 1;
  const unsigned blocks = (p.combine.dim / 16 + kStartTiles - 1) / kStartTiles;
  site.require(blocks <= kPartialBlocks && embed.results[0].data == nullptr, "the embedding does not fit");
  return {site.launch("start", blocks, 256, p, kept_bytes(p.combine, p.rows, true))};
}

std::vector<DeviceLaunch> sublayer_in(DeviceSite& site) {
  Parts parts(site);
  StreamBuilder build(site);
  const Part &split = parts.required({"hc_split"}), &collapse = parts.required({"hc_collapse"});
  const Part *norm = parts.optional({"rms_norm"}), *quantize = parts.optional({"quantize", "quantize_static"});
  products(parts, build, build.streams(split, collapse, norm, quantize));
  parts.done();
  return build.launches();
}

std::vector<DeviceLaunch> normed_in(DeviceSite& site) {
  Parts parts(site);
  StreamBuilder build(site);
  const Part& norm = parts.required({"rms_norm"});
  const Part* quantize = parts.optional({"quantize", "quantize_static"});
  products(parts, build, build.row(norm.operands[0], &norm, quantize));
  parts.done();
  return build.launches();
}

std::vector<DeviceLaunch> attn_out(DeviceSite& site) {
  Parts parts(site);
  StreamBuilder build(site);
  const Part* quantize = parts.optional({"quantize", "quantize_static"});
  const Part& linear = parts.required({"linear"});
  const int input = quantize             ? build.row(quantize->operands[0], nullptr, quantize)
                    : linear.present[1] ? build.codes(linear.operands[0], linear.operands[1])
                                        : build.given(linear.operands[0]);
  build.product(linear, input);
  const Part& combine = parts.required({"hc_combine"});
  build.combine(combine, parts.optional({"hc_mix"}));
  parts.done();
  return build.launches();
}

std::vector<DeviceLaunch> experts_in(DeviceSite& site) {
  Parts parts(site);
  StreamBuilder build(site);
  const Part& swiglu = parts.required({"swiglu"});
  const Part* quantize = parts.optional({"quantize", "quantize_static"});
  const Part& down = parts.required({"linear"});
  build.product(down, build.gated(swiglu, quantize));
  build.route(parts.required({"route", "route_hash"}));
  const Part& first = parts.required({"expert_linear"});
  const int input = first.present[1] ? build.codes(first.operands[0], first.operands[1]) : build.given(first.operands[0]);
  build.experts(first, input);
  while (const Part* more = parts.optional({"expert_linear"})) build.experts(*more, input);
  parts.done();
  return build.launches();
}

std::vector<DeviceLaunch> experts_out(DeviceSite& site) {
  Parts parts(site);
  StreamBuilder build(site);
  const Part& swiglu = parts.required({"swiglu"});
  const Part* quantize = parts.optional({"quantize", "quantize_static"});
  const Part &down = parts.required({"expert_linear"}), &sum = parts.required({"expert_sum"});
  const int input = build.gated(swiglu, quantize);
  build.experts(down, input);
  build.chosen(down.operands[4]);
  const Part& combine = parts.required({"hc_combine"});
  build.combine(combine, parts.optional({"hc_mix"}));
  build.add_shared(sum.operands[2]);
  parts.done();
  return build.expert_sums();
}

std::vector<DeviceLaunch> head(DeviceSite& site) {
  Parts parts(site);
  StreamBuilder build(site);
  const Part &split = parts.required({"hc_head_split"}), &collapse = parts.required({"hc_collapse"});
  const Part* norm = parts.optional({"rms_norm"});
  products(parts, build, build.streams(split, collapse, norm, nullptr));
  parts.done();
  return build.launches();
}

}  // namespace

void add_phases(DeviceRegistry& all) {
  all["sm80.start"] = {"embed + hc_expand + hc_mix", start};
  all["sm80.sublayer_in"] = {"hc_split + hc_collapse + rms_norm? + quantize|quantize_static? + linear*", sublayer_in};
  all["sm80.normed_in"] = {"rms_norm + quantize|quantize_static? + linear*", normed_in};
  all["sm80.attn_out"] = {"quantize|quantize_static? + linear + hc_combine + hc_mix?", attn_out};
  all["sm80.experts_in"] = {"swiglu + quantize|quantize_static? + linear + route|route_hash + expert_linear*", experts_in};
  all["sm80.experts_out"] = {"swiglu + quantize|quantize_static? + expert_linear + expert_sum + hc_combine + hc_mix?", experts_out};
  all["sm80.head"] = {"hc_head_split + hc_collapse + rms_norm? + linear", head};
}

}  // namespace rewright
