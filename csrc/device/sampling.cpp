#include "sampling.h"

#include <algorithm>
#include <cstring>

#include "../runtime/error.h"

namespace rewright {

namespace {
constexpr int kMostVocabulary = 1 << 18;  // the sum of so many weights fits 64 bits
}

DeviceSampler::DeviceSampler(Device& device, const SampleParams& params, int batch) : device_(device) {
  check(0 < params.vocabulary && params.vocabulary <= kMostVocabulary, "the card samples from 1 to 262144 logits");
  check(0 < batch && batch <= params.ring_rows && 0 < params.ring_length, "the ring is too small");
  launch_.function = device.function("sample", 0, sizeof(SampleParams));
  launch_.grid[0] = static_cast<unsigned>(batch);
  launch_.threads = 1024;
  launch_.params.assign((sizeof(SampleParams) + 7) / 8, 0);
  launch_.params_bytes = sizeof(SampleParams);
  std::memcpy(launch_.params.data(), &params, sizeof(SampleParams));
}

SampleRow sample_row(double temperature, double top_p, uint64_t seed, uint64_t draw, int left, const std::vector<int>& stop) {
  check(stop.size() <= kMostStops, "a row has at most " + std::to_string(kMostStops) + " stop tokens");
  SampleRow row{};
  row.temperature = temperature;
  row.top_p = top_p;
  row.seed = seed;
  row.draw = draw;
  row.left = left;
  row.stops = static_cast<int>(stop.size());
  std::copy(stop.begin(), stop.end(), row.stop);
  return row;
}

}  // namespace rewright
