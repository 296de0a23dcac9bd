// Puts the parameters of a streaming launch together (kernels/stream).
#pragma once

#include "../kernels/stream/stream.h"
#include "device_kernel.h"

namespace rewright {

class StreamBuilder {
 public:
  explicit StreamBuilder(DeviceSite& site);

  // Inputs: each returns its index. Tensors that lie in memory are written, others stay in the launch.
  int given(const Tensor& x, bool grouped = false);
  int codes(const Tensor& x, const Tensor& scale);
  int row(const Tensor& x, const Part* norm, const Part* quantize);
  int streams(const Part& split, const Part& collapse, const Part* norm, const Part* quantize);
  int gated(const Part& swiglu, const Part* quantize);

  // The product of an input with a part's matrix. `x` says whether the part reads codes.
  void product(const Part& linear, int input);
  void grouped(const Tensor& weight, const Tensor& scale, const Tensor& out, int groups, int input);
  // The same for one matrix per expert.
  void experts(const Part& linear, int input);
  void route(const Part& part);
  // Experts that an earlier launch has chosen.
  void chosen(const Tensor& experts);
  // Streams behind the product, and the parts of the mixing logits where `mix` is given.
  void combine(const Part& combine, const Part* mix);
  void add_shared(const Tensor& shared);

  static Combine streams_behind(const DeviceSite& site, const Part* combine, const Tensor& after, const Part* mix);

  std::vector<DeviceLaunch> launches();
  std::vector<DeviceLaunch> expert_sums();

 private:
  Input& add(int kind, const Tensor& x, int columns, int rows);
  void quantised(Input& input, const Part* quantize);
  void normed(Input& input, const Part& norm);
  Segment& segment(const Tensor& weight, const Tensor& scale, bool quantised, const Tensor& out, int input);
  void stage();
  int share(int offset, bool rows_side_by_side);
  static bool leaves(const Input& input);
  struct Variant {
    const char* name;
    int warps, stages;
  };
  Variant variant() const;
  // Shared memory from `offset` on that a block's part of the combined streams takes.
  int keep(int offset, int tiles);
  DeviceLaunch launch(const std::string& name, int blocks, int warps, int shared_bytes);
  void take_part(DeviceLaunch& launch) const;
  void slice(Segment& s) const;  // a tile's blocks between its warps
  DeviceLaunch preparation();
  int rows() const { return site_.rows(); }

  DeviceSite& site_;
  StreamParams p_{};
  std::shared_ptr<void> memory_;  // the card's copy of it
  std::vector<std::pair<const void*, size_t>> choice_, early_;  // what launches read before they wait
};

// Bytes from one row's scales to the next's: none where calibrated ones serve all rows.
inline int64_t scales_pitch(const Tensor& scales) { return scales.rank() == 1 ? 0 : scales.pitch; }

// The format of a product with a weight, -1 where the streaming kernels have none.
int stream_format(const Tensor& weight, bool quantised_input);

}  // namespace rewright
