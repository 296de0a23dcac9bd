// What a kernel of the sm80 target is on the host: a function that turns a launch of a plan into launches
// of the card, made when the plan is loaded and replayed every step.
#pragma once

#include <cstring>

#include "../runtime/kernel.h"
#include "driver.h"

namespace rewright {

// One op of a launch that computes several.
struct Part {
  std::string where;  // for messages
  std::string op;
  std::vector<Tensor> operands;  // in the op's order; values between parts have a type but no memory
  std::vector<bool> present;     // false: an optional operand that is absent
  std::vector<Tensor> results;
  std::map<std::string, Attr> attrs;

  // Attributes; PlanError where one is missing or of another type.
  int64_t integer(const char* name) const;
  double number(const char* name) const;
  std::string text(const char* name) const;
};

// A launch of a plan with its operands in the card's memory.
class DeviceSite : public CallSite {
 public:
  std::vector<Part> parts;  // empty where the launch computes one op: then operands, results and attrs say all
  Device* device = nullptr;

  // The rows of the step: B times T.
  int rows() const { return step->batch * step->tokens; }

  // A launch of the kernel `name` with its parameter struct.
  template <typename Params>
  DeviceLaunch launch(const std::string& name, unsigned blocks, unsigned threads, const Params& params,
                      unsigned shared_bytes = 0) const {
    static_assert(std::is_trivially_copyable_v<Params>);
    static_assert(sizeof(Params) <= 4096, "a launch passes 4 KB of parameters at most");
    DeviceLaunch made;
    made.function = device->function(name, shared_bytes, sizeof(Params));
    made.grid[0] = blocks;
    made.threads = threads;
    made.shared_bytes = shared_bytes;
    made.params.assign((sizeof(Params) + 7) / 8, 0);
    made.params_bytes = sizeof(Params);
    std::memcpy(made.params.data(), &params, sizeof(Params));
    if constexpr (requires { params.order; }) {
      made.order_offset = static_cast<int>(reinterpret_cast<const char*>(&params.order) - reinterpret_cast<const char*>(&params));
      made.ends = true;
    }
    return made;
  }
};

using MakeLaunches = std::vector<DeviceLaunch> (*)(DeviceSite&);

struct DeviceEntry {
  std::string signature;  // as codegen/kernel.py spells it
  MakeLaunches make;
};

using DeviceRegistry = std::map<std::string, DeviceEntry>;

// Every kernel of the sm80 target by symbol.
const DeviceRegistry& device_registry();

}  // namespace rewright
