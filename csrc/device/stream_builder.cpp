#include "stream_builder.h"

#include <algorithm>

#include "families.h"

namespace rewright {

namespace {

constexpr int kScratchBytes = (40 + 32 * kPartialColumns) * 4 + 128;
constexpr int kOwnShared = 6656;                   // most that the kernels declare themselves
constexpr int kMostShared = (163 << 10) - kOwnShared;  // of a block on SM80
constexpr int kMostSlots = 8;                      // tiles of a block behind which streams are combined

int64_t aligned(int64_t bytes, int64_t to = 128) { return (bytes + to - 1) / to * to; }

int blocks_of(const Segment& s) {
  const bool e2m1 = s.format == kE2m1Quantised || s.format == kE2m1Bf16;
  const int width = s.format >= kBf16Bf16 ? 64 : e2m1 ? 256 : 128;
  return (s.columns + width - 1) / width;
}

// Blocks of weights that the busiest multiprocessor and the busiest warp read if so many warps share a tile.
struct Load {
  int64_t block = 0, warp = 0;
  int64_t cost() const { return block + 2 * warp; }
};

Load load_of(const std::vector<int>& tiles, int streamers, int warps, int per_tile) {
  const int groups = warps / per_tile;
  std::vector<int64_t> of_block(streamers), of_group(static_cast<size_t>(streamers) * groups);
  for (size_t i = 0; i < tiles.size(); ++i) {
    const size_t group = i % of_group.size();
    of_group[group] += (tiles[i] + per_tile - 1) / per_tile;
    of_block[group % streamers] += tiles[i];
  }
  Load load;
  for (int64_t n : of_block) load.block = std::max(load.block, n);
  for (int64_t n : of_group) load.warp = std::max(load.warp, n);
  return load;
}

int best_warps_per_tile(const std::vector<int>& tiles, int streamers, int warps) {
  int best = 1;
  for (int per_tile = 2; per_tile <= warps; ++per_tile) {
    if (warps % per_tile) continue;
    if (load_of(tiles, streamers, warps, per_tile).cost() < load_of(tiles, streamers, warps, best).cost()) best = per_tile;
  }
  return best;
}

}  // namespace

int stream_format(const Tensor& weight, bool quantised_input) {
  if (weight.layout == "mma8") return quantised_input ? kE4m3Quantised : kE4m3Bf16;
  if (weight.layout == "mma4") return quantised_input ? kE2m1Quantised : kE2m1Bf16;
  if (weight.layout == "mma16" && weight.dtype == DType::kBF16 && !quantised_input) return kBf16Bf16;
  if (weight.layout.empty() && weight.dtype == DType::kBF16 && !quantised_input && weight.rank() == 2) return kRowsBf16;
  return -1;
}

StreamBuilder::StreamBuilder(DeviceSite& site) : site_(site) {
  site.require(site.rows() <= kMostTokens, "a step of more than 8 tokens cannot be streamed");
  p_.rows = site.rows();
  p_.n_valid = site.step->n_valid;
  p_.tokens_per_sequence = site.step->tokens;
}

Input& StreamBuilder::add(int kind, const Tensor& x, int columns, int rows) {
  site_.require(p_.inputs_count < kMostInputs, "too many inputs");
  Input& input = p_.inputs[p_.inputs_count++];
  input.kind = kind;
  input.columns = columns;
  input.rows = rows;
  input.x = x.data;
  input.x_pitch = x.pitch;
  site_.require(x.data != nullptr, "an input does not lie in memory");
  site_.require(columns % 128 == 0 && x.pitch % 16 == 0, "rows of an input are no multiple of 128");
  return input;
}

int StreamBuilder::given(const Tensor& x, bool grouped) {
  site_.require(x.dtype == DType::kBF16, "the input is not bf16");
  const int64_t rows = grouped ? x.rows() / x.dim(-2) : x.rows();
  if (grouped) site_.require(x.pitch == x.cols() * 2, "groups of an input do not lie side by side");
  Input& input = add(kGiven, x, static_cast<int>(x.cols()), static_cast<int>(rows));
  if (grouped) input.x_pitch = x.dim(-2) * x.cols() * 2;
  return p_.inputs_count - 1;
}

int StreamBuilder::codes(const Tensor& x, const Tensor& scale) {
  site_.require(x.dtype == DType::kF8E4M3 && scale.dtype == DType::kE8M0, "the input is not quantised");
  Input& input = add(kCodes, x, static_cast<int>(x.cols()), static_cast<int>(x.rows()));
  site_.require(scale.cols() == (x.cols() + 127) / 128, "codes have other scales than one for 128");
  input.scale = static_cast<const unsigned char*>(scale.data);
  input.scale_pitch = scales_pitch(scale);
  return p_.inputs_count - 1;
}

// Where an input's quantised form leaves the launch.
void StreamBuilder::quantised(Input& input, const Part* quantize) {
  if (quantize == nullptr) return;
  const bool fits = quantize->integer("block") == 128 && quantize->text("fmt") == "e4m3" && !quantize->attrs.contains("dims");
  site_.require(fits, "an input is quantised in another way than as e4m3 in blocks of 128");
  const Tensor& to = quantize->results[0];
  if (quantize->op == "quantize_static") {
    const Tensor& fixed = quantize->operands[1];
    const bool fits = fixed.data && fixed.dtype == DType::kE8M0 && fixed.count() * 128 == input.columns && fixed.count() <= kMostFixed;
    site_.require(fits, "calibrated scales do not fit");
    input.calibrated = 1;
    site_.device->download(input.fixed, fixed.data, static_cast<size_t>(fixed.count()));
    if (to.data != nullptr) {
      input.results.codes = static_cast<unsigned char*>(to.data);
      input.results.codes_pitch = to.pitch;
    }
    return;
  }
  const Tensor& scale = quantize->results[1];
  if (to.data == nullptr) return;
  site_.require(scale.data != nullptr, "codes leave the launch without their scales");
  input.results.codes = static_cast<unsigned char*>(to.data);
  input.results.codes_pitch = to.pitch;
  input.results.exponents = static_cast<unsigned char*>(scale.data);
  input.results.exponents_pitch = scale.pitch;
}

void StreamBuilder::normed(Input& input, const Part& norm) {
  const Tensor& gamma = norm.operands[1];
  input.gamma = gamma.data;
  input.gamma_f32 = element_of(site_, gamma);
  input.eps = static_cast<float>(norm.number("eps"));
  input.results.bf16 = static_cast<unsigned short*>(norm.results[0].data);
  input.results.bf16_pitch = norm.results[0].pitch;
}

int StreamBuilder::row(const Tensor& x, const Part* norm, const Part* quantize) {
  site_.require(x.dtype == DType::kBF16, "the input is not bf16");
  Input& input = add(kRow, x, static_cast<int>(x.cols()), static_cast<int>(x.rows()));
  if (norm) normed(input, *norm);
  quantised(input, quantize);
  return p_.inputs_count - 1;
}

int StreamBuilder::streams(const Part& split, const Part& collapse, const Part* norm, const Part* quantize) {
  const Tensor& x = collapse.operands[0];
  site_.require(x.dtype == DType::kBF16 && x.rank() == 4, "the streams are not bf16");
  site_.require(collapse.results[0].data == nullptr || norm == nullptr, "the collapsed streams leave the launch");
  const int n = static_cast<int>(x.dim(2));
  site_.require(n <= 4, "more than 4 streams");
  p_.rows = static_cast<int>(x.rows() / n);  // of a chunk's last tokens there are fewer than the step has
  Input& input = add(kStreams, x, static_cast<int>(x.cols()), p_.rows);
  const Tensor &mix = split.operands[0], &scale = split.operands[1], &base = split.operands[2];
  input.mix = static_cast<const float*>(mix.data);
  input.mix_pitch = mix.pitch;
  input.partials = mix.layout == "hc_partials";
  input.streams = n;
  input.logits = static_cast<int>(mix.cols());
  site_.require(input.mix != nullptr && input.logits <= 24, "the mixing logits do not fit");
  input.mix_scale = scale.data;
  input.scale_f32 = element_of(site_, scale);
  input.mix_base = base.data;
  input.base_f32 = element_of(site_, base);
  input.hc_eps = static_cast<float>(split.number("eps"));
  if (split.op == "hc_split") {
    input.iterations = static_cast<int>(split.integer("iters"));
    float** const into[] = {&input.pre, &input.post, &input.comb};
    long long* const pitch[] = {&input.pre_pitch, &input.post_pitch, &input.comb_pitch};
    for (int i = 0; i < 3; ++i) {
      *into[i] = static_cast<float*>(split.results[i].data);
      *pitch[i] = split.results[i].pitch;
    }
  }
  if (norm) {
    normed(input, *norm);
  } else {
    input.results.bf16 = static_cast<unsigned short*>(collapse.results[0].data);
    input.results.bf16_pitch = collapse.results[0].pitch;
  }
  quantised(input, quantize);
  return p_.inputs_count - 1;
}

int StreamBuilder::gated(const Part& swiglu, const Part* quantize) {
  const Tensor &gate = swiglu.operands[0], &up = swiglu.operands[1];
  site_.require(gate.dtype == DType::kBF16 && up.dtype == DType::kBF16 && up.data != nullptr, "gate and up are not bf16 in memory");
  Input& input = add(kGated, gate, static_cast<int>(gate.cols()), static_cast<int>(gate.rows()));
  input.up = up.data;
  input.up_pitch = up.pitch;
  input.limit = static_cast<float>(swiglu.number("limit"));
  if (swiglu.present[2]) {
    const Tensor& weights = swiglu.operands[2];
    site_.require(weights.data != nullptr && weights.dtype == DType::kF32 && weights.pitch == weights.cols() * 4,
                  "the route weights do not lie side by side");
    input.route = static_cast<const float*>(weights.data);
  }
  site_.require(swiglu.results[0].data == nullptr, "the gated row leaves the launch");
  quantised(input, quantize);
  site_.require(input.results.codes == nullptr, "the gated row leaves the launch");
  return p_.inputs_count - 1;
}

Segment& StreamBuilder::segment(const Tensor& weight, const Tensor& scale, bool quantised, const Tensor& out, int input) {
  site_.require(p_.count < kMostSegments, "too many matrices");
  Segment& s = p_.segments[p_.count++];
  s.format = stream_format(weight, quantised);
  site_.require(s.format >= 0, "a matrix is not laid out for the streaming kernels");
  s.weight = weight.data;
  s.scale = static_cast<const unsigned char*>(scale.data);
  site_.require(s.scale == nullptr || scale.dtype == DType::kE8M0, "the scales of a matrix are not e8m0");
  s.rows = static_cast<int>(weight.dim(-2));
  s.tiles = (s.rows + 15) / 16;
  s.columns = static_cast<int>(weight.cols());
  s.out = out.data;
  s.out_pitch = out.pitch;
  s.out_f32 = out.dtype == DType::kF32;
  s.input = input;
  site_.require(s.out_f32 || out.dtype == DType::kBF16, "a product is neither bf16 nor f32");
  Input& in = p_.inputs[input];
  site_.require(in.columns == s.columns, "an input does not fit its matrix");
  (quantised ? in.quantised : in.bf16) = 1;
  return s;
}

void StreamBuilder::product(const Part& linear, int input) {
  segment(linear.operands[2], linear.operands[3], linear.present[1], linear.results[0], input);
}

void StreamBuilder::grouped(const Tensor& weight, const Tensor& scale, const Tensor& out, int groups, int input) {
  Segment& s = segment(weight, scale, false, out, input);
  site_.require(s.tiles % groups == 0, "a group has no whole tiles");
  s.tiles_per_group = s.tiles / groups;
  s.out_pitch = out.rank() == 4 ? out.dim(-2) * out.pitch : out.pitch;
  site_.require(out.rank() == 3 || out.pitch == out.cols() * 2, "groups of a result do not lie side by side");
}

void StreamBuilder::experts(const Part& linear, int input) {
  const Tensor &weight = linear.operands[2], &scale = linear.operands[3];
  Segment& s = segment(weight, scale, linear.present[1], linear.results[0], input);
  s.experts = static_cast<int>(weight.dim(0));
  s.expert_bytes = weight.nbytes() / weight.dim(0);
  s.expert_scale_bytes = scale.data ? scale.nbytes() / scale.dim(0) : 0;
}

void StreamBuilder::route(const Part& part) {
  Routing& r = p_.routing;
  const bool hash = part.op == "route_hash";
  const Tensor &logits = part.operands[0], &second = part.operands[1], &experts = part.results[0], &weights = part.results[1];
  r.kind = hash ? 2 : 1;
  r.count = static_cast<int>(logits.cols());
  r.choices = static_cast<int>(experts.cols());
  site_.require(r.count <= 384 && r.choices <= kMostChoices, "too many experts");
  r.logits = static_cast<const float*>(logits.data);
  r.logits_pitch = logits.pitch;
  if (hash) {
    r.table = second.data;
    r.table_i64 = second.dtype == DType::kI64;
    r.vocabulary = static_cast<int>(second.dim(0));
    r.tokens = site_.step->ids;
  } else {
    r.bias = second.data;
    r.bias_f32 = element_of(site_, second);
  }
  r.scale = static_cast<float>(part.number("scale"));
  r.experts = static_cast<int*>(experts.data);
  r.weights = static_cast<float*>(weights.data);
  r.experts_pitch = experts.pitch;
  r.weights_pitch = weights.pitch;
  site_.require(logits.data && r.experts && r.weights, "the choice of experts does not lie in memory");
}

void StreamBuilder::chosen(const Tensor& experts) {
  Routing& r = p_.routing;
  r.kind = 3;
  r.choices = static_cast<int>(experts.cols());
  site_.require(r.choices <= kMostChoices && experts.data, "too many experts");
  r.experts = static_cast<int*>(experts.data);
  r.experts_pitch = experts.pitch;
  choice_.emplace_back(experts.data, experts.nbytes());
}

Combine StreamBuilder::streams_behind(const DeviceSite& site, const Part* combine, const Tensor& after, const Part* mix) {
  Combine c{};
  c.on = 1;
  c.streams = static_cast<int>(after.dim(2));
  c.dim = static_cast<int>(after.cols());
  site.require(after.dtype == DType::kBF16 && after.data && c.streams <= 4 && c.dim % 16 == 0, "the streams do not fit");
  c.after = static_cast<unsigned short*>(after.data);
  c.after_pitch = after.pitch;
  if (combine) {
    const Tensor &before = combine->operands[1], &post = combine->operands[2], &comb = combine->operands[3];
    site.require(before.data && post.data && comb.data, "the streams before do not lie in memory");
    c.before = static_cast<const unsigned short*>(before.data);
    c.before_pitch = before.pitch;
    c.post = static_cast<const float*>(post.data);
    c.post_pitch = post.pitch;
    c.comb = static_cast<const float*>(comb.data);
    c.comb_pitch = comb.pitch;
    site.require(before.pitch % 16 == 0 && reinterpret_cast<uintptr_t>(before.data) % 16 == 0, "the streams before are not aligned");
  }
  if (mix) {
    const Tensor &fn = mix->operands[1], &logits = mix->results[0];
    site.require(fn.dtype == DType::kF32 && logits.layout == "hc_partials" && logits.cols() <= 24, "the mixing logits do not fit");
    c.fn = static_cast<const float*>(fn.data);
    c.logits = static_cast<int>(logits.cols());
    c.partials = static_cast<float*>(logits.data);
    c.eps = static_cast<float>(mix->number("eps"));
  }
  return c;
}

void StreamBuilder::combine(const Part& combine, const Part* mix) {
  p_.combine = streams_behind(site_, &combine, combine.results[0], mix);
  for (int i = 1; i < 4; ++i) early_.emplace_back(combine.operands[i].data, combine.operands[i].nbytes());
}

void StreamBuilder::add_shared(const Tensor& shared) {
  site_.require(shared.data && shared.dtype == DType::kBF16, "the shared expert's row is not bf16");
  p_.combine.shared = static_cast<const unsigned short*>(shared.data);
  p_.combine.shared_pitch = shared.pitch;
}

// Inputs of a step of several tokens lie in the workspace, or where they leave the launch to.
void StreamBuilder::stage() {
  for (int i = 0; i < p_.inputs_count; ++i) {
    Input& in = p_.inputs[i];
    Prepared& to = in.staged;
    to = in.results;
    if (in.kind == kGiven) {
      to.bf16 = static_cast<unsigned short*>(const_cast<void*>(in.x));
      to.bf16_pitch = in.x_pitch;
      continue;
    }
    const int64_t values = aligned(in.columns * 2), exponents = aligned(in.columns / 128);
    if (in.bf16 && to.bf16 == nullptr) {
      to.bf16 = reinterpret_cast<unsigned short*>(site_.take_workspace<char>(values * in.rows));
      to.bf16_pitch = values;
    }
    if (in.quantised) {
      to.values = reinterpret_cast<unsigned short*>(site_.take_workspace<char>(values * in.rows));
      to.values_pitch = values;
      if (to.exponents == nullptr) {
        to.exponents = reinterpret_cast<unsigned char*>(site_.take_workspace<char>(exponents * in.rows));
        to.exponents_pitch = exponents;
      }
    }
  }
}

// Inputs in shared memory from `offset` on; returns where they end.
int StreamBuilder::share(int offset, bool rows_side_by_side) {
  for (int i = 0; i < p_.inputs_count; ++i) {
    Input& in = p_.inputs[i];
    const int rows = rows_side_by_side ? in.rows : 1;
    in.shared_offset = offset;
    offset += rows * in.columns * 2 * (in.bf16 + in.quantised);
    in.shared_exponents = offset;
    if (in.quantised) offset += static_cast<int>(aligned(rows * (in.columns / 128), 16));
  }
  return offset;
}

bool StreamBuilder::leaves(const Input& in) {
  return in.results.bf16 || in.results.codes || in.pre || in.post || in.comb;
}

// The kernel with no more code than the launch needs.
StreamBuilder::Variant StreamBuilder::variant() const {
  unsigned formats = 0, kinds = 0;
  for (int i = 0; i < p_.count; ++i) formats |= 1u << p_.segments[i].format;
  for (int i = 0; i < p_.inputs_count; ++i) kinds |= 1u << p_.inputs[i].kind;
  struct Known {
    Variant variant;
    unsigned formats, kinds;
    bool combines, routes;
  };
  const Known known[] = {  // as in kernels/stream/stream.cu
      {{"normed", 8, 4}, kMask<kE4m3Quantised>, kMask<kRow>, false, false},
      {{"head", 8, 8}, kMask<kBf16Bf16>, kMask<kStreams>, false, false},
      {{"sublayer", 8, 4}, kMask<kE4m3Quantised, kBf16Bf16, kRowsBf16>, kMask<kStreams>, false, false},
      {{"combined", 8, 4}, kMask<kE4m3Quantised>, kMask<kRow>, true, false},
      {{"experts", 12, 3}, kMask<kE4m3Quantised, kE2m1Quantised>, kMask<kGated, kCodes>, false, true},
      {{"grouped", 8, 4}, kMask<kE4m3Bf16>, kMask<kGiven>, false, false},
  };
  const bool combines = p_.combine.on != 0, routes = p_.routing.kind != 0;
  for (const Known& k : known) {
    if (p_.rows > 1 && std::string(k.variant.name) == "head") continue;
    const bool fits = (formats & ~k.formats) == 0 && (kinds & ~k.kinds) == 0;
    if (fits && combines == k.combines && routes == k.routes) return k.variant;
  }
  return {"any", 8, 4};
}

DeviceLaunch StreamBuilder::launch(const std::string& name, int blocks, int warps, int shared_bytes) {
  if (!memory_) memory_ = site_.device->upload(&p_, sizeof p_);
  DeviceLaunch made = site_.launch(name, blocks, warps * 32, StreamLaunch{static_cast<const StreamParams*>(memory_.get()), {}},
                                    shared_bytes);
  made.memory = memory_;
  return made;
}

void StreamBuilder::slice(Segment& s) const {
  for (int i = 0; i <= p_.warps_per_tile; ++i) s.begins[i] = static_cast<short>(blocks_of(s) * i / p_.warps_per_tile);
}

void StreamBuilder::take_part(DeviceLaunch& launch) const {
  launch.waits = true;
  launch.choice = choice_;
  launch.early = early_;
}

int StreamBuilder::keep(int offset, int tiles) {
  Combine& c = p_.combine;
  if (!c.on) return offset;
  c.slots = (tiles + p_.streamers - 1) / p_.streamers;
  p_.shared_kept = static_cast<int>(aligned(offset, 16));
  const int without = p_.shared_kept + kept_bytes(c, p_.rows, false), with = p_.shared_kept + kept_bytes(c, p_.rows, true);
  c.fetches_fn = c.fn != nullptr && with <= kMostShared;
  return c.fetches_fn ? with : without;
}

DeviceLaunch StreamBuilder::preparation() {
  int rows = 1;
  for (int i = 0; i < p_.inputs_count; ++i) rows = std::max(rows, p_.inputs[i].rows);
  const bool routes = p_.routing.kind == 1 || p_.routing.kind == 2;
  DeviceLaunch made = launch("stream_prepare", rows, 8, kScratchBytes);
  made.grid[1] = p_.inputs_count + routes;
  made.waits = true;
  return made;
}

std::vector<DeviceLaunch> StreamBuilder::launches() {
  std::sort(p_.segments, p_.segments + p_.count, [](const Segment& a, const Segment& b) { return blocks_of(a) > blocks_of(b); });
  std::vector<int> tiles, expert_tiles;
  for (int i = 0; i < p_.count; ++i) {
    const Segment& s = p_.segments[i];
    (s.experts ? expert_tiles : tiles).insert((s.experts ? expert_tiles : tiles).end(), s.tiles, blocks_of(s));
  }
  p_.jobs = static_cast<int>(tiles.size());
  p_.expert_tiles = static_cast<int>(expert_tiles.size());
  if (p_.expert_tiles) {
    site_.require(p_.routing.kind != 0, "experts without a choice");
    for (int e = 0; e < p_.rows * p_.routing.choices; ++e) tiles.insert(tiles.end(), expert_tiles.begin(), expert_tiles.end());
  }
  bool grouped = false, prepares = p_.routing.kind == 1 || p_.routing.kind == 2;
  int sides = 0;
  for (int i = 0; i < p_.count; ++i) grouped |= p_.segments[i].tiles_per_group > 0;
  for (int i = 0; i < p_.inputs_count; ++i) {
    prepares |= p_.inputs[i].kind != kGiven;
    if (leaves(p_.inputs[i])) sides = i + 1;  // block i behind the streaming ones makes input i's results
  }
  const int multiprocessors = site_.device->multiprocessors();
  bool one = p_.rows == 1;
  const Variant kernel = variant();
  for (int attempt = 0; attempt < 2; ++attempt) {
    int streamers = std::max(1, multiprocessors - (one ? sides : 0));
    p_.warps_per_tile = best_warps_per_tile(tiles, streamers, kernel.warps);
    if (p_.combine.on) {
      streamers = std::clamp(streamers, (p_.jobs + kMostSlots - 1) / kMostSlots, kPartialBlocks);
      site_.require(p_.jobs <= streamers * kMostSlots, "too many rows behind which streams are combined");
    }
    p_.streamers = streamers;
    p_.side_by_side = one && grouped;
    if (p_.side_by_side) {
      const Segment& s = p_.segments[0];
      if (p_.count > 1 || (p_.jobs + streamers - 1) / streamers > s.tiles_per_group) {  // a block has two groups at most
        one = false;
        continue;
      }
    }
    for (int i = 0; i < p_.count; ++i) slice(p_.segments[i]);
    int offset = kernel.warps * kernel.stages * kSlotBytes;
    p_.shared_sums = p_.shared_scratch = offset;  // the scratch of inputs is done with before the first sum
    offset += std::max(kernel.warps * 2 * (one ? 64 : 512), kScratchBytes);
    if (p_.side_by_side) {  // of two groups
      p_.inputs[0].shared_offset = offset;
      offset += 2 * p_.segments[0].columns * 2;
    } else if (one) {
      offset = share(offset, false);
    }
    offset = keep(offset, p_.jobs);
    if (offset <= kMostShared) {
      const std::string name = std::string("stream_") + kernel.name + (one ? "_one" : "_many");
      if (!one) stage();
      DeviceLaunch stream = launch(name, streamers + (one ? sides : 0), kernel.warps, offset);
      take_part(stream);
      stream.chooses = one && (p_.routing.kind == 1 || p_.routing.kind == 2);
      if (one || !prepares) return {stream};
      return {preparation(), stream};
    }
    one = false;  // too wide a row: as for several tokens
  }
  site_.require(false, "the launch does not fit");
  return {};
}

std::vector<DeviceLaunch> StreamBuilder::expert_sums() {
  Segment& s = p_.segments[0];
  site_.require(p_.count == 1 && s.experts && p_.combine.on && p_.combine.shared, "the experts' sum does not fit");
  const int choices = p_.routing.choices;
  const bool usual = s.format == kE2m1Quantised;
  for (bool one : {p_.rows == 1, false}) {
    const int warps = kExpertWarps, groups = warps / kExpertWarpsPerTile, most_blocks = (s.tiles + kMostSlots - 1) / kMostSlots;
    p_.warps_per_tile = kExpertWarpsPerTile;
    const int streamers = std::clamp(site_.device->multiprocessors(), most_blocks, kPartialBlocks);
    site_.require(s.tiles <= streamers * kMostSlots, "too many rows behind which streams are combined");
    p_.streamers = streamers;
    slice(s);
    int offset = warps * kExpertStages * kSlotBytes;
    p_.shared_sums = p_.shared_scratch = offset;
    offset += groups * 2 * p_.rows * choices * 16 * 4;
    if (one) offset = share(static_cast<int>(aligned(offset)), true);
    offset = keep(offset, s.tiles);
    if (offset > kMostShared) continue;
    if (!one) stage();
    const std::string name = std::string("expert_sums") + (usual ? "" : "_any") + (one ? "_one" : "_many");
    DeviceLaunch sums = launch(name, streamers, warps, offset);
    take_part(sums);
    if (one) return {sums};
    return {preparation(), sums};
  }
  site_.require(false, "the launch does not fit");
  return {};
}

}  // namespace rewright
