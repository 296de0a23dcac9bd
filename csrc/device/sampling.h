// The sampling kernel bound to memory: it stands behind the launches of a decode step, in no plan.
#pragma once

#include <string>
#include <vector>

#include "../kernels/sampling/sample.h"
#include "driver.h"

namespace rewright {

class DeviceSampler {
 public:
  // All addresses of `params` are the card's and outlive the sampler. Throws DeviceError or PlanError.
  DeviceSampler(Device& device, const SampleParams& params, int batch);
  void run(uintptr_t stream) const { device_.launch(launch_, stream); }
  // Names of the kernels that `run` launches.
  std::vector<std::string> kernels() const { return {launch_.function.name}; }

 private:
  Device& device_;
  DeviceLaunch launch_;
};

// A row that is about to draw its first token in a loop. Throws PlanError for more stop tokens than a row has.
SampleRow sample_row(double temperature, double top_p, uint64_t seed, uint64_t draw, int left, const std::vector<int>& stop);

}  // namespace rewright
